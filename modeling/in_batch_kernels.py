"""Inputs and kernels of in-batch attention: the sum over pairs of chunks (i, j) of w_ij * b_ij, defined in `in_batch_attention.py`.

`read_pairs` consists of torch operations, for GPUs, and for dropout and soft caps, which `PairReads` does not support.
`PairReads` is for CPUs, where memory traffic takes most of the time. For each chunk i it processes as
many chunks j at a time as keep the scores in the cache, drops padding, and saves only its inputs for the backward pass. For
each pair, with S = Q_i K_j^T, P = softmax(S), n = ||V_j||_2 + eps by row (1 without V-normalisation) and A = P / (P n), so that
A n = 1:

    out_i += w b,   b = A V_j                  G = the gradient of out_i,   y = rowsum(A * (G V_j^T)) = rowsum(G * b)
    dw = sum(y)     dS = w A * (G V_j^T - y n^T)      dQ_i += dS K_j      dK_j += dS^T Q_i
    dV_j += w (A^T G - (A^T y) * V_j / ||V_j||_2)     (the second part with V-normalisation only)

Shapes: G groups, B chunks of a group, N chunks of all groups, K key/value heads, R query heads per key/value head, L tokens, T = L * R queries (the R of a token are
consecutive), D head dimension, E head dimension of values (= D in most families), P pairs, J chunks read at a time, t queries and
l keys that are not padding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BLOCK = 2**18  # scores per block on a CPU: 1 MiB in float32
PADDING = -3e4  # score of a padded key, which makes its weight 0; fits into float16


class StreamE:
    """Keys and values (N, K, L, D) of stream e by layer: filled by a forward pass that gets it as `in_batch`.

    Not a dictionary, which FSDP2 would pass to the layers as a copy.

    Attributes:
        repeated: whether a layer runs several times, so that its states cannot be found by its index.
        used: whether an attention layer has received it.
    """

    def __init__(self) -> None:
        self._states: dict[int, tuple[Tensor, Tensor]] = {}
        self.repeated = self.used = False

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the states of a layer."""
        return self._states[layer]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep the states of a layer."""
        self.repeated |= layer in self._states
        self._states[layer] = key, value


@dataclass
class InBatch:
    """Inputs of the cross-document part besides queries, keys and values.

    Attributes:
        similarity_GBB: weight of chunk j for chunk i, in float32 or wider; its diagonal is ignored.
        lengths_N: number of tokens of each chunk; the rest of its row is padding. None without padding.
        pairs_2P: rows (i, j) of the pairs to compute, as indices into all N rows; None for all pairs.
        places_NL: column of each of the caller's tokens in the rows here; None if unchanged.
        v_normalization: whether b_ij is divided by the weighted norm of its values.
        eps: added to that divisor.
        bias: (layers,) for joint reading (`joint_reading.py`); None for the paper's added reads.
        stream_e: keys and values of stream e, if it was run before; None if both streams are run as one batch.
        used: whether an attention layer has received it.
    """

    similarity_GBB: Tensor
    lengths_N: Tensor | None = None
    pairs_2P: Tensor | None = None
    places_NL: Tensor | None = None
    v_normalization: bool = False
    eps: float = 1e-6
    bias: Tensor | None = None
    stream_e: StreamE | None = None
    used: bool = False


@dataclass
class Options:
    """Options for turning scores into weights: logit soft cap (Gemma 2), dropout, eager or fused kernel, V-normalisation and its eps."""

    softcap: float | None = None
    dropout: float = 0.0
    eager: bool = False
    v_normalization: bool = False
    eps: float = 1e-6


def read_pairs(
    query_NKTD: Tensor,
    key_NKLD: Tensor,
    value_NKLE: Tensor,
    weight_P: Tensor,
    pairs_2P: Tensor,
    lengths_N: Tensor | None,
    options: Options,
) -> Tensor:
    """Return (N, K, T, E) outputs in the dtype of the weights, computed N pairs at a time and again in the backward pass.

    Queries are scaled, weights are in float32 or wider, `pairs_2P` are the chunks i that read and the chunks j that are read, and
    `lengths_N` the tokens of each chunk, at least 1, without its padding; None without padding.
    """

    def read(i: Tensor, j: Tensor, weight: Tensor) -> Tensor:
        mask = None if lengths_N is None else key_mask(lengths_N[j], key_NKLD.shape[2])
        weight = weight[:, None, None, None]
        return weighted_read(query_NKTD[i], key_NKLD[j], value_NKLE[j], mask, weight, options)

    shape = (*query_NKTD.shape[:-1], value_NKLE.shape[-1])
    output = torch.zeros(shape, dtype=weight_P.dtype, device=weight_P.device)
    for i, *rest in zip(*(x.split(len(query_NKTD)) for x in (*pairs_2P, weight_P)), strict=True):
        part = checkpointed(read, i, *rest, dropout=options.dropout)
        output = output.index_add(0, i, part.to(output.dtype))  # under autocast, the products are in bf16
    return output


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a loop over pairs that differ from batch to batch
def read_pairs_on_cpu(query_NKTD: Tensor, key_NKLD: Tensor, value_NKLE: Tensor, *rest: Any) -> Tensor:
    """Return the same as `read_pairs`, with the same arguments, computed by `PairReads`; outputs of padded queries are 0."""
    states: tuple[Tensor, ...] = (query_NKTD, key_NKLD, value_NKLE)
    if torch.is_autocast_enabled("cpu"):
        states = tuple(x.to(torch.get_autocast_dtype("cpu")) for x in states)
    with torch.autocast("cpu", enabled=False):
        output: Tensor = PairReads.apply(*states, *rest)
        return output


class PairReads(torch.autograd.Function):
    """Compute `read_pairs` on a CPU, without dropout and soft cap, by the equations above."""

    @staticmethod
    def forward(
        ctx: Any,
        query_NKTD: Tensor,
        key_NKLD: Tensor,
        value_NKLE: Tensor,
        weight_P: Tensor,
        pairs_2P: Tensor,
        lengths_N: Tensor | None,
        options: Options,
    ) -> Tensor:
        """Return (N, K, T, E), and save only the inputs."""
        ctx.save_for_backward(query_NKTD, key_NKLD, value_NKLE, weight_P)
        ctx.rest = (pairs_2P, lengths_N, options)
        output_NKTE = torch.zeros((*query_NKTD.shape[:-1], value_NKLE.shape[-1]), dtype=weight_P.dtype)
        chunks = _Chunks(key_NKLD, value_NKLE, options)
        for block in _blocks(query_NKTD, key_NKLD, pairs_2P, lengths_N):
            query, output = (x[block.i, :, : block.queries] for x in (query_NKTD, output_NKTE))
            weights = chunks.weights(query, block, weight_P.dtype).mul_(weight_P[block.places, None])
            _add_product(output, weights.flatten(2), chunks.of(chunks.value_KNLE, block))
        return output_NKTE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the weights of each pair again, and the gradients of queries, keys, values and pair weights."""
        pairs_2P, lengths_N, options = ctx.rest
        inputs = ctx.saved_tensors
        query_NKTD, key_NKLD, value_NKLE, weight_P = inputs
        dtype = weight_P.dtype
        grad_NKTE = grads[0].to(query_NKTD.dtype)
        chunks = _Chunks(key_NKLD, value_NKLE, options)
        d_query, d_weight = torch.zeros(query_NKTD.shape, dtype=dtype), torch.zeros_like(weight_P)
        d_key, d_value = (  # not needed if the language model is frozen
            torch.zeros(x.shape, dtype=dtype) if needed else None
            for x, needed in zip((chunks.key_KNLD, chunks.value_KNLE), ctx.needs_input_grad[1:3], strict=True)
        )
        d_norm = torch.zeros(chunks.value_KNLE.shape[:3], dtype=dtype)
        for block in _blocks(query_NKTD, key_NKLD, pairs_2P, lengths_N):
            query, grad, dq = (x[block.i, :, : block.queries] for x in (query_NKTD, grad_NKTE, d_query))
            key, value = (chunks.of(x, block) for x in (chunks.key_KNLD, chunks.value_KNLE))
            weights, factor_J1 = chunks.weights(query, block, dtype), weight_P[block.places, None]
            scores = torch.bmm(grad, value.mT).to(dtype).view_as(weights)  # G V^T, and then dS
            read_KtJ1 = (weights * scores).sum(-1, keepdim=True)  # y
            d_weight[block.places] = read_KtJ1.sum((0, 1, 3))
            norm = chunks.norm(block)
            if norm is None:
                scores.sub_(read_KtJ1)
            else:
                scores.addcmul_(read_KtJ1, norm, value=-1)
            scores.mul_(weights).mul_(factor_J1)
            weights.mul_(factor_J1)
            if norm is not None:
                d_norm[:, :, : block.keys].index_add_(1, block.j, (weights * read_KtJ1).sum(1), alpha=-1)
            _add_product(dq, scores.flatten(2), key)
            for total, left, right in ((d_key, scores, query), (d_value, weights, grad)):
                if total is None:
                    continue
                part = torch.bmm(left.flatten(2).mT.to(right.dtype), right).to(dtype)
                total[:, :, : block.keys].index_add_(1, block.j, part.unflatten(1, (len(block.j), -1)))
        if chunks.norm_KNL is not None and d_value is not None:
            length_KNL = (chunks.norm_KNL - options.eps).clamp(min=torch.finfo(dtype).tiny)
            d_value.addcmul_(chunks.value_KNLE.to(dtype), (d_norm / length_KNL)[..., None])
        of_states = (None if d is None else d.transpose(0, 1) for d in (d_key, d_value))
        of_inputs = zip((d_query, *of_states, d_weight), inputs, strict=True)
        return *(None if d is None else d.to(x.dtype) for d, x in of_inputs), None, None, None


