"""The best k of many scores, the same ones every time."""

from typing import NamedTuple

import torch
from torch import Tensor


class Hits(NamedTuple):
    """The best hits of every query, best first: scores (Q, K) and positions in the corpus (Q, K)."""

    scores_QK: Tensor
    rows_QK: Tensor


def stable_top_k(scores_QN: Tensor, k: int) -> Hits:
    """The `k` best columns of each row, the lower column first among equals.

    `torch.topk` does not say which of several equal scores it takes. With copies of a document in the corpus, or with
    a model that maps everything to one vector, the result would depend on chance; here it does not.
    """
    k = min(k, scores_QN.shape[1])
    scores_QK, columns_QK = torch.topk(scores_QN, k, dim=1)
    tied_Q = (scores_QN >= scores_QK[:, -1:]).sum(dim=1) > k  # more candidates for the last place than places
    if tied_Q.any():
        sorted_scores, sorted_columns = torch.sort(scores_QN[tied_Q], dim=1, descending=True, stable=True)
        scores_QK[tied_Q], columns_QK[tied_Q] = sorted_scores[:, :k], sorted_columns[:, :k]
    # Equal scores further up: by column, which a stable sort by score then keeps.
    columns_QK, order_QK = columns_QK.sort(dim=1)
    scores_QK, order_QK = scores_QK.gather(1, order_QK).sort(dim=1, descending=True, stable=True)
    return Hits(scores_QK, columns_QK.gather(1, order_QK))
