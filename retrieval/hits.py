"""What a search returns, and the interface of everything that ranks numbered texts for queries.

Letters in names: Q queries, K hits, M candidates, P pairs of a query and a text.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Hits(NamedTuple):
    """The hits of Q queries, best first.

    Attributes:
        scores_QK: The scores; higher is better. Padded with minus infinity.
        rows_QK: The numbers of the texts. Padded with -1.
    """

    scores_QK: NDArray[np.float32]
    rows_QK: NDArray[np.int64]

    @classmethod
    def none(cls, queries: int, k: int = 0) -> "Hits":
        """Return padding only."""
        return cls(np.full((queries, k), -np.inf, np.float32), np.full((queries, k), -1, np.int64))

    def first(self, k: int) -> "Hits":
        """Return the best `k` of each query."""
        return Hits(self.scores_QK[:, :k], self.rows_QK[:, :k])


class Ranker(Protocol):
    """Ranks numbered texts: by vectors, by weighted terms, by BM25, or by several of these (`hybrid.Hybrid`)."""

    def search(self, queries: Sequence[str], k: int) -> Hits:
        """Return the best `k` texts for each query, as (Q, K) with padding; of equal scores, the lower number is first."""

    def pair_scores(
        self, queries: Sequence[str], queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Return the scores (P,) of pairs, each a position in `queries` and the number of a text."""


def sort_hits(scores_QM: NDArray[np.floating], rows_QM: NDArray[np.integer], k: int) -> Hits:
    """Return the best `k` of M candidates in any order, where -1 means no candidate; of equal scores, the lower number is first."""
    scores_QM = np.where(rows_QM >= 0, scores_QM, -np.inf)
    order_QK = np.lexsort((rows_QM, -scores_QM))[:, :k]
    return Hits(
        np.take_along_axis(scores_QM, order_QK, axis=1).astype(np.float32),
        np.take_along_axis(rows_QM, order_QK, axis=1).astype(np.int64),
    )
