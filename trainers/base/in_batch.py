"""Which passages of a batch are negatives of a query: not those with the text of one of its positives, on any process.

Texts are compared by `text_hash`. Letters in names: B rows of this process, R rows of all processes, C columns (query, positive,
negatives), P = C - 1 passages of a row.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from sentence_transformers.util import all_gather
from torch import Tensor, nn

from revela_hub.data.text.same_text import text_hash
from revela_hub.trainers.base.distributed import is_distributed, rank
from revela_hub.trainers.base.rows import in_order


def text_hashes(rows: list[dict[str, Any]]) -> Tensor:
    """Return (B, C) hashes of the texts of rows: anchor, positive, negatives."""
    columns = in_order(rows[0])
    return torch.tensor([[text_hash(row[name]) for name in columns] for row in rows])


def gathered_rows(rows: Tensor) -> Tensor:
    """Return the rows of all processes, without gradients; every process must have the same number of rows."""
    return all_gather(rows.contiguous()) if is_distributed() else rows


def false_negatives(hash_BC: Tensor, hash_RC: Tensor) -> Tensor:
    """Return (B, R, P), True for passages that are no negatives of a row, although they are not its positive.

    They are the same text as the query, as its positive, or as the positive of a row with the same query.

    >>> query, passage, other = 1, 10, 20
    >>> rows = torch.tensor([[query, passage], [2, passage], [query, other], [3, 30]])
    >>> false_negatives(rows, rows)[..., 0].int()
    tensor([[0, 1, 1, 0],
            [1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 0, 0]], dtype=torch.int32)
    """
    texts, place_RC = torch.unique(hash_RC, return_inverse=True)
    first = rank() * len(hash_BC)
    own_B = torch.arange(len(hash_BC), device=hash_BC.device)
    place_BC = place_RC[first : first + len(hash_BC)]
    right_BT = torch.zeros(len(hash_BC), len(texts), dtype=torch.bool, device=hash_BC.device)
    right_BT[own_B, place_BC[:, 0]] = True
    row, same = (place_BC[:, :1] == place_RC[:, 0]).nonzero(as_tuple=True)
    right_BT[row, place_RC[same, 1]] = True
    wrong_BRP = right_BT[:, place_RC[:, 1:]]
    wrong_BRP[own_B, first + own_B, 0] = False
    return wrong_BRP


class MaskedSimilarity:
    """A similarity function for sentence-transformers' contrastive losses, which call it with blocks of the queries in order."""

    def __init__(self, similarity: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.similarity, self.__name__ = similarity, getattr(similarity, "__name__", "similarity")
        self.hidden_BN: Tensor | None = None
        self.row = 0

    def __call__(self, queries: Tensor, passages: Tensor) -> Tensor:
        """Return the scores, minus infinity for false negatives."""
        scores = self.similarity(queries, passages)
        assert self.hidden_BN is not None
        start = self.row % len(self.hidden_BN)
        self.row = start + len(scores)
        return scores.masked_fill(self.hidden_BN[start : self.row].to(scores.device), -torch.inf)


class InBatchNegatives(nn.Module):
    """A loss of sentence-transformers, with this similarity, without false negatives; the labels of its batches are `text_hashes`.

    The loss compares each query with the passages of all rows: all positives, then all first negatives, ...
    """

    def __init__(self, model: nn.Module, loss: nn.Module, similarity: MaskedSimilarity) -> None:
        super().__init__()
        self.model, self.loss, self.similarity = model, loss, similarity

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Any:
        """Return the loss of a batch."""
        wrong_BRP = false_negatives(labels, gathered_rows(labels))
        self.similarity.hidden_BN, self.similarity.row = wrong_BRP.transpose(1, 2).flatten(1), 0
        return self.loss(sentence_features, labels)


@dataclass
class TextHashCollator(SentenceTransformerDataCollator):
    """sentence-transformers' collator, with `text_hashes` as the labels."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch: the tokens of each column, and `label` (B, C)."""
        return super().__call__(features) | {"label": text_hashes(features)}
