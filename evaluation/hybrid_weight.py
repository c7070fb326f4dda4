"""Tuning the weight of BM25 in a hybrid with a dense retriever, with cross-validation.

    hybrid(q, d) = (1 - w) * dense(q, d) + w * bm25(q, d), each min-max normalised over its best 100 hits for q

The weight is 0.3 unless the queries support another one: the best weight must beat 0.3 by one standard error of the paired differences,
or by two if it is larger and the queries were made from the text, because such queries share words with their passages. Then the weight
nearest to 0.3 that is within one standard error of the best is used.

The weight that is tuned on one half of the queries is used for the other half, and vice versa, so no query is scored with a weight that
was tuned on it. The recommended weight is tuned on all queries.
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.retrieval import TOP_K, Rankings, RetrievalScores, score_run
from revela_hub.retrieval.hybrid import BM25_WEIGHT

WEIGHTS = tuple(round(0.1 * step, 1) for step in range(11))
ERRORS, ERRORS_UP = 1.0, 2.0
"""Standard errors by which another weight must beat the prior; `ERRORS_UP` for a larger weight on a probe."""
PROBE = "probe"
"""Name of tasks whose queries were made from the text."""


@dataclass(frozen=True)
class FittedHybrid:
    """The weight of BM25, tuned on all queries (0 if BM25 does not help); and the scores, each query with that of the other half."""

    weight: float
    scores: RetrievalScores


def halves(queries: Collection[str]) -> tuple[set[str], set[str]]:
    """Split queries into two halves, which are the same in every run."""
    ordered = sorted(queries, key=lambda query: hashlib.sha256(query.encode()).digest())
    return set(ordered[::2]), set(ordered[1::2])


def fit_hybrid(dense: Rankings, bm25: Rankings, task: RetrievalTask) -> FittedHybrid:
    """Choose a weight as `fit_weight` does, and score the hybrid of these hits with cross-validation."""
    crossed: Rankings = {}
    one, other = (task.subset(sorted(half)) for half in halves(task.queries))
    for half, rest in ((one, other), (other, one)):
        crossed |= fuse_runs(dense, bm25, half, fit_weight(dense, bm25, rest))
    return FittedHybrid(fit_weight(dense, bm25, task), score_run(crossed, task))


def fit_weight(
    dense: Rankings, bm25: Rankings, task: RetrievalTask, prior: float = BM25_WEIGHT, errors: float = ERRORS
) -> float:
    """Return the weight of BM25, or of another second part: the prior, one of `WEIGHTS`, unless the queries support another one.

    It must beat the prior by this number of standard errors; a larger weight on a probe by at least two.
    """
    runs = {weight: score_run(fuse_runs(dense, bm25, task, weight), task) for weight in WEIGHTS}
    table = {weight: np.array(list(scores.per_query["ndcg_at_10"].values())) for weight, scores in runs.items()}
    best = max(WEIGHTS, key=lambda weight: (round(float(table[weight].mean()), 9), -abs(weight - prior)))
    made = task.name == PROBE and best > prior
    if not _better(table[best], table[prior], max(errors, ERRORS_UP) if made else errors):
        return prior
    between = [weight for weight in WEIGHTS if min(best, prior) <= weight <= max(best, prior)]
    good = [weight for weight in between if not _better(table[best], table[weight], 1.0)]
    return min(good, key=lambda weight: abs(weight - prior))


def _better(a: NDArray[np.float64], b: NDArray[np.float64], errors: float) -> bool:
    """Whether the mean of a - b is above this number of its standard errors; of one query, above 0."""
    gain = a - b
    error = gain.std(ddof=1) / len(gain) ** 0.5 if len(gain) > 1 else 0.0
    return bool(gain.mean() > errors * error + 1e-9)


def fuse_runs(dense: Rankings, bm25: Rankings, task: RetrievalTask, weight: float) -> Rankings:
    """Fuse the hits of both as `hybrid.fuse` does, with this weight of BM25."""
    runs: Rankings = {}
    for query in task.queries:
        total: dict[str, float] = defaultdict(float)
        for hits, share in ((dense.get(query, {}), 1 - weight), (bm25.get(query, {}), weight)):
            low, high = min(hits.values(), default=0.0), max(hits.values(), default=0.0)
            for document, score in hits.items() if share else ():
                total[document] += share * ((score - low) / (high - low) if high > low else 1.0)
        runs[query] = dict(sorted(total.items(), key=lambda hit: -hit[1])[:TOP_K])
    return runs
