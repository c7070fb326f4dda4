"""The interface of all rankers, which `search`, `mine` and `evaluate` use.

Letters in names: Q queries, K hits, P pairs of a query and a text.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from revela_hub.retrieval.top_k import Hits


class Ranker(Protocol):
    """Ranks numbered texts: by vectors, by weighted terms, by BM25, or by several of these (`hybrid.Hybrid`)."""

    key: str
    """Identifies everything but the queries that hits depend on: model, texts, settings."""

    def encode(self, queries: Sequence[str]) -> Any:
        """Return the queries in the form that `search` needs: vectors, weighted terms or words."""
        ...

    def search(self, queries: Any, k: int) -> Hits:
        """Return the best `k` texts for each of the Q encoded queries."""
        ...

    def why_nothing(self, queries: Any) -> list[str]:
        """Return for each of the Q encoded queries why there is nothing to search by; "" for a usable query."""
        ...

    def pair_scores(self, queries: Any, queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the scores (P,) of pairs, each a position in `queries` and the number of a text."""
        ...
