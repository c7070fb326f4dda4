"""Making pairs of a text and a contextual span, for contextual pre-training (arXiv 2304.10195).

Documents are packed into spans by `build_spans`. Each span is the text of one row per kind of context:

- `neighbour`: the next span of its document (for the last span, the previous one);
- `query`: an extracted pseudo-query for it; in addition, a row with the query as the text and the span as its context.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from revela_hub.data.row_cache import RowMaker, Types, document_rows
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document, SourceLike
from revela_hub.data.text.masking import Vocabulary
from revela_hub.data.text.pseudo_queries import ExtractiveQueries
from revela_hub.data.text.spans import SpanSettings, packed_spans, tokenized_documents, tokenized_runs, tokenized_with
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

Context: TypeAlias = Literal["neighbour", "query"]
CONTEXTS: tuple[Context, ...] = get_args(Context)

SPANS_AT_ONCE = 2048
"""Spans whose queries are generated together; the word weights of extracted queries are computed on these spans."""


def build_contexts(
    sources: Iterable[SourceLike] | SourceLike,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    contexts: Sequence[str] = CONTEXTS,
    queries: ExtractiveQueries | None = None,
    **options: Any,
) -> "Dataset | IterableDataset":
    """Make rows from the sources' documents, or read them from the cache (see `revela_hub.data.row_cache`).

    Args:
        sources: As for `read_documents`; together they form one stream of documents.
        tokenizer: As for `build_spans`.
        contexts: Kinds of context, see above.
        queries: The query generator; required for the kind `query`, and only for it.
        **options: As for `build_spans`; `max_length` is 144 by default.

    Returns:
        A data set with the columns `row` (int64, its number, the seed of its masks), `expert` (uint8: 0 if the text is a
        query, 1 if it is a passage), `input_ids` and `word_starts` of the text (int32 and uint8, of equal length, as in
        `build_spans`), `context_ids` and `context_word_starts` of the context.

    Raises:
        UserError: As `read_documents`; an unsuitable tokenizer; settings or data without any row.
    """
    made = SpanSettings.taken_from(options, max_length=144)
    if not contexts or not {*contexts} <= {*CONTEXTS}:
        raise UserError(f"contexts must be one or more of {', '.join(CONTEXTS)}, not {', '.join(contexts) or 'none'}")
    if ("query" in contexts) != (queries is not None):
        raise UserError("contexts with query need a query generator, and others do not")
    Vocabulary.of(tokenizer)  # it must be one that masks can be made for
    types: Types = {"row": "int64", "expert": "uint8", "input_ids": ["int32"], "word_starts": ["uint8"]}
    types = {**types, "context_ids": ["int32"], "context_word_starts": ["uint8"]}
    made_with = {
        **tokenized_with(tokenizer, made),
        "contexts": sorted({*contexts}),
        "queries": None if queries is None else {"what": queries.description, "each": queries.queries},
    }
    rows = partial(_rows, tokenizer, made, {*contexts}, queries)
    few = "the data contain no text with a contextual span: use longer documents"
    maker = RowMaker("contexts", types, made_with, rows, few, max_rows=made.max_spans)
    return document_rows(maker, sources, **options)


def _rows(
    tokenizer: "PreTrainedTokenizerBase",
    settings: SpanSettings,
    contexts: set[str],
    queries: ExtractiveQueries | None,
    documents: Iterable[Document],
    report: ReadReport,
) -> Iterator[dict[str, Any]]:
    spans = _spans(documents, tokenizer, settings, contexts, report)
    while batch := list(islice(spans, SPANS_AT_ONCE)):
        asked: list[list[_Text]] = [[] for _ in batch]
        if queries is not None:
            passages = [tokenizer.decode(span["text"][0], skip_special_tokens=True) for span in batch]
            written = queries([str(passage) for passage in passages])
            asked = [_tokenized(texts, tokenizer, settings) for texts in written]
        for span, texts in zip(batch, asked, strict=True):
            pairs = [(1, span["text"], context) for context in span["contexts"]]
            for query in texts:
                pairs += [(1, span["text"], query), (0, query, span["text"])]
            if not pairs:
                report.skipped["alone in its document"] += 1
            for expert, (ids, starts), (context_ids, context_starts) in pairs:
                row = {"expert": expert, "input_ids": ids, "word_starts": starts}
                yield row | {"context_ids": context_ids, "context_word_starts": context_starts}


_Text: TypeAlias = tuple[np.ndarray, np.ndarray]  # tokens and word starts


def _spans(
    documents: Iterable[Document],
    tokenizer: "PreTrainedTokenizerBase",
    settings: SpanSettings,
    contexts: set[str],
    report: ReadReport,
) -> Iterator[dict[str, Any]]:
    """Yield the spans that are long enough, with their contexts from the same document."""
    for document in tokenized_documents(documents, tokenizer, settings, report):
        kept = list(packed_spans(document, settings, report))
        for number, (start, end) in enumerate(kept):
            found = []
            if "neighbour" in contexts and len(kept) > 1:
                found.append(document.span(*kept[number + 1 if number + 1 < len(kept) else number - 1]))
            yield {"text": document.span(start, end), "contexts": found}
            report.spans += 1


def _tokenized(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase", settings: SpanSettings) -> list[_Text]:
    """Tokenise and truncate texts; texts without any token are skipped."""
    found = tokenized_runs([[text] for text in texts if text], tokenizer) if any(texts) else ()
    return [document.span(0, settings.max_length - 2) for document in found if len(document.tokens)]