@dataclass(slots=True)
class _Block:
    """Chunks j that chunk i reads at a time, their places among the P pairs, and the queries and keys without padding."""

    i: int
    j: Tensor
    places: Tensor
    queries: int
    keys: int
    mask_Jl: Tensor | None


def _blocks(query_NKTD: Tensor, key_NKLD: Tensor, pairs_2P: Tensor, lengths_N: Tensor | None) -> Iterator[_Block]:
    """Yield all pairs of chunks that are not empty, in blocks of about `BLOCK` scores."""
    n, kv_heads, length, _ = key_NKLD.shape
    lengths = torch.full((n,), length) if lengths_N is None else lengths_N
    order = pairs_2P[0].argsort(stable=True)
    order = order[(lengths[pairs_2P] > 0).all(0)[order]]
    readers, counts = pairs_2P[0, order].unique_consecutive(return_counts=True)
    sizes = lengths.tolist()
    for i, places in zip(readers.tolist(), order.split(counts.tolist()), strict=True):
        queries = sizes[i] * query_NKTD.shape[2] // length
        for some in places.split(max(1, BLOCK // (kv_heads * queries * length))):
            j = pairs_2P[1, some]
            own = lengths[j].tolist()
            mask = None if min(own) == max(own) else key_mask(lengths[j], max(own))
            yield _Block(i, j, some, queries, max(own), mask)


class _Chunks:
    """Keys and values, stored so that those of several chunks form one matrix per head."""

    def __init__(self, key_NKLD: Tensor, value_NKLE: Tensor, options: Options) -> None:
        self.key_KNLD, self.value_KNLE = (x.transpose(0, 1).contiguous() for x in (key_NKLD, value_NKLE))
        self.norm_KNL: Tensor | None = None
        if options.v_normalization:
            wide = self.value_KNLE.to(torch.promote_types(value_NKLE.dtype, torch.float32))
            self.norm_KNL = torch.linalg.vector_norm(wide, dim=-1) + options.eps

    def of(self, of_all_KNLD: Tensor, block: _Block) -> Tensor:
        """Return the (K, J * l, D) keys or values of a block."""
        rows: Tensor = of_all_KNLD[:, block.j, : block.keys].flatten(1, 2)
        return rows

    def norm(self, block: _Block) -> Tensor | None:
        """Return the norms n, of shape (K, 1, J, l)."""
        return None if self.norm_KNL is None else self.norm_KNL[:, None, block.j, : block.keys]

    def weights(self, query_KtD: Tensor, block: _Block, dtype: torch.dtype) -> Tensor:
        """Return the weights A, of shape (K, t, J, l)."""
        scores = torch.bmm(query_KtD, self.of(self.key_KNLD, block).mT).to(dtype)
        scores = scores.unflatten(-1, (len(block.j), -1))
        if block.mask_Jl is not None:
            scores.masked_fill_(~block.mask_Jl, -torch.inf)
        weights = torch.softmax(scores, -1, out=scores)
        norm = self.norm(block)
        # A matrix product with a single column would take five times as long.
        return weights if norm is None else weights.div_((weights * norm).sum(-1, keepdim=True))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to total: in one pass if the dtypes are equal, else with a product in the dtype of `right`."""
    if total.dtype == right.dtype:
        total.baddbmm_(left, right)
    else:
        total.add_(torch.bmm(left.to(right.dtype), right))


def key_mask(lengths_N: Tensor, length: int) -> Tensor:
    """Return (N, L), True on tokens to read; empty rows keep one token, because a softmax over nothing is NaN."""
    return torch.arange(length, device=lengths_N.device) < lengths_N[:, None].clamp(min=1)


def checkpointed(function: Callable[..., Tensor], *args: Any, dropout: float = 0.0) -> Tensor:
    """Call a function, and recompute it in the backward pass if gradients are enabled.

    Only dropout needs the state of the random generator, which is slow to save and to restore on a GPU.
    """
    result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=bool(dropout))
    return result


def weighted_read(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, weight: Tensor, options: Options
) -> Tensor:
    """Return the weighted reads w * b, of shape (X, K, T, E).

    Queries are scaled and (X, K, T, D), keys (X, K, L, D), values (X, K, L, E), the mask (X, L), weights (X, 1, T or 1, 1).
    """
    if mask is not None:
        mask = mask[:, None, None, :]
    # On CPUs, torch's fused kernel takes twice as long as two matrix products.
    if options.eager or options.softcap is not None or query.device.type == "cpu":
        return _eager_read(query, key, value, mask, weight, options)
    return _sdpa_read(query, key, value, mask, weight, options)


def _eager_read(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, weight: Tensor, options: Options
) -> Tensor:
    """Compute weighted reads with matrix products and a softmax in float32, like the models' eager attention."""
    scores = query @ key.transpose(-1, -2)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=weight.dtype)
    if options.dropout:
        weights = F.dropout(weights, options.dropout)
    if not options.v_normalization:
        # Scaling the weights is cheaper than scaling the outputs.
        return (weights * weight).to(value.dtype) @ value
    output = weights.to(value.dtype) @ _with_norm(value)
    return _normalized(output, weight, options)


def _sdpa_read(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, weight: Tensor, options: Options
) -> Tensor:
    """Compute weighted reads with a fused kernel. The fastest kernels take no mask, so padding is a column of the keys."""
    if mask is not None:
        key = torch.cat([key, F.pad(PADDING * (~mask.mT).to(key.dtype), (0, 7)).expand(-1, key.shape[1], -1, -1)], -1)
        query = F.pad(F.pad(query, (0, 1), value=1.0), (0, 7))
    value = _with_norm(value) if options.v_normalization else value
    dim, wide = value.shape[-1], max(key.shape[-1], value.shape[-1])
    # Fused kernels need equal head dimensions.
    query, key, value = (x if x.shape[-1] == wide else F.pad(x, (0, wide - x.shape[-1])) for x in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, dropout_p=options.dropout, scale=1.0)[..., :dim]
    return _normalized(output, weight, options) if options.v_normalization else output * weight


def _with_norm(value: Tensor) -> Tensor:
    """Return (..., D + 8): values, their norms, and zeros up to a multiple of 8, so that one product gives both sums."""
    norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
    return F.pad(torch.cat([value, norm.to(value.dtype)], dim=-1), (0, 7))


def _normalized(output: Tensor, weight: Tensor, options: Options) -> Tensor:
    """Return w * softmax(.) V / (softmax(.) @ ||V||_2 + eps), from the product with `_with_norm(V)`."""
    norm = output[..., -8:-7].to(weight.dtype)
    return output[..., :-8] * (weight / (norm + options.eps))
