"""Documents to passages: the rows of the data set that the contrastive baselines are trained on."""

from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela_hub.data.row_cache import document_rows
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document, SourceLike
from revela_hub.data.text.chunks import chunk_document, count_words
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

_FORMAT = 1  # of the cached rows: to be raised when the same settings make other rows


def build_passages(
    sources: Iterable[SourceLike] | SourceLike,
    *,
    max_words: int = 200,
    min_words: int = 10,
    language: str = "en",
    cache_dir: str | Path | None = None,
    report: ReadReport | None = None,
) -> "Dataset":
    """Makes passages of whole sentences (code: lines) of the sources' documents, or takes them from the cache.

    Args:
        sources: As for `read_documents`.
        max_words: Words in a passage at most.
        min_words: Shorter ones are left out, and counted.
        language: ISO 639-1 code, for the ends of sentences.
        cache_dir: Where the rows are kept; by default in the cache of `datasets`.
        report: Is counted up.

    Returns:
        A data set with a row for each passage: `row` (int64, its number), `document` and `text` (strings).

    Raises:
        UserError: Anything `read_documents` raises; fewer than two passages in all.
    """
    import datasets

    if min_words < 1 or max_words < min_words:
        raise UserError(f"passages of {min_words} to {max_words} words: there are none; min_words must be 1 or more")
    text = datasets.Value("string")
    features = {"row": datasets.Value("int64"), "document": text, "text": text}
    settings = {"max_words": max_words, "min_words": min_words, "language": language}
    made_with = {"format": _FORMAT, "sentencex": version("sentencex"), **settings}
    rows = partial(_rows, max_words, min_words, language)
    return document_rows("passages", sources, features, made_with, rows, cache_dir, report)


def _rows(
    max_words: int, min_words: int, language: str, documents: Iterable[Document], report: ReadReport
) -> Iterator[dict[str, Any]]:
    number = 0
    for document in documents:
        for chunk in chunk_document(document, max_words, language=language, report=report):
            if count_words(chunk.text) < min_words:
                report.skipped["too short"] += 1
                continue
            yield {"row": number, "document": chunk.document, "text": chunk.text}
            number += 1
    if number < 2:
        raise UserError(
            f"the data make {number} passages of {min_words} words or more: give more text (what was read: {report})"
        )
