r"""Hybrid search: the hits of two or three rankers fused into one ranking.

For query q and text d, with scores s_p and weights w_p of the rankers p:

    sum      sum of w_p * s_p(q, d)                                         (arXiv 2304.10195: dense + sparse)
    minmax   sum of w_p * (s_p(q, d) - min_p(q)) / (max_p(q) - min_p(q))    minimum and maximum over p's hits for q

In minmax, a ranker adds nothing for a text that is not among its hits.

Letters in names: Q queries, K hits, P pairs, A hits of all parts.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError
from revela_hub.retrieval.hits import Hits, Ranker, sort_hits

Fusion = Literal["sum", "minmax"]

BM25_WEIGHT = 0.3
"""Weight of BM25 without evidence: on ten collections with labels it was better than the retriever alone on nine."""


def fuse(parts: Sequence[Hits], k: int, weights: Sequence[float]) -> Hits:
    """Fuse the hits of several rankers for the same queries into one ranking, by minmax.

    Args:
        parts: The hits of each ranker, over the same numbered texts.
        k: Hits to keep per query.
        weights: One weight per part; the hits of a part with weight 0 are left out.
    """
    used = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight]
    rows_QA = np.concatenate([part.rows_QK for part, _ in used], axis=1)
    scaled_QA = np.concatenate([weight * _scaled(part.scores_QK, part.scores_QK) for part, weight in used], axis=1)
    hits = Hits.none(len(rows_QA), min(k, rows_QA.shape[1]))
    for query, (rows_A, scaled_A) in enumerate(zip(rows_QA, scaled_QA, strict=True)):
        rows, places_A = np.unique(rows_A, return_inverse=True)
        sums = np.bincount(places_A, scaled_A).astype(np.float64)
        best = sort_hits(sums[None], rows[None], k)
        found = best.rows_QK.shape[1]
        hits.scores_QK[query, :found], hits.rows_QK[query, :found] = best.scores_QK[0], best.rows_QK[0]
    return hits


class Hybrid:
    """Several rankers of the same texts, combined (a `Ranker`).

    Args:
        parts: Two or more rankers.
        weights: One weight per part; a part with weight 0 is not used.
        fusion: See above.
        depth: Hits of each part to fuse. With sum, at least as many as are searched for; with minmax, more than these do not change
            the ranking of the first ones: other texts follow below.
    """

    def __init__(
        self, parts: Sequence[Ranker], weights: Sequence[float], fusion: Fusion | str = "minmax", depth: int = 100
    ) -> None:
        used = [(part, float(weight)) for part, weight in zip(parts, weights, strict=True) if weight]
        self.parts, self.weights = [part for part, _ in used], [weight for _, weight in used]
        self.fusion, self.depth = fusion, depth
        self._found = lru_cache(maxsize=1)(lambda queries, k: [part.search(queries, k) for part in self.parts])

    def search(self, queries: Sequence[str], k: int) -> Hits:
        """See `Ranker`."""
        found = self._found(tuple(queries), max(k, self.depth))
        if self.fusion == "minmax":
            hits = fuse([part.first(self.depth) for part in found], k, self.weights)
            return hits if k <= self.depth else _followed(hits, fuse(found, k, self.weights), k)
        rows_QA = np.sort(np.concatenate([part.rows_QK for part in found], axis=1), axis=1)
        rows_QA[:, 1:][rows_QA[:, 1:] == rows_QA[:, :-1]] = -1  # each text once
        queries_P, places_P = np.nonzero(rows_QA >= 0)
        scores_QA = np.full(rows_QA.shape, -np.inf)
        scores_QA[queries_P, places_P] = self.pair_scores(queries, queries_P, rows_QA[queries_P, places_P])
        return sort_hits(scores_QA, rows_QA, k)

    def pair_scores(
        self, queries: Sequence[str], queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """See `Ranker`. In minmax, a text that is not a hit is scored by its place among the hits, or 0 below."""
        total_P = np.zeros(len(rows_P))
        found = self._found(tuple(queries), self.depth) if self.fusion == "minmax" else [None] * len(self.parts)
        for part, weight, hits in zip(self.parts, self.weights, found, strict=True):
            scores_P = part.pair_scores(queries, queries_P, rows_P)
            if hits is not None:
                scores_P = _scaled(scores_P[:, None], hits.scores_QK[queries_P])[:, 0].clip(min=0)
            total_P += weight * scores_P
        return total_P.astype(np.float32)


def _followed(hits: Hits, others: Hits, k: int) -> Hits:
    """Return the hits, and the others that are not among them below, in their order."""
    rows_QA = others.rows_QK.copy()
    for known, rows in zip(hits.rows_QK, rows_QA, strict=True):
        rows[np.isin(rows, known)] = -1
    low_Q1 = np.min(hits.scores_QK, axis=1, where=hits.rows_QK >= 0, initial=0, keepdims=True)
    scores_QA = np.concatenate([hits.scores_QK, low_Q1 - np.arange(1, rows_QA.shape[1] + 1)], axis=1)
    return sort_hits(scores_QA, np.concatenate([hits.rows_QK, rows_QA], axis=1), k)


def check_weights(weights: Sequence[float], parts: int) -> None:
    """Raise a `UserError` if these are no weights of a hybrid with this number of parts."""
    if len(weights) != parts or not any(weights) or not all(0 <= weight < np.inf for weight in weights):
        raise UserError(
            f"a hybrid of {parts} parts needs {parts} weights, none of them negative and not all 0, not"
            f" {' '.join(map(str, weights))}"
        )


def _scaled(scores_QM: NDArray[np.float32], hits_QK: NDArray[np.float32]) -> NDArray[np.float64]:
    """Scale scores (Q, M) so that those of the hits are from 0 to 1; if these are all the same, each counts as the best."""
    there_QK = np.isfinite(hits_QK)
    low_Q1 = np.min(hits_QK, axis=1, where=there_QK, initial=np.inf, keepdims=True).astype(np.float64)
    high_Q1 = np.max(hits_QK, axis=1, where=there_QK, initial=-np.inf, keepdims=True).astype(np.float64)
    range_Q1 = np.where(high_Q1 > low_Q1, high_Q1 - low_Q1, 1)
    is_best_QM = (scores_QM >= high_Q1) & np.isfinite(high_Q1)
    low_Q1 = np.where(np.isfinite(low_Q1), low_Q1, 0)
    scaled_QM = np.where(np.isfinite(scores_QM), (scores_QM - low_Q1) / range_Q1, 0)
    return np.where(high_Q1 > low_Q1, scaled_QM, is_best_QM)
