r"""Hybrid search: the hits of two or three rankers fused into one ranking.

For query q and text d, with scores s_p and weights w_p of the rankers p:

    sum      sum of w_p * s_p(q, d)                                         (arXiv 2304.10195: dense + sparse)
    minmax   sum of w_p * (s_p(q, d) - min_p(q)) / (max_p(q) - min_p(q))    minimum and maximum over p's hits for q

In minmax, a ranker adds nothing for a text that is not among its hits. In the sum, `Hybrid` computes the missing
score; `fuse` uses the lowest score of the ranker's hits.

Letters in names: Q queries, K hits, P pairs or parts, U texts among the hits of any part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError
from revela_hub.files import key_of
from revela_hub.retrieval.ranker import Ranker
from revela_hub.retrieval.top_k import Hits

Fusion = Literal["sum", "minmax"]
PartT = TypeVar("PartT")

BM25_WEIGHT = 0.3
"""Weight of BM25 without evidence: on ten collections with labels it was better than the retriever alone on nine."""
WEIGHTS = (1e-6, 1e6)
"""The range of a weight: scores are float32."""


def fuse(
    parts: Sequence[Hits], k: int, fusion: Fusion | str = "minmax", weights: Sequence[float] | None = None
) -> Hits:
    """Fuse the hits of several rankers for the same queries into one ranking.

    Args:
        parts: The hits of each ranker, over the same numbered texts.
        k: Hits to keep per query.
        fusion: "sum" or "minmax", see above.
        weights: One weight per part; default: equal weights that sum to 1 (for "sum": all 1).

    Raises:
        UserError: An unknown fusion, or not one weight per part.
    """
    parts, weights = _used(parts, part_weights(weights, len(parts), fusion))
    return _best(*_union(parts), k, fusion, weights)


@dataclass
class HybridQueries:
    """The queries as each part encodes them, and the parts' hits, so that no part searches twice."""

    parts: list[Any]
    found: dict[int, list[Hits]] = field(default_factory=dict)


class Hybrid:
    """Several rankers of the same texts, combined (a `Ranker`).

    Args:
        parts: Two or more rankers.
        fusion: See `fuse`.
        weights: See `fuse`.
        depth: Minimum number of hits of each part to fuse.

    Raises:
        UserError: As `fuse`.
    """

    def __init__(
        self,
        parts: Sequence[Ranker],
        fusion: Fusion | str = "minmax",
        weights: Sequence[float] | None = None,
        depth: int = 100,
    ) -> None:
        """Checks the weights; searches nothing yet."""
        self.parts = list(parts)
        self.fusion = fusion
        self.weights = part_weights(weights, len(parts), fusion)
        self.depth = depth
        self.key = key_of("hybrid", [part.key for part in parts], fusion, self.weights, depth)
        self.parts, self.weights = _used(self.parts, self.weights)

    def encode(self, queries: Sequence[str]) -> HybridQueries:
        """See `Ranker`."""
        return HybridQueries([part.encode(queries) for part in self.parts])

    def search(self, queries: HybridQueries, k: int) -> Hits:
        """See `Ranker`."""
        rows_QU, scores_PQU = _union(self._found(queries, k))
        if self.fusion == "sum":
            for part, scores_QU, encoded in zip(self.parts, scores_PQU, queries.parts, strict=True):
                queries_M, columns_M = np.nonzero(np.isnan(scores_QU) & (rows_QU >= 0))
                rows_M = rows_QU[queries_M, columns_M]
                scores_QU[queries_M, columns_M] = part.pair_scores(encoded, queries_M, rows_M)
        return _best(rows_QU, scores_PQU, k, self.fusion, self.weights)

    def why_nothing(self, queries: HybridQueries) -> list[str]:
        """See `Ranker`: the reasons of all parts, if none has anything to search by."""
        of_parts = [part.why_nothing(encoded) for part, encoded in zip(self.parts, queries.parts, strict=True)]
        return ["; ".join(reasons) if all(reasons) else "" for reasons in zip(*of_parts, strict=True)]

    def pair_scores(
        self, queries: HybridQueries, queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """See `Ranker`. In minmax, a text that is not a hit is scored by its place among the hits, or 0 below."""
        total_P = np.zeros(len(rows_P), dtype=np.float64)
        for part, encoded, hits, weight in zip(
            self.parts, queries.parts, self._found(queries, 0), self.weights, strict=True
        ):
            scores_P = part.pair_scores(encoded, queries_P, rows_P).astype(np.float64)
            found_PK = hits.scores_QK[queries_P]
            there_P = np.isfinite(found_PK).sum(axis=1)
            if self.fusion == "minmax":
                low_P, high_P = _range(found_PK)
                scores_P = np.clip((scores_P - low_P) / np.where(high_P > low_P, high_P - low_P, 1), 0, None)
                scores_P = np.where(high_P > low_P, scores_P, ((there_P > 0) & (scores_P >= high_P)).astype(float))
            total_P += weight * scores_P
        return total_P.astype(np.float32)

    def _found(self, queries: HybridQueries, k: int) -> list[Hits]:
        depth = max(k, self.depth)
        if depth not in queries.found:
            queries.found[depth] = [
                part.search(encoded, depth) for part, encoded in zip(self.parts, queries.parts, strict=True)
            ]
        return queries.found[depth]


def part_weights(weights: Sequence[float] | None, parts: int, fusion: str) -> list[float]:
    """Return the weights of a hybrid's parts."""
    if fusion not in get_args(Fusion):
        raise UserError(f"the fusion must be one of {', '.join(get_args(Fusion))}, not {fusion!r}")
    if weights is None:
        return [1.0 if fusion == "sum" else 1.0 / parts] * parts
    least, most = WEIGHTS
    if len(weights) != parts or not any(weights) or not all(w == 0 or least <= w <= most for w in weights):
        raise UserError(
            f"a hybrid of {parts} parts needs {parts} weights, each 0 or between {least:g} and {most:g} and not all 0, not"
            f" {' '.join(map(str, weights))}"
        )
    return [float(weight) for weight in weights]


def _used(parts: Sequence[PartT], weights: Sequence[float]) -> tuple[list[PartT], list[float]]:
    """Return the parts with a weight above 0, and their weights: other parts would add hits with score 0."""
    used = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight]
    return [part for part, _ in used], [weight for _, weight in used]


