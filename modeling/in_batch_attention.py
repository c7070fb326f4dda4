"""In-batch attention (Revela, arXiv 2506.16552, section 3): a decoder that also reads the other chunks of its group.

Two streams run through the same weights, stacked along the batch: rows [0, N) are stream e (ordinary causal attention),
rows [N, 2N) are stream h. In every layer and head, with i, j chunks of one group:

    h_i = causal self-attention of h_i  +  sum_{j != i} Sim[i, j] * b_ij
    b_ij = softmax(Q_i^h K_j^e^T / sqrt(d)) V_j^e        over all non-padding tokens of chunk j, no causal mask

and, with V-normalisation, b_ij is divided by softmax(.) @ ||V_j^e||_2 + eps. The sum is added before the output projection.

It is one attention function, registered with transformers under the names `revela_sdpa` and `revela_eager`, so no decoder
is copied: a model set to one of these names behaves as usual until `in_batch=InBatch(...)` reaches its forward.

Memory: b_ij is computed for one chunk j at a time, for all i of all groups at once, and recomputed in the backward pass,
so that neither scores (B x B x L x L) nor outputs (B x B x L x d) of all pairs ever exist together. The price is one more
forward of the cross-document part. Grouped-query heads are folded into the query length, which repeats no key or value.

Shapes: G groups, B chunks of a group, N = G * B rows, L tokens, H heads, K key/value heads, R = H / K, D head dimension,
P pairs of chunks.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask


@dataclass
class InBatch:
    """What the cross-document part needs beside queries, keys and values.

    Attributes:
        similarity_GBB: weight of chunk j for chunk i, at least float32; its diagonal is ignored.
        key_mask_NL: True where a token may be read; None when there is no padding.
        pairs_2P: rows (i, j), counted over all N, of the pairs to compute; None for all pairs.
        v_normalization: whether b_ij is divided by the weighted norm of its values.
        eps: added to that divisor.
    """

    similarity_GBB: Tensor
    key_mask_NL: Tensor | None = None
    pairs_2P: Tensor | None = None
    v_normalization: bool = False
    eps: float = 1e-6


@dataclass
class Options:
    """How scores become weights: scale, logit soft cap (Gemma 2), dropout, V-normalisation, and which kernel."""

    scaling: float
    softcap: float | None
    dropout: float
    eager: bool
    v_normalization: bool
    eps: float


def revela_sdpa_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention function `revela_sdpa`; arguments and result as every function of `AttentionInterface`."""
    # Torch's SDPA has no soft cap (Gemma 2): its layers take the eager path, as they do in transformers.
    if kwargs.get("softcap") is not None:
        raise ValueError("this model caps its attention logits, which SDPA cannot do: use attn_implementation='eager'")
    return _in_batch_attention(sdpa_attention_forward, False, module, query, key, value, attention_mask, **kwargs)


def revela_eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention function `revela_eager`: the model's own eager attention plus the cross-document part."""
    # Eager attention is not in the interface: each modeling file has its own, with what that family does differently.
    own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return _in_batch_attention(own, True, module, query, key, value, attention_mask, **kwargs)


