"""Natural query-passage pairs of a text.

They are a docstring and its function, a title and its section, or a sentence and the rest of its passage, made as the queries
of a probe are (`evaluation.probe_queries`). The queries of the probe that measures the run are held out.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import version
from random import Random
from typing import TYPE_CHECKING, Any

from revela_hub.data.mixture.held_out import without_queries
from revela_hub.data.row_cache import RowMaker, document_rows
from revela_hub.data.sources.beir import is_beir, read_queries
from revela_hub.data.sources.report import ReadReport, counted
from revela_hub.data.sources.source import Document, SourceLike, parse_sources
from revela_hub.errors import UserError
from revela_hub.evaluation.probe import KINDS
from revela_hub.evaluation.probe_queries import Passage, passages_of_each

if TYPE_CHECKING:
    from datasets import Dataset


def build_text_pairs(
    sources: Iterable[SourceLike] | SourceLike, *, seed: int = 0, report: ReadReport | None = None, **options: Any
) -> "Dataset":
    """Build the natural pairs of the sources' documents, or read them from the cache; options as for `build_spans`.

    The seed selects the sentence of a passage that becomes its query. The counts are added to the report.

    Returns:
        One row for each passage that contains a query: `anchor`, the query, and `positive`, the passage without it.
    """
    types = {"anchor": "string", "positive": "string"}
    made_with = {"sentencex": version("sentencex"), "seed": seed, "passages of a document": "all"}
    sources = parse_sources(sources)
    maker = RowMaker("text-pairs", types, made_with, partial(_rows, seed), "", least=0)
    report = ReadReport() if report is None else report
    rows: Any = document_rows(maker, sources, report=report, **options)
    probes = sorted({source.held_out for source in sources if source.held_out and is_beir(source.held_out)})
    left = without_queries(rows, (query for probe in probes for query in read_queries(probe).values()))
    if len(left) < 2:
        raise TooFewPairs(
            f"the text has {counted(len(rows), 'natural pair')}, of which the evaluation leaves {len(left)} (read: {report}); add"
            " functions with docstrings, headings, or passages of three sentences, or train without pairs (revela-hub train contriever)"
        )
    report.held_out += len(rows) - len(left)
    return left


class TooFewPairs(UserError):
    """The text has too few natural pairs to train on."""


def _rows(seed: int, documents: Iterable[Document], report: ReadReport) -> Iterator[dict[str, Any]]:
    for _, passages in passages_of_each(documents, lambda document: Random(f"{seed}/{document.id}")):
        for passage in passages:
            report.chunks += 1
            if pair := _pair(passage):
                yield pair


def _pair(passage: Passage) -> dict[str, str] | None:
    """Return the first kind of query that the passage contains, and the passage without it."""
    for kind in KINDS:
        if candidate := passage.candidates.get(kind):
            rest = " ".join(passage.text.split(candidate.removed)) if kind == "sentence" else passage.text
            return {"anchor": candidate.text, "positive": rest.strip()}
    return None
