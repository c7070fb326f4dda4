"""In-batch attention (Revela, arXiv 2506.16552, section 3): a decoder that also attends to the other chunks of its group.

Two streams use the same weights, stacked along the batch: rows [0, N) are stream e (ordinary causal attention), rows [N, 2N)
are stream h. In every layer and head, for chunks i and j of one group:

    h_i = causal self-attention of h_i  +  sum_{j != i} Sim[i, j] * b_ij
    b_ij = softmax(Q_i^h K_j^e^T / sqrt(d)) V_j^e        over all non-padding tokens of chunk j, no causal mask

and, with V-normalisation, b_ij is divided by softmax(.) @ ||V_j^e||_2 + eps. The sum is added before the output projection.

With a language model that is not trained, stream e depends on nothing that is trained. It is then run before, without gradients, and
its keys and values are kept (`InBatch.stream_e`): the backward pass has half as many rows.

It is an attention function, registered with transformers under the names `revela_sdpa` and `revela_eager`, so that no decoder
has to be copied: a model set to one of these names behaves as usual unless its forward gets `in_batch=InBatch(...)`.

The inputs of a forward pass decide how it is computed:
- on a CPU, pair by pair, only the listed pairs, with a custom backward pass (`in_batch_kernels.py`);
- elsewhere, without a list, all chunks j of a group in one fused call, or as many as fit into `BLOCK_BYTES`;
- elsewhere, with a list, as many pairs at a time as there are chunks.
The last two are recomputed in the backward pass. The scores (B x B x L x L) and outputs (B x B x L x d) of all pairs of a large
group are never in memory together. Grouped-query heads are folded into the query length, so no key or value is repeated.

Shapes: G groups, B chunks of a group, N = G * B rows, L tokens, H heads, K key/value heads, R = H / K, D head dimension, E head
dimension of values (= D in most families), P pairs of chunks, T = L * R queries of a chunk (the R of a token are consecutive).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from .backbones import DECODER_ADVICE, eager_attention
from .in_batch_kernels import (
    InBatch,
    Options,
    StreamE,
    checkpointed,
    key_mask,
    read_pairs,
    read_pairs_on_cpu,
    weighted_read,
)
from .joint_reading import joint_reading

# Maximum size of the outputs of a fused call on a GPU before they are weighted and summed.
BLOCK_BYTES = 2**28
_RUNNING: list[InBatch | StreamE] = []  # inputs of the passes in progress


@contextmanager
def in_batch_pass(lm: nn.Module, in_batch: InBatch | StreamE) -> Iterator[InBatch | StreamE]:
    """Run a language model's forward pass inside the context, which it gets as `in_batch`.

    A layer that does not get it is an error, because the model would be trained as a plain language model.
    """
    _RUNNING.append(in_batch)
    try:
        yield in_batch
    finally:
        _RUNNING.pop()
    if not in_batch.used:
        raise ValueError(
            f"{type(lm).__name__}: its layers do not call transformers' attention interface; {DECODER_ADVICE}"
        )


def _in_batch_attention(
    sdpa: Callable[..., tuple[Tensor, Tensor | None]] | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    in_batch: InBatch | StreamE | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute self-attention for all rows, and read the other chunks in the rows of stream h.

    An attention function like those of `AttentionInterface`, after its first argument: None for the family's own eager attention.
    """
    if sdpa is not None and kwargs.get("softcap") is not None:
        raise ValueError(
            "this model caps its attention logits, which SDPA does not support: use attn_implementation='eager'"
        )
    self_attention = eager_attention(module) if sdpa is None else sdpa
    if in_batch is None:
        if _RUNNING:
            raise ValueError(f"{type(module).__name__} is not passed keyword arguments by its layer; {DECODER_ADVICE}")
        return self_attention(module, query, key, value, attention_mask, **kwargs)  # (2N, L, H, D)
    for running in _RUNNING[-1:]:
        running.used = True  # FSDP2 passes the layers copies of dataclasses
    if isinstance(in_batch, StreamE):
        in_batch.store(module.layer_idx, key, value)  # type: ignore[arg-type]
        return self_attention(module, query, key, value, attention_mask, **kwargs)
    n = 0 if in_batch.stream_e is not None else len(query) // 2  # rows of stream e
    others = (key[:n], value[:n]) if in_batch.stream_e is None else in_batch.stream_e[module.layer_idx]  # type: ignore[index]
    if in_batch.bias is not None:
        mask = attention_mask
        own, own_mask = (query[n:], key[n:], value[n:]), None if mask is None else mask[n - len(query) :]
        output = joint_reading(self_attention, module, own, others, own_mask, in_batch, **kwargs)
        if n:
            own_mask = None if mask is None else mask[:n]
            output_e, _ = self_attention(module, query[:n], key[:n], value[:n], own_mask, **kwargs)
            output = torch.cat([output_e, output])
        return output, None
    output, weights = self_attention(module, query, key, value, attention_mask, **kwargs)
    scaling = kwargs.get("scaling")
    options = Options(
        softcap=kwargs.get("softcap"),
        dropout=kwargs.get("dropout") or 0.0,
        eager=sdpa is None,
        v_normalization=in_batch.v_normalization,
        eps=in_batch.eps,
    )
    query = query[n:] * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    cross = cross_document_attention(query, *others, in_batch, options).to(output.dtype)
    return torch.cat([output[:n], output[n:] + cross]) if n else output + cross, weights


