"""Documents to pairs of a text and a contextual span of it: the rows that CoT-MoTE is pre-trained on (arXiv 2304.10195).

Documents are packed into spans as for RetroMAE (`build_spans`). Each span is the text of one row for every kind of context:

- `neighbour`: the span after it in its document, the one before it for the last;
- `overlap`: a span that shares half of it and goes on where it ends (the last: begins before it);
- `query`: a pseudo-query for it. And the other way round: a row whose text is the query, and whose context is the span.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.row_cache import document_rows
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document, SourceLike
from revela_hub.data.text.pseudo_queries import PseudoQueries
from revela_hub.data.text.spans import (
    MIN_TOKENS,
    DocumentTokens,
    SpanSettings,
    check_tokenizer,
    packed_spans,
    tokenized_documents,
    tokenizer_digest,
)
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Context: TypeAlias = Literal["neighbour", "overlap", "query"]
CONTEXTS: tuple[Context, ...] = get_args(Context)
EXPERTS = ("query", "passage")
"""What a row's `expert` counts into."""

SPANS_AT_ONCE = 2048
"""Spans whose queries are asked for together; extracted queries are weighed against these."""

_FORMAT = 1  # of the cached rows: to be raised when the same settings make other rows


def build_contexts(
    sources: Iterable[SourceLike] | SourceLike,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    contexts: Sequence[str] = CONTEXTS,
    queries: PseudoQueries | None = None,
    max_length: int = 144,
    min_tokens: int = MIN_TOKENS,
    language: str = "en",
    max_spans: int | None = None,
    cache_dir: str | Path | None = None,
    report: ReadReport | None = None,
) -> "Dataset":
    """Makes the rows of the sources' documents, or takes them from the cache (see `revela_hub.data.row_cache`).

    Args:
        sources: As for `read_documents`; all of them make one stream of documents.
        tokenizer: Of a masked language model; a fast one, as it has to tell which tokens make a word.
        contexts: Kinds of context, of those above.
        queries: What writes the queries; needed for the kind `query`, and for no other.
        max_length: Tokens of a text at most, with the special tokens `[CLS]` and `[SEP]`, which are not in it yet.
        min_tokens: Spans of fewer tokens, without special ones, are left out (and counted).
        language: ISO 639-1 code, for the ends of sentences.
        max_spans: Stop after as many spans.
        cache_dir: Where the rows are kept; by default in the cache of `datasets`.
        report: Is counted up (with the counts of the run that wrote the rows, if they come from the cache).

    Returns:
        A data set with the columns `row` (int64, its number, which its masks are drawn from), `expert` (uint8: 0, the text
        is a query; 1, a passage), `input_ids` and `word_starts` (int32 and uint8, of one length, as `build_spans` makes
        them) of the text, `context_ids` and `context_word_starts` of the context.

    Raises:
        UserError: Anything `read_documents` raises; a tokenizer that does not suit; settings or data without a row.
    """
    import datasets

    settings = SpanSettings(max_length, min_tokens, language, max_spans)
    _check_contexts(contexts, queries)
    check_tokenizer(tokenizer)
    tokens, starts = datasets.List(datasets.Value("int32")), datasets.List(datasets.Value("uint8"))
    features = {"row": datasets.Value("int64"), "expert": datasets.Value("uint8")}
    features |= {"input_ids": tokens, "word_starts": starts, "context_ids": tokens, "context_word_starts": starts}
    made_with = {
        "format": _FORMAT,
        **{name: version(name) for name in ("sentencex", "tokenizers")},
        **vars(settings),
        "tokenizer": tokenizer_digest(tokenizer),
        "contexts": sorted(contexts),
        "queries": None if queries is None else {"what": queries.description, "each": vars(queries).get("queries")},
    }
    rows = partial(_rows, tokenizer, settings, tuple(contexts), queries)
    return document_rows("contexts", sources, features, made_with, rows, cache_dir, report)


def _check_contexts(contexts: Sequence[str], queries: PseudoQueries | None) -> None:
    if not contexts or (unknown := [name for name in contexts if name not in CONTEXTS]):
        raise UserError(
            f"contexts must be one or more of {', '.join(CONTEXTS)}, got {unknown[0] if contexts else 'none'}"
        )
    if len(set(contexts)) < len(contexts):
        raise UserError(f"contexts must be different ones, got {' '.join(contexts)}")
    if ("query" in contexts) != (queries is not None):
        raise UserError("contexts with query need something that writes the queries, and others do not")


