"""What everything that ranks texts can do: `search`, `mine` and `evaluate` know nothing else of it.

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
    """Names what the hits depend on besides the queries: model, texts, settings."""

    def encode(self, queries: Sequence[str]) -> Any:
        """Queries as `search` wants them: vectors, weighted terms, words."""
        ...

    def search(self, queries: Any, k: int) -> Hits:
        """The best `k` texts of each of the Q queries that `encode` returned."""
        ...

    def why_nothing(self, queries: Any) -> list[str]:
        """For each of the Q queries that `encode` returned, why nothing of it is left to search by; "" where something is."""
        ...

    def pair_scores(self, queries: Any, queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]) -> NDArray[np.float32]:
        """The scores (P,) of pairs: a query's place in `queries` and a text's number each."""
        ...
