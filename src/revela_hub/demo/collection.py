"""Search of one collection with the hybrid, its retrievers and BM25, as plain data; and the report of `revela-hub adapt`."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.sources.source import Document
from revela_hub.errors import UserError
from revela_hub.retrieval import RankerSettings, build_ranker, read_passages
from revela_hub.retrieval.bm25 import BM25, BM25Settings
from revela_hub.retrieval.hybrid import fuse
from revela_hub.retrieval.passages import Hit
from revela_hub.retrieval.ranking import VectorRanker
from revela_hub.retrieval.rerank import OWN_DEPTH, Reranker, reranked
from revela_hub.retrieval.top_k import Hits

DEPTH = 100
"""Passages of each part that the hybrid combines, as in `revela-hub search --mode hybrid`."""


@dataclass(frozen=True)
class Report:
    """The result of `revela-hub adapt`: the settings of the hybrid, and the verdict as a sentence."""

    bm25_weight: float
    token_weight: float  # of late interaction; 0 without it
    verdict: str
    is_base: bool  # whether the base retriever was exported, because no training was better
    bm25: BM25Settings = field(default_factory=BM25Settings)

    @classmethod
    def read(cls, file: Path) -> "Report":
        """Read `adapt.json`."""
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            gain = values["difference"]
            interval = f"{gain['difference']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"
            return cls(
                float(values["bm25_weight"]),
                float(values.get("token_weight", 0)),
                f"{values['verdict'].capitalize()}: {interval} nDCG@10 compared with the base retriever with BM25"
                f" ({gain['queries']} test queries).",
                not values["trained"],
                BM25Settings(**values.get("bm25", {})),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file} is not a report of `revela-hub adapt`, or is damaged") from error


class LoadedRetriever(NamedTuple):
    """A loaded model: the title of its column, its encoder, and the identity of its vectors."""

    title: str
    encoder: Any
    identity: str


@dataclass(frozen=True)
class ResultRow:
    """A retrieved passage."""

    rank: int  # from 1
    score: float
    text: str
    source: str
    """Name of its document and lines, without a folder."""
    change: str
    """Its rank compared with the base retriever: `▲2`, `▼1`, `=` or `new`; empty in the base retriever's own column."""
    matches: tuple[tuple[int, int], ...]
    """Places of the words that match the query, as (start, end)."""


@dataclass(frozen=True)
class ResultColumn:
    """The results of one system, best first."""

    title: str
    rows: tuple[ResultRow, ...]
    milliseconds: float
    nothing: str = ""  # why there are no results


class Collection:
    """Passages that are indexed for all systems.

    Args:
        documents: the documents; they are cut into passages.
        retrievers: the retrievers, the base first and the one of the hybrid last.
        folder: folder for the passages.
        cache: folder for the vectors.
        name: name to show.
        bm25: settings of BM25.
        token_weight: weight of late interaction, which reranks the hybrid; 0 for none.
        max_words: maximum number of words per passage.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        retrievers: Sequence[LoadedRetriever],
        folder: Path,
        *,
        cache: Path,
        name: str,
        bm25: BM25Settings | None = None,
        token_weight: float = 0.0,
        max_words: int = 120,
    ) -> None:
        """Encode the passages that are not in the cache."""
        self.name = name
        self.passages = read_passages(documents, folder, max_words=max_words)
        if not len(self.passages):
            raise UserError("the text is empty: no passage contains any text")
        self.bm25 = BM25(self.passages.texts, bm25)
        self.rankers: dict[str, VectorRanker] = {}
        for title, encoder, identity in retrievers:
            settings = RankerSettings(identity=identity, device=getattr(encoder, "device", "cpu"))
            ranker = build_ranker(self.passages.texts, settings, cache, dense=encoder)
            assert isinstance(ranker, VectorRanker)
            self.rankers[title] = ranker
        self.token_weight = token_weight
        self.reranker = Reranker(retrievers[-1].encoder) if token_weight else None

    def search(self, query: str, weight: float, top_k: int = 5) -> list[ResultColumn]:
        """Return the results of the hybrid with this weight of BM25, of the retrievers (the base last), and of BM25."""
        depth = max(DEPTH, top_k)
        timed: dict[str, tuple[Hits, float]] = {}
        for title, ranker in self.rankers.items():
            began = time.perf_counter()
            timed[title] = ranker.search(ranker.encode([query]), depth), time.perf_counter() - began
        dense, dense_seconds = timed[title]
        began = time.perf_counter()
        words = self.bm25.encode([query])
        lexical = self.bm25.search(words, depth)
        lexical_seconds = time.perf_counter() - began
        hybrid = fuse([dense, lexical], max(top_k, OWN_DEPTH), "minmax", [1 - weight, weight])
        hybrid = self._late_interaction(query, hybrid)
        seconds = dense_seconds + time.perf_counter() - began
        base_title = next(iter(timed))
        base = rows_of(timed[base_title][0])[:top_k]
        name = f"hybrid, BM25 weight {weight:.1f}" + (", late interaction" if self.reranker else "")
        columns = [self._column(name, query, hybrid, top_k, seconds, base)]
        for title, (hits, seconds) in reversed(timed.items()):
            columns.append(self._column(title, query, hits, top_k, seconds, None if title == base_title else base))
        nothing = self.bm25.why_nothing(words)[0]
        return [*columns, self._column("BM25", query, lexical, top_k, lexical_seconds, base, nothing)]

    def _late_interaction(self, query: str, hits: Hits) -> Hits:
        if (reranker := self.reranker) is None:
            return hits

        def score(_: Any, rows: NDArray[np.int64]) -> NDArray[np.float32]:
            return reranker.scores([(query, text) for text in self.passages.texts.read(rows.tolist())])

        return reranked(hits, score, OWN_DEPTH, self.token_weight)

    def _column(
        self,
        title: str,
        query: str,
        hits: Hits,
        top_k: int,
        seconds: float,
        base: list[int] | None,
        nothing: str = "",
    ) -> ResultColumn:
        numbers = rows_of(hits)[:top_k]
        [found] = self.passages.found(Hits(hits.scores_QK[:, :top_k], hits.rows_QK[:, :top_k]))
        rows = tuple(
            ResultRow(
                rank,
                hit.score,
                hit.text,
                source_of(hit),
                change(number, rank, base),
                tuple(self.bm25.matches(query, hit.text)),
            )
            for rank, (number, hit) in enumerate(zip(numbers, found, strict=True), start=1)
        )
        return ResultColumn(title, rows, 1000 * seconds, "" if rows else nothing)


def rows_of(hits: Hits) -> list[int]:
    """Return the numbers of the passages of one query, best first."""
    return [int(row) for row in hits.rows_QK[0] if row >= 0]


def change(number: int, rank: int, base: list[int] | None) -> str:
    """Return how the rank of a passage differs from that in the base retriever's results.

    >>> [change(number, rank, [7, 8, 9]) for rank, number in enumerate([9, 8, 5], start=1)]
    ['▲2', '=', 'new']
    >>> change(7, 3, [7, 8, 9]), change(7, 1, None)
    ('▼2', '')
    """
    if base is None:
        return ""
    if number not in base:
        return "new"
    before = base.index(number) + 1
    return "=" if before == rank else f"▲{before - rank}" if before > rank else f"▼{rank - before}"


def source_of(hit: Hit) -> str:
    """Return the name of the file with the lines, or of the document; never a folder of this machine."""
    place = hit.document if hit.path is None else hit.location
    return place.replace("\\", "/").rstrip("/").rpartition("/")[2]