def _rows(
    tokenizer: "PreTrainedTokenizerBase",
    settings: SpanSettings,
    contexts: Sequence[str],
    queries: PseudoQueries | None,
    documents: Iterable[Document],
    report: ReadReport,
) -> Iterator[dict[str, Any]]:
    """The rows, numbered."""
    number = 0
    spans = _spans(documents, tokenizer, settings, contexts, report)
    while batch := list(islice(spans, SPANS_AT_ONCE)):
        asked: list[list[_Text]] = [[] for _ in batch]
        if queries is not None:
            passages = [tokenizer.decode(span["text"][0], skip_special_tokens=True) for span in batch]
            asked = [
                _tokenized(texts, tokenizer, settings.max_length - 2)
                for texts in queries([str(passage) for passage in passages])
            ]
        for span, texts in zip(batch, asked, strict=True):
            pairs = [(1, span["text"], context) for context in span["contexts"]]
            for query in texts:
                pairs += [(1, span["text"], query), (0, query, span["text"])]
            if not pairs:
                report.skipped["alone in its document"] += 1
            for expert, (ids, starts), (context_ids, context_starts) in pairs:
                yield {
                    "row": number,
                    "expert": expert,
                    "input_ids": ids,
                    "word_starts": starts,
                    "context_ids": context_ids,
                    "context_word_starts": context_starts,
                }
                number += 1
    if not number:
        raise UserError(
            f"the data make no text of at least {settings.min_tokens} tokens with a contextual span: give longer"
            " documents, lower max_length or min_tokens, or add query to the contexts"
        )


_Text: TypeAlias = tuple[np.ndarray, np.ndarray]  # tokens, and where words begin


def _spans(
    documents: Iterable[Document],
    tokenizer: "PreTrainedTokenizerBase",
    settings: SpanSettings,
    contexts: Sequence[str],
    report: ReadReport,
) -> Iterator[dict[str, Any]]:
    """The spans that are long enough, each with the contexts that its document has for it."""
    capacity = settings.max_length - 2
    for document in tokenized_documents(documents, tokenizer, settings, report):
        kept = []
        for start, end in packed_spans(document, capacity, report):
            if end - start < settings.min_tokens:
                report.skipped["too short"] += 1
            else:
                kept.append((start, end))
        word_starts = np.append(np.flatnonzero(document.word_starts), len(document.tokens))
        for number, (start, end) in enumerate(kept):
            found = []
            if "neighbour" in contexts and len(kept) > 1:
                found.append(_text(document, *kept[number + 1 if number + 1 < len(kept) else number - 1]))
            if "overlap" in contexts:
                other = _overlap(word_starts, start, end, capacity)
                if other[1] - other[0] >= settings.min_tokens and not start <= other[0] < other[1] <= end:
                    found.append(_text(document, *other))
            yield {"text": _text(document, start, end), "contexts": found}
            report.spans += 1
            if report.spans == settings.max_spans:
                return


def _overlap(word_starts: NDArray[np.int64], start: int, end: int, capacity: int) -> tuple[int, int]:
    """From the middle of the span as far as fits; at the end of the document, as far back from there.

    Args:
        word_starts: where the document's words begin, and its end.
        start: the span's first token.
        end: the one after its last.
        capacity: tokens of the context at most.
    """

    def word_at(token: int) -> int:
        return int(word_starts[min(int(np.searchsorted(word_starts, token)), len(word_starts) - 1)])

    middle = word_at((start + end) // 2)
    last = word_starts[np.searchsorted(word_starts, min(middle + capacity, word_starts[-1]), side="right") - 1]
    if last > end:
        return middle, int(last)
    return word_at(max(0, middle - capacity)), middle


def _text(document: DocumentTokens, start: int, end: int) -> _Text:
    starts = document.word_starts[start:end].astype(np.uint8)
    starts[0] = 1  # also of a word that was cut
    return document.tokens[start:end], starts


def _tokenized(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase", capacity: int) -> list[_Text]:
    """Short texts, cut where they are too long; those without a token are left out."""
    found = []
    for text in texts:
        encoding = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        words = [-1 if word is None else word for word in encoding.word_ids(0)]
        starts = (np.diff(np.array(words, dtype=np.int64), prepend=-2) != 0).astype(np.uint8)
        if words:
            starts[0] = 1
            found.append((np.array(encoding["input_ids"][:capacity], dtype=np.int64), starts[:capacity]))
    return found