def cross_document_attention(
    query_NHLD: Tensor, key_NKLD: Tensor, value_NKLE: Tensor, in_batch: InBatch, options: Options
) -> Tensor:
    """Return sum_{j != i} Sim[i, j] * b_ij for scaled queries, of shape (N, L, H, E), in float32 or wider.

    Outputs of padded queries are undefined, or 0 if they are not computed.
    """
    n, heads, length, dim = query_NHLD.shape
    kv_heads = key_NKLD.shape[1]
    # Query heads that share a key/value head are treated as more queries of that head.
    query_NKRLD = query_NHLD.view(n, kv_heads, heads // kv_heads, length, dim)
    query_NKTD = query_NKRLD.transpose(2, 3).reshape(n, kv_heads, -1, dim)
    on_cpu = query_NHLD.device.type == "cpu"
    if in_batch.pairs_2P is None and not on_cpu:
        output_NKTE = all_pairs(query_NKTD, key_NKLD, value_NKLE, in_batch, options)
    else:
        pairs_2P = every_pair(in_batch.similarity_GBB) if in_batch.pairs_2P is None else in_batch.pairs_2P
        weight_P = in_batch.similarity_GBB.flatten(0, 1)[pairs_2P[0], pairs_2P[1] % in_batch.similarity_GBB.shape[-1]]
        read = read_pairs_on_cpu if on_cpu and not options.dropout and options.softcap is None else read_pairs
        output_NKTE = read(query_NKTD, key_NKLD, value_NKLE, weight_P, pairs_2P, in_batch.lengths_N, options)
    output_NKLRE = output_NKTE.view(n, kv_heads, length, -1, value_NKLE.shape[-1])
    return output_NKLRE.transpose(1, 2).reshape(n, length, heads, -1)


def every_pair(similarity_GBB: Tensor) -> Tensor:
    """Return the (2, P) rows i, j of all pairs of different chunks of a group."""
    groups, size, _ = similarity_GBB.shape
    rows_GB = torch.arange(groups * size, device=similarity_GBB.device).view(groups, size)
    pairs: Tensor = torch.stack(torch.broadcast_tensors(rows_GB[:, :, None], rows_GB[:, None]))
    return pairs[:, :, ~torch.eye(size, dtype=torch.bool)].flatten(1)


def all_pairs(query_NKTD: Tensor, key_NKLD: Tensor, value_NKLE: Tensor, in_batch: InBatch, options: Options) -> Tensor:
    """Return (N, K, T, E): all queries of a group read a block of its chunks, in one call for all groups."""
    groups, size, _ = in_batch.similarity_GBB.shape
    n, kv_heads, queries, dim = query_NKTD.shape
    similarity = in_batch.similarity_GBB * ~torch.eye(size, dtype=torch.bool, device=query_NKTD.device)
    query_GKSD = query_NKTD.view(groups, size, kv_heads, queries, dim).transpose(1, 2).flatten(2, 3)  # S = B * T
    block = max(1, min(size, BLOCK_BYTES // (query_NKTD.numel() * query_NKTD.element_size())))
    if options.eager or options.softcap is not None:
        block = 1  # these hold all scores in memory
    mask_NL = None if in_batch.lengths_N is None else key_mask(in_batch.lengths_N, key_NKLD.shape[2])
    # The backward pass of `split` concatenates gradients, while that of indexing would add zero-filled tensors.
    blocks = [x.view(groups, size, *x.shape[1:]).split(block, 1) for x in (key_NKLD, value_NKLE)]
    masks = [None] * len(blocks[0]) if mask_NL is None else mask_NL.view(groups, size, -1).split(block, 1)
    parts = zip(*blocks, masks, similarity.split(block, 2), strict=True)
    output = sum(checkpointed(_read_block, query_GKSD, *part, options, dropout=options.dropout) for part in parts)
    assert isinstance(output, Tensor)  # a group has at least one chunk
    return output.view(groups, kv_heads, size, queries, -1).transpose(1, 2).reshape(n, kv_heads, queries, -1)


def _read_block(
    query_GKSD: Tensor,
    key_GJKLD: Tensor,
    value_GJKLE: Tensor,
    mask_GJL: Tensor | None,
    similarity_GBJ: Tensor,
    options: Options,
) -> Tensor:
    """Return the (G, K, S, E) reads of J chunks, computed as J rows of a batch."""
    groups, size, block = similarity_GBJ.shape
    query = query_GKSD[:, None].expand(-1, block, -1, -1, -1).flatten(0, 1)
    weight = similarity_GBJ.transpose(1, 2).repeat_interleave(query.shape[2] // size, 2)  # (G, J, S)
    mask = None if mask_GJL is None else mask_GJL.flatten(0, 1)
    key, value, weight = (x.flatten(0, 1) for x in (key_GJKLD, value_GJKLE, weight))
    read = weighted_read(query, key, value, mask, weight[:, None, :, None], options)
    return read.view(groups, block, *read.shape[1:]).sum(1)


AttentionInterface.register("revela_sdpa", partial(_in_batch_attention, sdpa_attention_forward))
AttentionInterface.register("revela_eager", partial(_in_batch_attention, None))
AttentionMaskInterface.register("revela_sdpa", sdpa_mask)
AttentionMaskInterface.register("revela_eager", eager_mask)