def _union(parts: Sequence[Hits]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the texts among the hits of any part (Q, U), ascending, padded with -1; and scores (P, Q, U) with NaNs."""
    all_QK = np.sort(np.concatenate([part.rows_QK for part in parts], axis=1), axis=1)
    repeated_QK = np.zeros_like(all_QK, dtype=bool)
    repeated_QK[:, 1:] = all_QK[:, 1:] == all_QK[:, :-1]
    all_QK[repeated_QK] = -1
    end = np.iinfo(np.int64).max
    rows_QU = np.sort(np.where(all_QK < 0, end, all_QK), axis=1)
    rows_QU = rows_QU[:, : max(1, int((rows_QU < end).sum(axis=1).max(initial=0)))]
    scores_PQU = np.full((len(parts), *rows_QU.shape), np.nan)
    for part, scores_QU in zip(parts, scores_PQU, strict=True):
        for query, (rows_U, rows_K) in enumerate(zip(rows_QU, part.rows_QK, strict=True)):
            there_K = rows_K >= 0
            scores_QU[query, np.searchsorted(rows_U, rows_K[there_K])] = part.scores_QK[query, there_K]
    return np.where(rows_QU == end, -1, rows_QU), scores_PQU


def _range(scores_QK: NDArray[np.floating[Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the minimum and maximum score of each query's hits (Q,); 0 for a query without hits."""
    there_QK = np.isfinite(scores_QK)
    low_Q = np.min(scores_QK, axis=1, where=there_QK, initial=np.inf).astype(np.float64)
    high_Q = np.max(scores_QK, axis=1, where=there_QK, initial=-np.inf).astype(np.float64)
    any_Q = there_QK.any(axis=1)
    return np.where(any_Q, low_Q, 0), np.where(any_Q, high_Q, 0)


def _best(
    rows_QU: NDArray[np.int64], scores_PQU: NDArray[np.float64], k: int, fusion: str, weights: Sequence[float]
) -> Hits:
    total_QU = np.zeros(rows_QU.shape)
    for scores_QU, weight in zip(scores_PQU, weights, strict=True):
        low_Q, high_Q = _range(scores_QU)
        low_Q1, high_Q1 = low_Q[:, None], high_Q[:, None]
        if fusion == "sum":
            total_QU += weight * np.where(np.isnan(scores_QU), low_Q1, scores_QU)
        else:  # if all hits of a part score the same, each counts as the best
            scaled_QU = (scores_QU - low_Q1) / np.where(high_Q1 > low_Q1, high_Q1 - low_Q1, 1)
            scaled_QU = np.where(high_Q1 > low_Q1, scaled_QU, 1.0)
            total_QU += weight * np.where(np.isnan(scores_QU), 0, scaled_QU)
    total_QU[rows_QU < 0] = -np.inf
    # Stable: texts are in ascending order, so ties are broken by the lower number.
    order_QK = np.argsort(-total_QU, axis=1, kind="stable")[:, :k]
    return Hits(
        np.take_along_axis(total_QU, order_QK, axis=1).astype(np.float32), np.take_along_axis(rows_QU, order_QK, axis=1)
    )
