"""Deterministic top-k selection over many scores.

Letters in names: Q queries, N texts of a block, K hits, M candidates.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # imported where it is used: BM25 does not need torch
    from torch import Tensor


class Hits(NamedTuple):
    """The hits of Q queries, best first, as returned by every index and ranker.

    Attributes:
        scores_QK: The scores; higher is better. Padded with minus infinity.
        rows_QK: The numbers of the retrieved texts. Padded with -1.
    """

    scores_QK: NDArray[np.float32]
    rows_QK: NDArray[np.int64]

    @staticmethod
    def concatenate(parts: "Iterable[Hits]") -> "Hits":
        """Concatenate the hits of several searches for different queries."""
        parts = [Hits.none(0), *parts]
        depth = max(part.rows_QK.shape[1] for part in parts)

        def widened(array: NDArray[np.generic], fill: float) -> NDArray[np.generic]:
            return np.pad(array, ((0, 0), (0, depth - array.shape[1])), constant_values=fill)

        return Hits(
            np.concatenate([widened(part.scores_QK, -np.inf) for part in parts]),
            np.concatenate([widened(part.rows_QK, -1) for part in parts]),
        )

    @staticmethod
    def none(queries: int) -> "Hits":
        """Return empty hits."""
        return Hits(np.empty((queries, 0), np.float32), np.empty((queries, 0), np.int64))


def best_hits(blocks: "Iterable[tuple[int, Tensor]]", k: int) -> Hits:
    """Return the `k` best of scores given block by block; ties are broken by the lower number.

    Args:
        blocks: For each block the number of its first text and the scores (Q, N), in ascending order.
        k: Hits to keep per query.
    """
    import torch

    best: tuple[Tensor, Tensor] | None = None
    for first, scores_QN in blocks:
        if best is None or best[0].shape[1] < k:
            scores_QM, columns_QM = stable_top_k(scores_QN, k)
        else:  # only scores above the current k-th best matter; after a few blocks these are very few
            scores_QM, columns_QM = _above(scores_QN, best[0][:, -1:])
        rows_QM = columns_QM + first
        if best is not None and scores_QM.shape[1]:
            scores_QM, places_QM = stable_top_k(torch.cat([best[0], scores_QM], dim=1), k)
            rows_QM = torch.cat([best[1], rows_QM], dim=1).gather(1, places_QM)
        elif best is not None:
            continue
        best = scores_QM, rows_QM
    if best is None:
        return Hits.none(0)
    return Hits(best[0].cpu().float().numpy(), best[1].cpu().numpy())


def top_hits(scores_N: NDArray[np.float32], rows_N: NDArray[np.integer], k: int) -> Hits:
    """Return the `k` best of one query's scores (BM25, sparse); ties are broken by the lower number."""
    if len(scores_N) > k:
        least = np.partition(scores_N, len(scores_N) - k)[len(scores_N) - k]
        candidates = scores_N >= least
        scores_N, rows_N = scores_N[candidates], rows_N[candidates]
    order_K = np.lexsort((rows_N, -scores_N))[:k]
    return Hits(scores_N[order_K][None], rows_N[order_K][None].astype(np.int64))


def _above(scores_QN: "Tensor", bound_Q1: "Tensor") -> "tuple[Tensor, Tensor]":
    """Return the scores above a bound and their columns, ascending: (Q, M), padded with minus infinity."""
    import torch

    queries, columns = (scores_QN > bound_Q1).nonzero(as_tuple=True)
    counts_Q = torch.bincount(queries, minlength=len(scores_QN))
    most = int(counts_Q.max()) if len(queries) else 0
    places = torch.arange(len(queries), device=queries.device) - (counts_Q.cumsum(0) - counts_Q)[queries]
    scores_QM = scores_QN.new_full((len(scores_QN), most), -torch.inf)
    columns_QM = columns.new_zeros((len(scores_QN), most))
    scores_QM[queries, places], columns_QM[queries, places] = scores_QN[queries, columns], columns
    return scores_QM, columns_QM


def stable_top_k(scores_QN: "Tensor", k: int) -> "tuple[Tensor, Tensor]":
    """Return the `k` best columns of each row, scores (Q, K) and columns (Q, K); ties are broken by the lower column.

    `torch.topk` does not define which of several equal scores it returns, so with duplicate documents in the corpus, or
    with a model that maps everything to one vector, its result is not deterministic.
    """
    import torch

    k = min(k, scores_QN.shape[1])
    scores_QK, columns_QK = torch.topk(scores_QN, k, dim=1)
    tied_Q = (scores_QN >= scores_QK[:, -1:]).sum(dim=1) > k  # more candidates for the last place than places
    if tied_Q.any():
        sorted_scores, sorted_columns = torch.sort(scores_QN[tied_Q], dim=1, descending=True, stable=True)
        scores_QK[tied_Q], columns_QK[tied_Q] = sorted_scores[:, :k], sorted_columns[:, :k]
    # Equal scores further up: order by column first, which the stable sort by score preserves.
    columns_QK, order_QK = columns_QK.sort(dim=1)
    scores_QK, order_QK = scores_QK.gather(1, order_QK).sort(dim=1, descending=True, stable=True)
    return scores_QK, columns_QK.gather(1, order_QK)
