r"""The contrastive loss of NV-Embed (arXiv 2405.17428, section 4.1), for batches larger than memory.

    L = - mean_i log( exp(cos(q_i, p_i) / t) / sum_{c in C_i} exp(cos(q_i, c) / t) )

C_i holds the positive p_i and the row's hard negatives; with in-batch negatives also the positives and negatives of all
other rows, of all devices.

Why not sentence-transformers' `CachedMultipleNegativesRankingLoss`, whose GradCache this uses (`CachedLossMixin`):
- it cannot leave the other rows out (stage two);
- it takes a passage that is right for one row and a negative of another for a negative of the first; here what has the
  text of the row's positive or query, or is the positive of the same query, is left out of C_i, on whatever device it is;
- it embeds a batch column by column. Here the batch is one list of its distinct texts, longest first, and those of about
  one length go through the model together. With the tasks of examples/nvembed/local.yaml at 512 tokens the padding is
  then 10% of the tokens, where column by column it is 90% (stage one) and 190% (stage two). A text that stands in
  several rows is embedded once.

Letters: T distinct texts, B rows, C columns (query, positive, negatives), D dimensions, W processes, N = W B (C - 1).
"""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, RandContext
from sentence_transformers.util import all_gather, all_gather_with_grad
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everywhere)

SIMILAR_LENGTH = 0.75
"""Texts as long as this share of the longest go through the model with it."""


class NVEmbedLoss(CachedLossMixin, nn.Module):
    """InfoNCE over the texts of a batch, with or without the other rows' passages.

    Args:
        model: embeds the texts.
        temperature: of the softmax.
        in_batch_negatives: whether the other rows' passages are negatives.
        mini_batch_size: texts that are embedded at a time.
        mini_batch_num_tokens: instead of it, how many tokens, padding not counted.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        *,
        temperature: float,
        in_batch_negatives: bool,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.in_batch_negatives = in_batch_negatives
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        """The loss of the batch of `NVEmbedCollator`, a scalar.

        Args:
            sentence_features: one dict, of the batch's texts.
            labels: (B, C, 2), see `NVEmbedCollator`.
        """
        (features,) = sentence_features
        if self._fits(features):  # nothing to cache: embedding everything twice would gain nothing
            return self.calculate_loss([[self._embed(features, 0, len(features["input_ids"]))]], labels)
        loss: Tensor = self.forward_cached([features], labels)
        return loss

    def _fits(self, features: dict[str, Tensor]) -> bool:
        mask_TL = features["attention_mask"]
        if self.mini_batch_num_tokens is None:
            return len(mask_TL) <= self.mini_batch_size
        return int(mask_TL.sum()) <= self.mini_batch_num_tokens

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Any],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: RandContext | None = None,
    ) -> tuple[Tensor, RandContext | None]:
        """The mixin's, by lengths: embeds some texts, with the random numbers of the first time if those are given."""
        with random_state or nullcontext(), nullcontext() if with_grad else torch.no_grad():
            state = RandContext(*sentence_feature.values()) if copy_random_state else None
            return self._embed(sentence_feature, begin, end), state

    def _embed(self, features: dict[str, Any], begin: int, end: int) -> Tensor:
        """Embeddings (end - begin, D) of texts that are sorted by length and padded on the right."""
        length_T = features["attention_mask"].sum(1).tolist()
        parts = []
        while begin < end:
            longest = length_T[begin]
            after = next((at for at in range(begin, end) if length_T[at] < SIMILAR_LENGTH * longest), end)
            part = {k: v[begin:after, :longest] if isinstance(v, Tensor) else v for k, v in features.items()}
            parts.append(self.model(part)["sentence_embedding"])
            begin = after
        return torch.cat(parts)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss, given the embeddings of all texts.

        Args:
            reps: one list, of the mini-batches' embeddings (t, D).
            labels: (B, C, 2).
            with_backward: whether to go backward to the embeddings, and return the loss detached.
        """
        assert labels is not None  # the collator always makes them
        embedding_TD = torch.cat(reps[0])
        embedding_TD = embedding_TD.to(torch.promote_types(embedding_TD.dtype, torch.float32))
        place_BC, text_BC = labels.unbind(-1)
        # In bf16 cosines near 1 are 0.004 apart: at temperature 0.02 a step of 0.2 in the exponent.
        with torch.autocast(embedding_TD.device.type, enabled=False):
            vector_BCD = F.normalize(embedding_TD, dim=-1)[place_BC]
            loss = (self._in_batch if self.in_batch_negatives else self._own)(vector_BCD, text_BC)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def _own(self, vector_BCD: Tensor, text_BC: Tensor) -> Tensor:
        """Stage two: the row's own negatives only."""
        score_BC = torch.einsum("bd,bcd->bc", vector_BCD[:, 0], vector_BCD[:, 1:]) / self.temperature
        wrong_BC = (text_BC[:, 1:] == text_BC[:, 1:2]) | (text_BC[:, 1:] == text_BC[:, :1])
        wrong_BC[:, 0] = False
        target_B = torch.zeros(len(score_BC), dtype=torch.long, device=score_BC.device)
        return F.cross_entropy(score_BC.masked_fill(wrong_BC, -torch.inf), target_B)

    def _in_batch(self, vector_BCD: Tensor, text_BC: Tensor) -> Tensor:
        """Stage one: the passages of all rows of all processes."""
        query_BD, passage_BCD, first = vector_BCD[:, 0], vector_BCD[:, 1:], 0
        all_text_BC = text_BC
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            passage_BCD, all_text_BC = all_gather_with_grad(passage_BCD.contiguous()), all_gather(text_BC.contiguous())
            first = torch.distributed.get_rank() * len(text_BC)
        score_BN = query_BD @ passage_BCD.flatten(0, 1).T / self.temperature
        columns = passage_BCD.shape[1]
        target_B = columns * (first + torch.arange(len(score_BN), device=score_BN.device))
        wrong_BN = _right_for_the_query(text_BC, all_text_BC).scatter(1, target_B[:, None], False)
        return F.cross_entropy(score_BN.masked_fill(wrong_BN, -torch.inf), target_B)


def _right_for_the_query(text_BC: Tensor, all_text_BC: Tensor) -> Tensor:
    """Which passages are no negatives of which query (B, N): its positive or itself, or the positive of the same query."""
    query_B1, positive_B1 = text_BC[:, :1], text_BC[:, 1:2]
    passage_N = all_text_BC[:, 1:].flatten()
    right_BN = (passage_N == positive_B1) | (passage_N == query_B1)
    same_query_BW = all_text_BC[:, 0] == query_B1  # W here counts the rows of all processes
    right_BN[:, :: all_text_BC.shape[1] - 1] |= same_query_BW
    return right_BN
