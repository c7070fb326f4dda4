r"""The contrastive loss of NV-Embed (arXiv 2405.17428, section 4.1), for batches larger than memory.

    L = - mean_i log( exp(cos(q_i, p_i) / t) / sum_{c in C_i} exp(cos(q_i, c) / t) )

C_i contains the positive p_i and the row's hard negatives; with in-batch negatives also the positives and negatives of all
other rows on all devices.

Differences from sentence-transformers' `CachedMultipleNegativesRankingLoss`, whose GradCache (`CachedLossMixin`) is used here:
- other rows can be left out (stage two);
- false negatives are left out of C_i, on all devices: passages with the text of the row's positive or query, and positives of
  the same query in other rows;
- the batch is one list of distinct texts, longest first, and texts of similar length are embedded together, instead of column by
  column. With the tasks of examples/nvembed/local.yaml at 512 tokens, padding adds 10% to the tokens, instead of 90% (stage one)
  and 190% (stage two). A text in several rows is embedded once.

Shapes: T distinct texts, B rows, C columns (query, positive, negatives), D dimensions, W processes, N = W B (C - 1).
"""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, RandContext
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import all_gather_with_grad
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everywhere)

from revela_hub.trainers.base.distributed import is_distributed, rank
from revela_hub.trainers.base.in_batch import false_negatives, gathered_rows

SIMILAR_LENGTH = 0.75
"""Texts of at least this fraction of the longest text's length are embedded in the same batch."""


class NVEmbedLoss(CachedLossMixin, nn.Module):
    """InfoNCE over the texts of a batch of `NVEmbedCollator`, with or without the passages of other rows as negatives.

    `mini_batch_size` is the number of texts that are embedded at a time.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        *,
        temperature: float,
        in_batch_negatives: bool,
        mini_batch_size: int = 32,
    ) -> None:
        super().__init__()
        for module in model.modules():
            if isinstance(module, Pooling):
                module.register_forward_pre_hook(_pool_by_row)
        self.model = model
        self.temperature = temperature
        self.in_batch_negatives = in_batch_negatives
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = None  # read by the mixin

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        """Return the loss of a batch, one dict with its texts, and the (B, C, 2) labels."""
        [features] = sentence_features
        if len(features["lengths"]) <= self.mini_batch_size:  # one mini-batch, so there is nothing to cache
            return self.calculate_loss([[self._embed(features, 0, len(features["input_ids"]))]], labels)
        loss: Tensor = self.forward_cached([features], labels)
        return loss

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Any],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: RandContext | None = None,
    ) -> tuple[Tensor, RandContext | None]:
        """Embed some texts as in the mixin, but by length; with `random_state`, repeat the random numbers of a first pass."""
        with random_state or nullcontext(), nullcontext() if with_grad else torch.no_grad():
            state = RandContext(*sentence_feature.values()) if copy_random_state else None
            return self._embed(sentence_feature, begin, end), state

    def _embed(self, features: dict[str, Any], begin: int, end: int) -> Tensor:
        """Return the (end - begin, D) embeddings of texts, which are sorted by length and padded on the right."""
        length_T, parts = features["lengths"], []
        while begin < end:
            longest = length_T[begin]
            after = next((at for at in range(begin, end) if length_T[at] < SIMILAR_LENGTH * longest), end)
            part = {k: v[begin:after, :longest] if isinstance(v, Tensor) else v for k, v in features.items()}
            del part["lengths"]
            parts.append(self.model(part)["sentence_embedding"])
            begin = after
        return torch.cat(parts)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Return the loss, given the embeddings (t, D) of the mini-batches; `with_backward`, also compute their gradients."""
        assert labels is not None  # made by the collator
        embedding_TD = torch.cat([part for column in reps for part in column])
        embedding_TD = embedding_TD.to(torch.promote_types(embedding_TD.dtype, torch.float32))
        place_BC, text_BC = labels.unbind(-1)
        # In bf16, cosines near 1 have a resolution of 0.004, which is 0.2 in the exponent at temperature 0.02.
        with torch.autocast(embedding_TD.device.type, enabled=False):
            vector_BCD = F.normalize(embedding_TD, dim=-1)[place_BC]
            loss = (self._in_batch if self.in_batch_negatives else self._own)(vector_BCD, text_BC)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def _own(self, vector_BCD: Tensor, text_BC: Tensor) -> Tensor:
        """Return the loss of stage two, with the row's own negatives only, each of which counts once."""
        score_BC = torch.einsum("bd,bcd->bc", vector_BCD[:, 0], vector_BCD[:, 1:]) / self.temperature
        # The same text as the anchor or an earlier passage: two classes have one label to repeat as the negative.
        wrong_BC = (text_BC[:, 1:, None] == text_BC[:, None]).tril(diagonal=0).any(-1)
        wrong_BC[:, 0] = False
        target_B = torch.zeros(len(score_BC), dtype=torch.long, device=score_BC.device)
        return F.cross_entropy(score_BC.masked_fill(wrong_BC, -torch.inf), target_B)

    def _in_batch(self, vector_BCD: Tensor, text_BC: Tensor) -> Tensor:
        """Return the loss of stage one, with the passages of all rows of all processes."""
        query_BD, passage_BCD = vector_BCD[:, 0], vector_BCD[:, 1:]
        if is_distributed():
            passage_BCD = all_gather_with_grad(passage_BCD.contiguous())
        score_BN = query_BD @ passage_BCD.flatten(0, 1).T / self.temperature
        columns = passage_BCD.shape[1]
        target_B = columns * (rank() * len(text_BC) + torch.arange(len(score_BN), device=score_BN.device))
        wrong_BN = false_negatives(text_BC, gathered_rows(text_BC)).flatten(1)
        return F.cross_entropy(score_BN.masked_fill(wrong_BN, -torch.inf), target_B)


def _pool_by_row(pooling: nn.Module, arguments: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Replace the mask of `Pooling` with that of the batch, which excludes the prompt of each text, as a forward pre-hook.

    It is a hook instead of a class, so that the model consists of stock modules.
    """
    features, *rest = arguments
    if "pool_mask" in features:
        features = {**features, "attention_mask": features["pool_mask"]}
    return (features, *rest)
