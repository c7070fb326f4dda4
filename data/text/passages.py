"""Splitting documents into passages, the training rows of the contrastive baselines."""

from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from revela_hub.data.row_cache import RowMaker, document_rows
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document, SourceLike
from revela_hub.data.text.chunks import chunk_document
from revela_hub.data.text.words import count_words

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


def build_passages(
    sources: Iterable[SourceLike] | SourceLike,
    *,
    max_words: int = 200,
    min_words: int = 10,
    language: str = "en",
    **options: Any,
) -> "Dataset | IterableDataset":
    """Split the documents into passages of whole sentences (code: lines), or read them from the cache; options as for `build_spans`."""
    types = {"row": "int64", "document": "string", "text": "string"}
    settings = {"max_words": max_words, "min_words": min_words, "language": language}
    made_with = {"sentencex": version("sentencex")} | settings
    rows = partial(_rows, max_words, min_words, language)
    few = f"the data contain fewer than 2 passages of {min_words} words: add more text"
    return document_rows(RowMaker("passages", types, made_with, rows, few, least=2), sources, **options)


def _rows(
    max_words: int, min_words: int, language: str, documents: Iterable[Document], report: ReadReport
) -> Iterator[dict[str, Any]]:
    for document in documents:
        for chunk in chunk_document(document, max_words, language=language, report=report):
            if count_words(chunk.text) < min_words:
                report.skipped["too short"] += 1
                continue
            yield {"document": chunk.document, "text": chunk.text}
