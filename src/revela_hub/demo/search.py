"""Search of one collection with several retrievers, BM25 and a hybrid, as plain data."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
"""Hits of each part that the hybrid combines, as in `revela-hub search --mode hybrid`."""


class LoadedRetriever(NamedTuple):
    """A loaded model: the title of its column, its encoder, and the identity of its vectors."""

    title: str
    encoder: Any
    identity: str


@dataclass(frozen=True)
class ResultRow:
    """A passage that was found."""

    rank: int  # from 1
    score: float
    text: str
    source: str
    """Name of its document and lines, without a folder."""
    change: str
    """Its rank compared with the first column: `▲2`, `▼1`, `=`, `new`, or empty in the first column."""
    matches: tuple[tuple[int, int], ...]
    """Places of the words that match the query, as (start, end)."""


@dataclass(frozen=True)
class ResultColumn:
    """The results of one system, best first."""

    title: str
    rows: tuple[ResultRow, ...]
    milliseconds: float
    sizes: dict[str, int]  # of the index in bytes, by the type of its numbers
    nothing: str = ""  # why there are no results


class Collection:
    """Passages that are indexed for all systems.

    Args:
        documents: The documents; they are cut into passages.
        retrievers: The retrievers, the one that the others are compared with first and the one of the hybrid last.
        folder: Folder for the passages.
        cache: Folder for the vectors (default: the same).
        name: Name to show.
        bm25: Settings of BM25.
        token_weight: Weight of the last retriever's own token vectors, which rerank the hybrid; 0 for no reranking.
        max_words: Maximum number of words per passage.
        most: Maximum number of passages.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        retrievers: Sequence[LoadedRetriever],
        folder: Path,
        *,
        cache: Path | None = None,
        name: str = "your text",
        bm25: BM25Settings | None = None,
        token_weight: float = 0.0,
        max_words: int = 120,
        most: int | None = None,
    ) -> None:
        """Encodes the passages that are not in the cache."""
        self.name = name
        self.folder: Any = folder
        self.passages = read_passages(documents, folder, max_words=max_words)
        if not len(self.passages):
            raise UserError("the text is empty: no passage contains any text")
        if most is not None and len(self.passages) > most:
            raise UserError(
                f"the text has {len(self.passages):,} passages, more than the {most:,} allowed here: shorten it"
            )
        self.bm25 = BM25(self.passages.texts, bm25)
        self.rankers: dict[str, VectorRanker] = {}
        for title, encoder, identity in retrievers:
            settings = RankerSettings(identity=identity, device=getattr(encoder, "device", "cpu"))
            ranker = build_ranker(self.passages.texts, settings, cache or folder, dense=encoder)
            assert isinstance(ranker, VectorRanker)
            self.rankers[title] = ranker
        self.token_weight = token_weight
        self.reranker = Reranker(retrievers[-1].encoder) if token_weight else None

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, query: str, weight: float, top_k: int = 5) -> list[ResultColumn]:
        """Return the results of each retriever, of BM25, and of the hybrid of the last retriever and BM25 with this weight."""
        depth = max(DEPTH, top_k)
        dense, columns = Hits.none(1), []
        base: list[int] | None = None
        seconds = 0.0
        for title, ranker in self.rankers.items():
            began = time.perf_counter()
            dense = ranker.search(ranker.encode([query]), depth)
            seconds = time.perf_counter() - began
            columns.append(self._column(title, query, dense, top_k, seconds, self._sizes(ranker), base))
            base = ranks_of(dense)[:top_k] if base is None else base
        began = time.perf_counter()
        words = self.bm25.encode([query])
        bm25 = self.bm25.search(words, depth)
        bm25_seconds = time.perf_counter() - began
        nothing = self.bm25.why_nothing(words)[0]
        sizes = {"": self.bm25.bytes}
        columns.append(self._column("BM25", query, bm25, top_k, bm25_seconds, sizes, base, nothing))
        began = time.perf_counter()
        fused = fuse([dense, bm25], max(top_k, OWN_DEPTH), "minmax", [1 - weight, weight])
        both = self._late_interaction(query, fused)
        seconds += bm25_seconds + time.perf_counter() - began
        title = f"hybrid, BM25 weight {weight:.1f}" + (", late interaction" if self.reranker else "")
        columns.append(self._column(title, query, both, top_k, seconds, {}, base, nothing))
        return columns

    def _late_interaction(self, query: str, hits: Hits) -> Hits:
        """Return the hits, reranked if there is a weight for that."""
        if (reranker := self.reranker) is None:
            return hits

        def score(_: Any, rows: NDArray[np.int64]) -> NDArray[np.float32]:
            return reranker.scores([(query, text) for text in self.passages.texts.read(rows.tolist())])

        return reranked(hits, score, OWN_DEPTH, self.token_weight)

    def _sizes(self, ranker: VectorRanker) -> dict[str, int]:
        numbers = len(self) * ranker.vectors.dimension
        return {"float32": 4 * numbers, "int8": numbers, "binary": numbers // 8}

    def _column(
        self,
        title: str,
        query: str,
        hits: Hits,
        top_k: int,
        seconds: float,
        sizes: dict[str, int],
        base: list[int] | None,
        nothing: str = "",
    ) -> ResultColumn:
        numbers = ranks_of(hits)[:top_k]
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
        return ResultColumn(title, rows, 1000 * seconds, sizes, "" if rows else nothing)


def ranks_of(hits: Hits) -> list[int]:
    """Return the numbers of the passages of one query, best first."""
    return [int(row) for row in hits.rows_QK[0] if row >= 0]


def change(number: int, rank: int, base: list[int] | None) -> str:
    """Return how the rank of a passage differs from that in the first column.

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
