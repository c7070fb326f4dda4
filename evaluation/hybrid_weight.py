"""Tuning the weight of BM25 in a hybrid with a dense retriever, with cross-validation.

    hybrid(q, d) = (1 - w) * dense(q, d) + w * bm25(q, d), each min-max normalised over its best 100 hits for q

The weight w that is best on one half of the queries is used for the other half, and vice versa, so no query is scored with a
weight that was tuned on it. The recommended weight is tuned on all queries.
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
    """A hybrid with a tuned weight.

    Attributes:
        weight: The weight of BM25, tuned on all queries; 0 if BM25 does not help.
        scores: The scores, each query with the weight tuned on the other half.
    """

    weight: float
    scores: RetrievalScores


def halves(queries: Collection[str]) -> tuple[set[str], set[str]]:
    """Split queries into two halves, which are the same in every run."""
    ordered = sorted(queries, key=lambda query: hashlib.sha256(query.encode()).digest())
    return set(ordered[::2]), set(ordered[1::2])


def fit_hybrid(dense: Rankings, bm25: Rankings, task: RetrievalTask) -> FittedHybrid:
    """Choose the weight with the best nDCG@10; ties go to the smaller weight.

    Args:
        dense: The retriever's hits for all queries of the task.
        bm25: BM25's hits for all queries of the task.
        task: The task.
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
    """Fuse the hits of both, with this weight of BM25."""
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
