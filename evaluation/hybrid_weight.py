"""How much of BM25 a dense retriever gains from, chosen on queries that it is not judged by.

    hybrid(q, d) = (1 - w) * dense(q, d) + w * bm25(q, d), each min-max normalised over its best 100 hits for q

The weight w that is best for one half of the queries ranks the other half, and the other way round, so that every query is
ranked by a weight that was chosen without it; the weight that is recommended is chosen on all of them.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.retrieval import TOP_K, Rankings, RetrievalScores, score_run
from revela_hub.retrieval.hybrid import fuse
from revela_hub.retrieval.top_k import Hits

WEIGHTS = tuple(round(0.1 * step, 1) for step in range(11))


@dataclass(frozen=True)
class FittedHybrid:
    """A hybrid whose weight was chosen on the task.

    Attributes:
        weight: BM25's share, chosen on all queries; 0 where BM25 does not help.
        scores: Of every query, by the weight that the other half chose.
    """

    weight: float
    scores: RetrievalScores


def halves(queries: Collection[str]) -> tuple[set[str], set[str]]:
    """Two halves of the queries, the same ones in every run."""
    ordered = sorted(queries, key=lambda query: hashlib.sha256(query.encode()).digest())
    return set(ordered[::2]), set(ordered[1::2])


def fit_hybrid(dense: Rankings, bm25: Rankings, task: RetrievalTask) -> FittedHybrid:
    """Chooses the weight that gives the best nDCG@10, the smallest of equals.

    Args:
        dense: Hits of the retriever, and
        bm25: hits of BM25, for all queries of the task.
        task: What they are hits of.
    """
    runs = {weight: fuse_runs(dense, bm25, task, weight) for weight in WEIGHTS}
    scored = {weight: score_run(run, task).per_query["ndcg_at_10"] for weight, run in runs.items()}

    def best(queries: Collection[str]) -> float:
        return max(WEIGHTS, key=lambda w: (round(float(np.mean([scored[w][q] for q in sorted(queries)])), 9), -w))

    one, other = halves(task.queries)
    for_one, for_other = best(other), best(one)
    crossed = {query: runs[for_one if query in one else for_other][query] for query in task.queries}
    return FittedHybrid(best(task.queries), score_run(crossed, task))


def fuse_runs(dense: Rankings, bm25: Rankings, task: RetrievalTask, weight: float) -> Rankings:
    """The hits of both as one run, with so much of BM25."""
    documents = list(task.corpus)
    places = {document: place for place, document in enumerate(documents)}
    parts = [_hits(run, list(task.queries), places) for run in (dense, bm25)]
    scores_QK, rows_QK = fuse(parts, TOP_K, "minmax", [1 - weight, weight])
    return {
        query: {documents[row]: float(score) for row, score in zip(rows, scores, strict=True) if row >= 0}
        for query, rows, scores in zip(task.queries, rows_QK, scores_QK, strict=True)
    }


def _hits(run: Rankings, queries: list[str], places: dict[str, int]) -> Hits:
    parts = [Hits.none(1)]
    for query in queries:
        found = sorted(run.get(query, {}).items(), key=lambda item: -item[1])
        scores, rows = [score for _, score in found], [places[document] for document, _ in found]
        parts.append(Hits(np.array([scores], np.float32), np.array([rows], np.int64)))
    hits = Hits.concatenate(parts)
    return Hits(hits.scores_QK[1:], hits.rows_QK[1:])