def _in_batch_attention(
    self_attention: Callable[..., tuple[Tensor, Tensor | None]],
    eager: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    in_batch: InBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Self-attention of all 2N rows, plus the cross-document part for the rows of stream h."""
    output, weights = self_attention(module, query, key, value, attention_mask, **kwargs)  # (2N, L, H, D)
    if in_batch is None:
        return output, weights
    n = query.shape[0] // 2
    scaling = kwargs.get("scaling")
    options = Options(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=kwargs.get("softcap"),
        dropout=kwargs.get("dropout") or 0.0,
        eager=eager,
        v_normalization=in_batch.v_normalization,
        eps=in_batch.eps,
    )
    cross = cross_document_attention(query[n:], key[:n], value[:n], in_batch, options)
    return torch.cat([output[:n], output[n:] + cross.to(output.dtype)]), weights


def cross_document_attention(
    query_NHLD: Tensor, key_NKLD: Tensor, value_NKLD: Tensor, in_batch: InBatch, options: Options
) -> Tensor:
    """Returns sum_{j != i} Sim[i, j] * b_ij, of shape (N, L, H, D), at least in float32."""
    n, heads, length, dim = query_NHLD.shape
    kv_heads = key_NKLD.shape[1]
    # Query heads that share a key/value head become more queries of that head.
    query_NKRLD = (query_NHLD * options.scaling).view(n, kv_heads, heads // kv_heads, length, dim)
    summed = _all_pairs if in_batch.pairs_2P is None else _some_pairs
    output_NKRLD = summed(query_NKRLD, key_NKLD, value_NKLD, in_batch, options)
    return output_NKRLD.reshape(n, heads, length, dim).transpose(1, 2)


def _all_pairs(
    query_NKRLD: Tensor, key_NKLD: Tensor, value_NKLD: Tensor, in_batch: InBatch, options: Options
) -> Tensor:
    """Chunk by chunk: all queries of a group read chunk j of their group."""
    groups, size, _ = in_batch.similarity_GBB.shape
    _, kv_heads, repeats, length, dim = query_NKRLD.shape
    diagonal = torch.eye(size, dtype=torch.bool, device=query_NKRLD.device)
    similarity = in_batch.similarity_GBB.masked_fill(diagonal, 0.0)
    query = query_NKRLD.view(groups, size, kv_heads, repeats, length, dim).permute(0, 2, 1, 3, 4, 5)
    query_GKTD = query.reshape(groups, kv_heads, size * repeats * length, dim)  # T = B * R * L queries
    # unbind, not indexing: its backward stacks the gradients instead of adding B zero-filled tensors.
    keys = key_NKLD.view(groups, size, kv_heads, length, dim).unbind(1)
    values = value_NKLD.view(groups, size, kv_heads, length, dim).unbind(1)
    weights_GB = similarity.unbind(2)
    masks: list[Tensor | None] = [None] * size
    if in_batch.key_mask_NL is not None:
        masks = list(in_batch.key_mask_NL.view(groups, size, length).unbind(1))
    output_GKTD: Tensor | None = None
    for key, value, mask, weight_GB in zip(keys, values, masks, weights_GB, strict=True):
        weight = weight_GB[:, None, :, None].expand(groups, 1, size, repeats * length).reshape(groups, 1, -1, 1)
        part = _checkpointed(_weighted_read, query_GKTD, key, value, mask, weight, options)
        output_GKTD = part if output_GKTD is None else output_GKTD + part
    assert output_GKTD is not None  # a group has at least one chunk
    output = output_GKTD.view(groups, kv_heads, size, repeats, length, dim).permute(0, 2, 1, 3, 4, 5)
    return output.reshape(groups * size, kv_heads, repeats, length, dim)


def _some_pairs(
    query_NKRLD: Tensor, key_NKLD: Tensor, value_NKLD: Tensor, in_batch: InBatch, options: Options
) -> Tensor:
    """Only the given pairs, N at a time so that memory stays that of one step of `_all_pairs`."""
    n, kv_heads, repeats, length, dim = query_NKRLD.shape
    _, size, _ = in_batch.similarity_GBB.shape
    assert in_batch.pairs_2P is not None
    rows_i, rows_j = in_batch.pairs_2P
    weight_P = in_batch.similarity_GBB.reshape(n, size)[rows_i, rows_j % size]
    query_NKTD = query_NKRLD.reshape(n, kv_heads, repeats * length, dim)
    output = torch.zeros(query_NKTD.shape, dtype=weight_P.dtype, device=weight_P.device)
    for i, j, weight in zip(rows_i.split(n), rows_j.split(n), weight_P.split(n), strict=True):
        mask = None if in_batch.key_mask_NL is None else in_batch.key_mask_NL[j]
        part = _checkpointed(_weighted_read_of_pairs, query_NKTD, key_NKLD, value_NKLD, i, j, mask, weight, options)
        output = output.index_add(0, i, part.to(output.dtype))  # autocast computes the products in bf16
    return output.view(n, kv_heads, repeats, length, dim)


def _checkpointed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Recomputes in the backward pass, where there will be one."""
    if torch.is_grad_enabled():
        result: Tensor = checkpoint(function, *args, use_reentrant=False)
        return result
    return function(*args)


def _weighted_read_of_pairs(
    query_NKTD: Tensor,
    key_NKLD: Tensor,
    value_NKLD: Tensor,
    i: Tensor,
    j: Tensor,
    mask_PL: Tensor | None,
    weight_P: Tensor,
    options: Options,
) -> Tensor:
    return _weighted_read(query_NKTD[i], key_NKLD[j], value_NKLD[j], mask_PL, weight_P[:, None, None, None], options)


def _weighted_read(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, weight: Tensor, options: Options
) -> Tensor:
    """Sim[i, j] * b_ij, of shape (X, K, T, D).

    Scaled queries are (X, K, T, D), keys and values (X, K, L, D), the mask (X, L), and weights (X, 1, T or 1, 1).
    """
    if mask is not None:
        mask = mask[:, None, None, :]
    # On a CPU torch's fused kernel takes twice the time of two products at these short lengths.
    if options.eager or options.softcap is not None or query.device.type == "cpu":
        return _eager_read(query, key, value, mask, weight, options)
    return _sdpa_read(query, key, value, mask, weight, options)


def _eager_read(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, weight: Tensor, options: Options
) -> Tensor:
    """Written out, with the softmax in float32 as in the models' eager attention; scores of one chunk j only."""
    scores = query @ key.transpose(-1, -2)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=weight.dtype)
    if options.dropout:
        weights = F.dropout(weights, options.dropout)
    if not options.v_normalization:
        # A query's factor goes into its weights, which spares a pass over the outputs.
        return (weights * weight).to(value.dtype) @ value
    output = weights.to(value.dtype) @ _with_norm(value)
    return _normalized(output, weight, options)


def _sdpa_read(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, weight: Tensor, options: Options
) -> Tensor:
    """By a fused kernel."""
    if options.v_normalization:
        # Fused kernels want equal head dimensions: zeros in queries and keys change no score.
        query, key, value = F.pad(query, (0, 8)), F.pad(key, (0, 8)), _with_norm(value)
    if mask is not None:
        mask = mask.expand(-1, -1, query.shape[-2], -1)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=options.dropout, scale=1.0)
    return _normalized(output, weight, options) if options.v_normalization else output * weight


def _with_norm(value: Tensor) -> Tensor:
    """(..., D + 8): the values, their norms, and zeros up to a multiple of 8, so that one product gives both sums."""
    norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
    return F.pad(torch.cat([value, norm.to(value.dtype)], dim=-1), (0, 7))


def _normalized(output: Tensor, weight: Tensor, options: Options) -> Tensor:
    """Sim[i, j] * softmax(.) V / (softmax(.) @ ||V||_2 + eps), from the product with `_with_norm(V)`."""
    norm = output[..., -8:-7].to(weight.dtype)
    return output[..., :-8] * (weight / (norm + options.eps))


AttentionInterface.register("revela_sdpa", revela_sdpa_attention)
AttentionInterface.register("revela_eager", revela_eager_attention)
AttentionMaskInterface.register("revela_sdpa", sdpa_mask)
AttentionMaskInterface.register("revela_eager", eager_mask)
