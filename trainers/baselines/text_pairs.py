"""Pairs that a text offers by itself: a docstring and its function, a title and its section, a sentence and the rest of its passage.

They are what a probe asks (`revela_hub.evaluation.probe_queries`), of all documents: what a probe of the same text asks is held out
of the sources, and so is not among them.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from revela_hub.data.row_cache import document_rows
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document, SourceLike
from revela_hub.errors import UserError
from revela_hub.evaluation.probe import KINDS
from revela_hub.evaluation.probe_queries import Passage, passages_of

if TYPE_CHECKING:
    from datasets import Dataset

_FORMAT = 1  # of the cached rows: to be raised when the same settings make other rows


def build_text_pairs(
    sources: Iterable[SourceLike] | SourceLike,
    *,
    seed: int = 0,
    cache_dir: str | Path | None = None,
    report: ReadReport | None = None,
) -> "Dataset":
    """Makes the pairs of the sources' documents, or takes them from the cache.

    Args:
        sources: As for `read_documents`.
        seed: For which sentence is taken.
        cache_dir: Where the rows are kept; by default in the cache of `datasets`.
        report: Is counted up.

    Returns:
        A data set with a row for each passage that offers a query: `row` (int64, its number), `document`, `query` and `text`,
        the passage without it (strings).

    Raises:
        UserError: Anything `read_documents` raises; fewer than two pairs in all.
    """
    import datasets

    text = datasets.Value("string")
    features = {"row": datasets.Value("int64"), "document": text, "query": text, "text": text}
    made_with = {"format": _FORMAT, "sentencex": version("sentencex"), "seed": seed}
    return document_rows("text-pairs", sources, features, made_with, partial(_rows, seed), cache_dir, report)


def _rows(seed: int, documents: Iterable[Document], report: ReadReport) -> Iterator[dict[str, Any]]:
    number = 0
    for document in documents:
        for passage in passages_of(document, Random(f"{seed}/{document.id}")):
            report.chunks += 1
            if pair := _pair(passage):
                yield {"row": number, "document": document.id} | pair
                number += 1
    if number < 2:
        raise UserError(
            f"the text offers {number} pairs: it has too few functions with docstrings, headings, or passages of three sentences"
            f" (what was read: {report}); give more of it, or --views cropping"
        )


def _pair(passage: Passage) -> dict[str, str] | None:
    """The passage with the first kind of query that it offers, taken out of it."""
    for kind in KINDS:
        if candidate := passage.candidates.get(kind):
            rest = " ".join(passage.text.split(candidate.removed)) if kind == "sentence" else passage.text
            return {"query": candidate.text, "text": rest.strip()}
    return None
