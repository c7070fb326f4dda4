"""Documents to spans of tokens: the rows of the data set that RetroMAE is pre-trained on.

A span is as many whole sentences of one document (lines of code), in succession, as fit into `max_length` tokens. Text
is tokenised in runs of sentences, not sentence by sentence, so that tokens are what they are in running text, and is
never taken for special tokens (`</s>` in a page about HTML).

Tokens are kept with a mark where a word begins, from the tokenizer's own pre-tokenizer: the pieces of WordPiece, the
merges of a byte-level BPE and those of SentencePiece all mask whole words. In scripts written without spaces, where
that would make a word of a sentence, each token is a word.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from revela_hub.data.row_cache import document_rows
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document, SourceLike
from revela_hub.data.text.chunks import UNSPACED_CHARACTER, document_pieces
from revela_hub.data.text.languages import check_language
from revela_hub.data.text.masking import Bools, Tokens, Vocabulary
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import BatchEncoding, PreTrainedTokenizerBase

MIN_TOKENS = 8
RUN_CHARACTERS = 50_000
"""A run of sentences that is tokenised together: an encoding takes some 50 bytes a character."""
BATCH_CHARACTERS = 1_000_000
"""What is tokenised at once, by all of the processor's cores."""

_FORMAT = 1  # of the cached rows: to be raised when the same settings make other rows


@dataclass(frozen=True)
class SpanSettings:
    """How spans are made.

    Attributes:
        max_length: Tokens of a span at most, with the two special ones that the collator puts around it.
        min_tokens: Spans of fewer tokens, without special ones, are left out.
        language: ISO 639-1 code, for the ends of sentences.
        max_spans: Stop after as many spans.
    """

    max_length: int = 512
    min_tokens: int = MIN_TOKENS
    language: str = "en"
    max_spans: int | None = None

    def __post_init__(self) -> None:
        """Raises UserError for settings that make no spans."""
        check_language(self.language)
        if self.min_tokens < 1:
            raise UserError(f"min_tokens is {self.min_tokens}; it must be at least 1")
        if self.max_length < self.min_tokens + 2:
            raise UserError(
                f"max_length is {self.max_length}; it must be at least {self.min_tokens + 2} (min_tokens and two "
                "special tokens)"
            )
        if self.max_spans is not None and self.max_spans < 1:
            raise UserError(f"max_spans is {self.max_spans}; it must be at least 1")


def build_spans(
    sources: Iterable[SourceLike] | SourceLike,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int = 512,
    min_tokens: int = MIN_TOKENS,
    language: str = "en",
    max_spans: int | None = None,
    cache_dir: str | Path | None = None,
    report: ReadReport | None = None,
) -> "Dataset":
    """Makes the spans of the sources' documents, or takes them from the cache (see `revela_hub.data.row_cache`).

    Args:
        sources: As for `read_documents`; all of them make one stream of documents.
        tokenizer: Of a masked language model; a fast one, as it has to tell which tokens make a word.
        max_length: Tokens of a span at most, with the special tokens `[CLS]` and `[SEP]`, which are not in it yet.
        min_tokens: Spans of fewer tokens, without special ones, are left out (and counted).
        language: ISO 639-1 code, for the ends of sentences.
        max_spans: Stop after as many spans.
        cache_dir: Where the rows are kept; by default in the cache of `datasets`.
        report: Is counted up (with the counts of the run that wrote the rows, if they come from the cache).

    Returns:
        A data set with a row for each span: `span` (int64, its number, which its masks are drawn from), `input_ids`
        (int32, without special tokens) and `word_starts` (uint8, 1 where a token begins a word), the two of one length.

    Raises:
        UserError: Anything `read_documents` raises; a tokenizer that does not suit; settings or data without a span.
    """
    import datasets

    settings = SpanSettings(max_length, min_tokens, language, max_spans)
    check_tokenizer(tokenizer)
    features = {
        "span": datasets.Value("int64"),
        "input_ids": datasets.List(datasets.Value("int32")),
        "word_starts": datasets.List(datasets.Value("uint8")),
    }
    versions = {name: version(name) for name in ("sentencex", "tokenizers")}
    made_with = {"format": _FORMAT, **versions, **vars(settings), "tokenizer": tokenizer_digest(tokenizer)}
    rows = partial(_rows, tokenizer, settings)
    return document_rows("spans", sources, features, made_with, rows, cache_dir, report)


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises UserError unless spans can be made with the tokenizer, and masked."""
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path or type(tokenizer).__name__} does not tell which tokens make a "
            "word; take a fast one (tokenizer.json)"
        )
    Vocabulary.of(tokenizer)


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Names what the tokenizer does to a text, whatever it was last called with."""
    backend: Any = tokenizer
    content = json.loads(backend.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True)
