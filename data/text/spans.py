"""Packing documents into spans of tokens, the rows of masked pre-training.

A span has as many consecutive whole sentences of one document (lines of code) as fit into `max_length` tokens. Text is
tokenised in runs of sentences, not sentence by sentence, so the tokens are those of running text. Text is never parsed as
special tokens (such as `</s>` in a page about HTML).

The first token of each word is marked, as reported by the tokenizer's pre-tokenizer, so whole words can be masked with
WordPiece, byte-level BPE and SentencePiece alike. In scripts without spaces, where a word would be a whole sentence, each
token is a word.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.row_cache import RowMaker, Types, document_rows
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document, SourceLike
from revela_hub.data.text.chunks import document_pieces
from revela_hub.data.text.masking import Bools, Tokens, Vocabulary
from revela_hub.data.text.words import UNSPACED_CHARACTER
from revela_hub.files import key_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import BatchEncoding, PreTrainedTokenizerBase

T = TypeVar("T")

MIN_TOKENS = 8
RUN_CHARACTERS = 50_000
"""Characters of a run of sentences that is tokenised together; an encoding takes about 50 bytes per character."""
BATCH_CHARACTERS = 1_000_000
"""Characters per call of the tokenizer, which uses all cores."""


@dataclass(frozen=True)
class SpanSettings:
    """The settings of spans.

    Attributes:
        max_length: Maximum number of tokens of a span, including the two special tokens that the collator adds.
        min_tokens: Minimum number of tokens without special tokens; shorter spans are skipped.
        language: ISO 639-1 code, for sentence segmentation.
        max_spans: Stop after this many rows.
    """

    max_length: int = 512
    min_tokens: int = MIN_TOKENS
    language: str = "en"
    max_spans: int | None = None

    @classmethod
    def taken_from(cls, options: dict[str, Any], **defaults: Any) -> "SpanSettings":
        """Remove the settings from options."""
        return cls(**defaults | {each.name: options.pop(each.name) for each in fields(cls) if each.name in options})


def build_spans(
    sources: Iterable[SourceLike] | SourceLike,
    tokenizer: "PreTrainedTokenizerBase",
    **options: Any,
) -> "Dataset | IterableDataset":
    """Make spans of the sources' documents, or read them from the cache (see `revela_hub.data.row_cache`).

    Args:
        sources: As for `read_documents`; together they form one stream of documents.
        tokenizer: The fast tokenizer of a masked language model, which must report the words of its tokens.
        **options: Fields of `SpanSettings`; `cache_dir` (default: the cache of `datasets`), `report` (its counts are updated),
            `streaming` (return an `IterableDataset`, whose rows are made while they are read and not cached) and `num_proc` (processes
            that make the rows, which do not depend on their number).

    Returns:
        A data set with one row per span: `span` (int64, its number, the seed of its masks), `input_ids` (int32, without
        special tokens) and `word_starts` (uint8, 1 for the first token of a word), of equal length.

    Raises:
        UserError: As `read_documents`; an unsuitable tokenizer; settings or data without any span.
    """
    made = SpanSettings.taken_from(options)
    Vocabulary.of(tokenizer)  # it must be one that masks can be made for
    types: Types = {"span": "int64", "input_ids": ["int32"], "word_starts": ["uint8"]}
    rows, made_with = partial(_rows, tokenizer, made), tokenized_with(tokenizer, made)
    few = f"the data contain no span of at least {made.min_tokens} tokens"
    maker = RowMaker("spans", types, made_with, rows, few, max_rows=made.max_spans)
    return document_rows(maker, sources, **options)


def tokenized_with(tokenizer: "PreTrainedTokenizerBase", settings: SpanSettings) -> dict[str, Any]:
    """Return everything that the tokens of spans depend on besides the sources, for the cache."""
    versions = {name: version(name) for name in ("sentencex", "tokenizers")}
    backend: Any = tokenizer
    # Without its truncation and padding, which are state.
    content = json.loads(backend.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    return {**versions, **vars(settings), "tokenizer": key_of(content)}


class DocumentTokens(NamedTuple):
    """A tokenised document or a part of one, without special tokens.

    `offsets` (L, 2) are the start and the end of each token in the text, `word_starts` (L,) marks the first token of each word, and
    `lengths` are the numbers of tokens of the pieces (sentences or lines).
    """

    text: str
    tokens: Tokens
    offsets: Tokens
    word_starts: Bools
    lengths: Tokens

    def span(self, start: int, end: int | None) -> tuple[Tokens, NDArray[np.uint8]]:
        """Return the tokens and word starts of a span."""
        word_starts = self.word_starts[start:end].astype(np.uint8)
        word_starts[:1] = 1  # even inside a word that was split
        return self.tokens[start:end], word_starts

    def span_text(self, start: int, end: int) -> str:
        """Return the text of a span."""
        return self.text[self.offsets[start, 0] : self.offsets[end - 1, 1]].strip()


def _rows(
    tokenizer: "PreTrainedTokenizerBase", settings: SpanSettings, documents: Iterable[Document], report: ReadReport
) -> Iterator[dict[str, Any]]:
    for document in tokenized_documents(documents, tokenizer, settings, report):
        for start, end in packed_spans(document, settings, report):
            tokens, word_starts = document.span(start, end)
            report.spans += 1
            yield {"input_ids": tokens, "word_starts": word_starts}


def packed_spans(document: DocumentTokens, settings: SpanSettings, report: ReadReport) -> Iterator[tuple[int, int]]:
    """Yield the first token and the end of each span that is long enough: whole pieces; longer ones are split before a word."""
    for start, end in _packed(document, settings.max_length - 2, report):
        if end - start >= settings.min_tokens:
            yield start, end
        else:
            report.skipped["too short"] += 1


def _packed(document: DocumentTokens, capacity: int, report: ReadReport) -> Iterator[tuple[int, int]]:
    word_starts = np.flatnonzero(document.word_starts)
    start = end = 0
    for length in document.lengths.tolist():
        if end > start and end + length - start > capacity:
            yield start, end
            start = end
        end += length
        report.cut += end - start > capacity
        while end - start > capacity:
            last = int(word_starts[np.searchsorted(word_starts, start + capacity, side="right") - 1])
            cut = last if last > start else start + capacity
            yield start, cut
            start = cut
    if end > start:
        yield start, end


def tokenized_documents(
    documents: Iterable[Document], tokenizer: "PreTrainedTokenizerBase", settings: SpanSettings, report: ReadReport
) -> Iterator[DocumentTokens]:
    """Tokenise documents in batches; a long one in several runs of pieces, which are like separate documents."""
    # A piece has at most as many words as a span has tokens: tables and lists that form longer "sentences" are split
    # at their lines, as in chunks.
    pieces = (
        document_pieces(document, settings.max_length - 2, language=settings.language, report=report)
        for document in documents
    )
    runs = (run for of_document in pieces for run in _grouped(of_document, len, RUN_CHARACTERS))
    for batch in _grouped(runs, lambda run: sum(map(len, run)), BATCH_CHARACTERS):
        yield from tokenized_runs(batch, tokenizer)


def tokenized_runs(runs: list[list[str]], tokenizer: "PreTrainedTokenizerBase") -> Iterator[DocumentTokens]:
    """Tokenise texts that are given as runs of pieces."""
    texts = list(map("".join, runs))
    encoding = tokenizer(
        texts,
        add_special_tokens=False,
        split_special_tokens=True,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no warnings about texts longer than the model's positions
    )
    for number, (text, run) in enumerate(zip(texts, runs, strict=True)):
        yield _run_tokens(encoding, number, text, run)


def _grouped(items: Iterable[T], length: Callable[[T], int], enough: int) -> Iterator[list[T]]:
    """Yield lists of consecutive items; a list ends when it has enough characters."""
    group: list[T] = []
    characters = 0
    for item in items:
        group.append(item)
        characters += length(item)
        if characters >= enough:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _run_tokens(encoding: "BatchEncoding", number: int, text: str, pieces: list[str]) -> DocumentTokens:
    """Return the tokens of one run; a word belongs to the piece in which its first token ends."""
    tokens = np.array(encoding["input_ids"][number], dtype=np.int64)
    if not len(tokens):
        none = np.zeros((0, 2), dtype=np.int64)
        return DocumentTokens(text, tokens, none, np.zeros(0, dtype=np.bool_), np.zeros(len(pieces), dtype=np.int64))
    offsets = np.array(encoding["offset_mapping"][number])
    words = np.array([-1 if word is None else word for word in encoding.word_ids(number)])
    word_starts: Bools = np.diff(words, prepend=-2) != 0
    word_starts |= words == -1
    if not text.isascii() and UNSPACED_CHARACTER.search(text):
        unspaced = np.array([UNSPACED_CHARACTER.match(text, start) is not None for start in offsets[:, 0].tolist()])
        # A byte-level tokenizer may use several tokens for one character, with equal offsets.
        new_character = np.diff(offsets[:, 0], prepend=-1) != 0
        word_starts |= new_character & (unspaced | np.roll(unspaced, 1))
    piece_ends = np.cumsum([len(piece) for piece in pieces])
    piece_of_token = np.searchsorted(piece_ends, np.maximum(offsets[:, 1] - 1, 0), side="right")
    piece_of_word = np.maximum.accumulate(piece_of_token[word_starts])
    piece_of_token = piece_of_word[np.cumsum(word_starts) - 1]
    return DocumentTokens(text, tokens, offsets, word_starts, np.bincount(piece_of_token, minlength=len(pieces)))
