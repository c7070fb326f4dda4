"""Search of one text with the hybrid, its retrievers and BM25, as plain data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from revela_hub.data.sources.source import Document
from revela_hub.data.text.chunks import is_pdf
from revela_hub.errors import UserError
from revela_hub.retrieval import RankerSettings, build_ranker, read_passages
from revela_hub.retrieval.bm25 import BM25, BM25Settings
from revela_hub.retrieval.hits import Ranker
from revela_hub.retrieval.hybrid import Hybrid
from revela_hub.retrieval.passages import Hit
from revela_hub.retrieval.rerank import OWN_DEPTH, RerankedRanker, Reranker


class LoadedRetriever(NamedTuple):
    """A loaded model: the title of its column, its encoder, and the identity of its vectors."""

    title: str
    encoder: Any
    identity: str


@dataclass(frozen=True)
class Result:
    """A retrieved passage."""

    hit: Hit
    change: str = ""
    """Its rank compared with the base retriever: `▲2`, `▼1`, `=` or `new`; empty in the base retriever's column."""
    matches: Sequence[tuple[int, int]] = ()
    """Start and end of the words that match the query."""


@dataclass(frozen=True)
class Column:
    """The results of one system, best first."""

    title: str
    results: Sequence[Result]


class Collection:
    """Passages of documents in a folder, indexed for all systems; `cache` is the folder of the vectors.

    The base is the first retriever, that of the hybrid the last. Late interaction with its weight reranks the hybrid.
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
        self.bm25 = BM25(self.passages, bm25)
        self.retrievers: dict[str, Ranker] = {}
        for title, encoder, identity in retrievers:
            settings = RankerSettings(identity=identity, device=getattr(encoder, "device", "cpu"))
            self.retrievers[title] = build_ranker(self.passages, settings, cache, dense=encoder)
        self.token_weight = token_weight
        self.reranker = Reranker(retrievers[-1].encoder) if token_weight else None

    def search(self, query: str, bm25_weight: float, top_k: int = 5) -> list[Column]:
        """Return the results of the hybrid with this weight of BM25, of the retrievers (the base last), and of BM25."""
        titles = [*self.retrievers]
        base, last = titles[0], titles[-1]
        name = f"hybrid, BM25 weight {bm25_weight:.1f}"
        hybrid: Ranker = Hybrid([self.retrievers[last], self.bm25], [1 - bm25_weight, bm25_weight])
        if self.reranker is not None:
            name = f"{name}, late interaction"
            hybrid = RerankedRanker(hybrid, self.reranker, self.passages, OWN_DEPTH, self.token_weight)
        rankers = {name: hybrid, **dict(reversed(self.retrievers.items())), "BM25": self.bm25}
        hits = {title: ranker.search([query], top_k) for title, ranker in rankers.items()}
        numbers = {title: [int(row) for row in found.rows_QK[0] if row >= 0] for title, found in hits.items()}
        columns = []
        for title in rankers:
            [found] = self.passages.found(hits[title])
            of_base = None if title == base else numbers[base]
            results = [
                Result(hit, change(number, rank, of_base), self.bm25.matches(query, hit.text))
                for rank, (number, hit) in enumerate(zip(numbers[title], found, strict=True), start=1)
            ]
            columns.append(Column(title, results))
        return columns


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
    place = hit.document if hit.path is None and not is_pdf(hit.document) else hit.location
    return place.replace("\\", "/").rstrip("/").rpartition("/")[2]