class DocumentTokens:
    """A document: its tokens, where words begin, and the number of tokens of each piece of it that is not cut."""

    tokens: Tokens
    word_starts: Bools
    lengths: Tokens


def _rows(
    tokenizer: "PreTrainedTokenizerBase", settings: SpanSettings, documents: Iterable[Document], report: ReadReport
) -> Iterator[dict[str, Any]]:
    capacity = settings.max_length - 2
    for document in tokenized_documents(documents, tokenizer, settings, report):
        for start, end in packed_spans(document, capacity, report):
            if end - start < settings.min_tokens:
                report.skipped["too short"] += 1
                continue
            word_starts = document.word_starts[start:end].astype(np.uint8)
            word_starts[0] = 1  # also of a word that was cut
            yield {"span": report.spans, "input_ids": document.tokens[start:end], "word_starts": word_starts}
            report.spans += 1
            if report.spans == settings.max_spans:
                return
    if not report.spans:
        raise UserError(
            f"the data make no span of at least {settings.min_tokens} tokens: give more text, or lower min_tokens"
            f" (what was read: {report})"
        )


def packed_spans(document: DocumentTokens, capacity: int, report: ReadReport) -> Iterator[tuple[int, int]]:
    """The first token of each span, and the one after its last: whole pieces, and what is too long cut before a word."""
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
    """Tokenises batches of documents, each in runs of pieces."""
    documents = iter(documents)
    while batch := list(_batch(documents)):
        # A piece has at most as many words as a span has tokens: the tables and lists that make longer "sentences" are
        # cut at their lines here, as chunks are.
        pieces = [
            list(document_pieces(document, settings.max_length - 2, language=settings.language, report=report))
            for document in batch
        ]
        runs = [_runs(of_document) for of_document in pieces]
        texts = ["".join(run) for of_document in runs for run in of_document]
        encoding = tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # about texts longer than the model's positions
        )
        numbers = iter(range(len(texts)))
        for of_document in runs:
            parts = [
                _run_tokens(encoding, number, texts[number], run)
                for run, number in zip(of_document, numbers, strict=False)
            ]
            yield DocumentTokens(
                np.concatenate([part.tokens for part in parts]),
                np.concatenate([part.word_starts for part in parts]),
                np.concatenate([part.lengths for part in parts]),
            )


def _batch(documents: Iterator[Document]) -> Iterator[Document]:
    """The next documents, until they are enough to be tokenised together."""
    characters = 0
    for document in documents:
        yield document
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            return


def _runs(pieces: list[str]) -> list[list[str]]:
    """The pieces in runs of about RUN_CHARACTERS."""
    runs: list[list[str]] = [[]]
    characters = 0
    for piece in pieces:
        if characters >= RUN_CHARACTERS:
            runs.append([])
            characters = 0
        runs[-1].append(piece)
        characters += len(piece)
    return runs


def _run_tokens(encoding: "BatchEncoding", number: int, text: str, pieces: list[str]) -> DocumentTokens:
    """The tokens of one run; a word belongs to the piece in which its first token ends."""
    tokens = np.array(encoding["input_ids"][number], dtype=np.int64)
    if not len(tokens):
        return DocumentTokens(tokens, np.zeros(0, dtype=np.bool_), np.zeros(len(pieces), dtype=np.int64))
    offsets = np.array(encoding["offset_mapping"][number])
    words = np.array([-1 if word is None else word for word in encoding.word_ids(number)])
    word_starts: Bools = np.diff(words, prepend=-2) != 0
    word_starts |= words == -1
    if not text.isascii() and UNSPACED_CHARACTER.search(text):
        unspaced = np.array([UNSPACED_CHARACTER.match(text, start) is not None for start in offsets[:, 0].tolist()])
        # A byte-level tokenizer has several tokens for one character, with the same offsets.
        new_character = np.diff(offsets[:, 0], prepend=-1) != 0
        word_starts |= new_character & (unspaced | np.roll(unspaced, 1))
    piece_ends = np.cumsum([len(piece) for piece in pieces])
    piece_of_token = np.searchsorted(piece_ends, np.maximum(offsets[:, 1] - 1, 0), side="right")
    piece_of_word = np.maximum.accumulate(piece_of_token[word_starts])
    piece_of_token = piece_of_word[np.cumsum(word_starts) - 1]
    return DocumentTokens(tokens, word_starts, np.bincount(piece_of_token, minlength=len(pieces)))
