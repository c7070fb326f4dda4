"""Natural pairs of a text: a docstring and its function, a title and its section, a sentence and the rest of its passage.

They are made as the queries of a probe are (`revela_hub.evaluation.probe_queries`), from all documents. The queries of the probe that
measures the run are held out of the sources, and pairs that ask one of them are left out, such as titles that are labelled queries.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from revela_hub.data.mixture.held_out import without_queries
from revela_hub.data.row_cache import document_rows
from revela_hub.data.sources.beir import is_beir
from revela_hub.data.sources.queries import read_queries
from revela_hub.data.sources.report import ReadReport, counted
from revela_hub.data.sources.source import Document, SourceLike, parse_sources
from revela_hub.errors import UserError
from revela_hub.evaluation.probe import KINDS
from revela_hub.evaluation.probe_queries import Passage, passages_of_each

if TYPE_CHECKING:
    from datasets import Dataset


def build_text_pairs(
    sources: Iterable[SourceLike] | SourceLike,
    *,
    seed: int = 0,
    cache_dir: str | Path | None = None,
    report: ReadReport | None = None,
) -> "Dataset":
    """Build the natural pairs of the sources' documents, or read them from the cache (by default that of `datasets`).

    The seed selects the sentence of a passage that becomes its query. The counts are added to the report.

    Returns:
        One row for each passage that contains a query: `anchor`, the query, and `positive`, the passage without it.
    """
    import datasets

    text = datasets.Value("string")
    features = {"anchor": text, "positive": text}
    made_with = {"sentencex": version("sentencex"), "seed": seed}
    sources = parse_sources(sources)
    rows = document_rows("text-pairs", sources, features, made_with, partial(_rows, seed), cache_dir, report)
    probes = sorted({source.held_out for source in sources if source.held_out and is_beir(source.held_out)})
    left = without_queries(rows, (query for probe in probes for query in read_queries(probe).values()))
    if len(left) < 2:
        raise TooFewPairs(f"the evaluation asks all but {len(left)} of the {len(rows)} natural pairs of the text")
    if report is not None:
        report.held_out += len(rows) - len(left)
    return left


class TooFewPairs(UserError):
    """The text has too few natural pairs to train on."""


def _rows(seed: int, documents: Iterable[Document], report: ReadReport) -> Iterator[dict[str, Any]]:
    number = 0
    for _, passages in passages_of_each(documents, lambda document: Random(f"{seed}/{document.id}")):
        for passage in passages:
            report.chunks += 1
            if pair := _pair(passage):
                yield pair
                number += 1
    if number < 2:
        raise TooFewPairs(
            f"the text has {counted(number, 'natural pair')}: too few functions with docstrings, headings, or passages of three sentences"
            f" (read: {report}); add text, or train without pairs (revela-hub train contriever)"
        )


def _pair(passage: Passage) -> dict[str, str] | None:
    """Return the first kind of query that the passage contains, and the passage without it."""
    for kind in KINDS:
        if candidate := passage.candidates.get(kind):
            rest = " ".join(passage.text.split(candidate.removed)) if kind == "sentence" else passage.text
            return {"anchor": candidate.text, "positive": rest.strip()}
    return None
