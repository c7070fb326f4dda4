r"""Joint reading: in-batch attention as one softmax over a chunk's own tokens and those of the other chunks.

The paper adds the reads of other chunks to the output of self-attention (`in_batch_attention.py`), which a pre-trained LM has never
seen: its loss rises to that of guessing. Here the tokens of the other chunks are further keys of the same softmax, so a pre-trained LM
uses them from the first step on. For a query q of chunk i, with the logits s(q, k) of the model's own attention:

    h_i = sum_t p_t V_t^h  +  sum_{j != i} sum_l p_jl V_jl^e
    p   = softmax over  s(q, K_t^h) for the own tokens that q may see,  and  s(q, K_jl^e) + log Sim[i, j] + c  for all tokens of j

c is one number per layer, trained with the model. It is the attention that the LM pays to other chunks if Sim is 1.

The softmax is the one of the model's own attention function, called with more keys and an additive mask. So soft caps, sinks, dropout
and sliding windows stay as they are. In half precision, log Sim + c is rounded like the other logits. DREAM (arXiv 2606.24667) is related: there, scores of a query's candidate documents set the
attention of selected heads of a frozen LM. Here every head reads, no queries are needed, and the LM may be trained, too.

Shapes: N chunks, L tokens, H heads, K key/value heads, D head dimension, J chunks read by each chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .backbones import additive
from .in_batch_kernels import InBatch, checkpointed

# Logits of the rows that are computed at a time, and again in the backward pass. On a GPU, small blocks spend their time on launching kernels.
BLOCK_ON_CPU, BLOCK_ELSEWHERE = 2**24, 2**27


class ReadingBias(nn.Module):
    """The bias c of each layer. A module, so that PEFT can train and save it with the adapters."""

    def __init__(self, layers: int, initial: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((layers,), float(initial)))

    def forward(self, similarity: Tensor) -> Tensor:
        """Return the (layers,) biases in the dtype of the similarities."""
        return self.weight.to(similarity.dtype)


def joint_reading(
    attention: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    own: tuple[Tensor, Tensor, Tensor],
    others: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    in_batch: InBatch,
    **kwargs: Any,
) -> Tensor:
    """Compute stream h with joint reading, (N, L, H, D) outputs before the output projection.

    `own` are the queries (N, H, L, D), keys and values (N, K, L, D) of stream h, `others` the keys and values of stream e. The mask
    is as the model passes it: None, or boolean or additive and (1 or N, 1, L, L).
    """
    query, length = own[0], own[0].shape[2]
    if own[1].shape[2] != length:
        raise ValueError("its attention has keys that are not tokens, which joint reading does not support")
    if attention_mask is None:
        attention_mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
    own_mask = additive(attention_mask, query.dtype) if attention_mask.dtype == torch.bool else attention_mask
    own_mask = own_mask.to(query.dtype).expand(len(query), -1, -1, -1)
    neighbour_NJ, weight_NJ = neighbours(in_batch)
    assert in_batch.bias is not None
    bias = in_batch.bias[module.layer_idx]  # type: ignore[index]
    logit_NJ = (weight_NJ.clamp(min=torch.finfo(weight_NJ.dtype).tiny).log() + bias).to(query.dtype)
    lowest = torch.finfo(query.dtype).min
    logit_NJ = logit_NJ.masked_fill(weight_NJ.detach() <= 0, lowest)

    def read(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, neighbour_XJ: Tensor, logit_XJ: Tensor) -> Tensor:
        # (X, J, K, L, D) -> (X, K, J * L, D)
        more_key, more_value = (x[neighbour_XJ].transpose(1, 2).flatten(2, 3) for x in others)
        more = logit_XJ[:, None, None, :, None].expand(-1, 1, length, -1, length)
        if in_batch.lengths_N is not None:
            padding_XJL = torch.arange(length, device=query.device) >= in_batch.lengths_N[neighbour_XJ][..., None]
            more = more.masked_fill(padding_XJL[:, None, None], lowest)
        mask = torch.cat([mask, more.flatten(3)], -1)
        keys, values = torch.cat([key, more_key], 2), torch.cat([value, more_value], 2)
        if mask.requires_grad and not (query.requires_grad or keys.requires_grad or values.requires_grad):
            # In the first layer of a frozen LM. On a GPU, torch would not keep what this gradient needs (pytorch/pytorch#148476).
            query = query.detach().requires_grad_()
        return attention(module, query, keys, values, mask, **kwargs)[0]

    logits = query[0].numel() // query.shape[-1] * length * (neighbour_NJ.shape[1] + 1)  # of one row
    rows = max(1, (BLOCK_ON_CPU if query.device.type == "cpu" else BLOCK_ELSEWHERE) // logits)
    blocks = zip(*(x.split(rows) for x in (*own, own_mask, neighbour_NJ, logit_NJ)), strict=True)
    return torch.cat([checkpointed(read, *block, dropout=kwargs.get("dropout") or 0.0) for block in blocks])


def neighbours(in_batch: InBatch) -> tuple[Tensor, Tensor]:
    """Return the (N, J) rows that each chunk reads, and their similarities; 0 where a chunk reads fewer than J."""
    similarity = in_batch.similarity_GBB
    groups, size, _ = similarity.shape
    diagonal = torch.eye(size, dtype=torch.bool, device=similarity.device)
    similarity = similarity.masked_fill(diagonal, 0)
    count = size - 1
    if in_batch.pairs_2P is not None:  # skip the pairs that are not listed
        listed = torch.zeros(groups * size, size, dtype=torch.bool, device=similarity.device)
        listed[in_batch.pairs_2P[0], in_batch.pairs_2P[1] % size] = True
        similarity = similarity * listed.view_as(similarity)
        count = int(listed.sum(-1).max())
    place_GBJ = similarity.detach().masked_fill(diagonal, -1).topk(count, dim=-1).indices
    first_G11 = torch.arange(groups, device=similarity.device)[:, None, None] * size
    return (place_GBJ + first_G11).flatten(0, 1), similarity.gather(-1, place_GBJ).flatten(0, 1)
