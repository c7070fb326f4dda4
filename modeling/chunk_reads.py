"""How queries read other chunks, pair by pair: the sum over the pairs (i, j) of w_ij * b_ij of `in_batch_attention.py`.

`read_pairs` is written with torch's own operations, for a GPU, and for what `PairReads` leaves out: dropout, soft caps and
second derivatives. `PairReads` is for a CPU, where the time goes into passes over memory: one pair at a time, whose scores
fit the cache, padding cut off, nothing kept for the backward pass but the inputs. With S = Q_i K_j^T, P = softmax(S),
n = ||V_j||_2 + eps by row (without V-normalisation: 1) and A = P / (P n), for which A n = 1,

    out_i += w b,   b = A V_j                  G = the gradient of out_i,   y = rowsum(A * (G V_j^T)) = rowsum(G * b)
    dw = sum(y)     dS = w A * (G V_j^T - y n^T)      dQ_i += dS K_j      dK_j += dS^T Q_i
    dV_j += w (A^T G - (A^T y) * V_j / ||V_j||_2)     (the second part with V-normalisation only)

Shapes: N chunks, K key/value heads, R query heads of each, L tokens, T = L * R queries (the R of a token in succession),
D head dimension, P pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

PADDING = -3e4  # the score of a padded key, whose weight is then 0; no lower, for the sake of float16


@dataclass
class Options:
    """How scores become weights: logit soft cap (Gemma 2), dropout, V-normalisation and its eps, and which kernel."""

    softcap: float | None = None
    dropout: float = 0.0
    eager: bool = False
    v_normalization: bool = False
    eps: float = 1e-6


def read_pairs(
    query_NKTD: Tensor,
    key_NKLD: Tensor,
    value_NKLD: Tensor,
    weight_P: Tensor,
    pairs_2P: Tensor,
    lengths_N: Tensor | None,
    options: Options,
) -> Tensor:
    """Returns (N, K, T, D) in the type of the weights; N pairs at a time, recomputed in the backward pass.

    Args:
        query_NKTD: scaled queries.
        key_NKLD: keys.
        value_NKLD: values.
        weight_P: of each pair, at least float32.
        pairs_2P: the reader and the chunk that is read.
        lengths_N: tokens of each chunk, at least 1; the rest of its row is padding. None if there is no padding.
        options: see there.
    """
    n = len(query_NKTD)
    output = torch.zeros(query_NKTD.shape, dtype=weight_P.dtype, device=weight_P.device)
    for i, j, weight in zip(*(x.split(n) for x in (*pairs_2P, weight_P)), strict=True):
        mask = None if lengths_N is None else key_mask(lengths_N[j], key_NKLD.shape[2])
        part = checkpointed(_read_rows, query_NKTD, key_NKLD, value_NKLD, i, j, mask, weight, options)
        output = output.index_add(0, i, part.to(output.dtype))  # autocast computes the products in bf16
    return output


def read_pairs_on_cpu(
    query_NKTD: Tensor,
    key_NKLD: Tensor,
    value_NKLD: Tensor,
    weight_P: Tensor,
    pairs_2P: Tensor,
    lengths_N: Tensor | None,
    options: Options,
) -> Tensor:
    """The same by `PairReads`; what a padded query reads is 0."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query_NKTD, key_NKLD, value_NKLD = (x.to(dtype) for x in (query_NKTD, key_NKLD, value_NKLD))
    output: Tensor = _apply(query_NKTD, key_NKLD, value_NKLD, weight_P, pairs_2P, lengths_N, options)
    return output


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a loop over pairs that differ from batch to batch: nothing to compile
def _apply(*args: Any) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        output: Tensor = PairReads.apply(*args)
        return output


class PairReads(torch.autograd.Function):
    """`read_pairs` on a CPU, without dropout and soft cap; arguments as there, the equations above."""

    @staticmethod
    def forward(
        ctx: Any,
        query_NKTD: Tensor,
        key_NKLD: Tensor,
        value_NKLD: Tensor,
        weight_P: Tensor,
        pairs_2P: Tensor,
        lengths_N: Tensor | None,
        options: Options,
    ) -> Tensor:
        """Keeps the inputs only."""
        ctx.save_for_backward(query_NKTD, key_NKLD, value_NKLD, weight_P)
        ctx.rest = (pairs_2P, lengths_N, options)
        output_NKTD = torch.zeros(query_NKTD.shape, dtype=weight_P.dtype)
        norm_NKL = _norm(value_NKLD, options)
        for pair in _pairs(query_NKTD, key_NKLD, weight_P, pairs_2P, lengths_N):
            query, output = (x[pair.i, :, : pair.queries] for x in (query_NKTD, output_NKTD))
            key, value = (x[pair.j, :, : pair.keys] for x in (key_NKLD, value_NKLD))
            weights = _weights(query, key, _of_keys(norm_NKL, pair), weight_P.dtype)
            _add_product(output, weights, value, pair.weight)
        return output_NKTD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Each pair's weights once more, and from them all four gradients."""
        pairs_2P, lengths_N, options = ctx.rest
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return *_differentiable_gradients(ctx, grads[0]), None, None, None
        query_NKTD, key_NKLD, value_NKLD, weight_P = inputs
        dtype = weight_P.dtype
        grad_NKTD = grads[0].to(query_NKTD.dtype)
        d_query, d_key, d_value = (torch.zeros(x.shape, dtype=dtype) for x in inputs[:3])
        d_weight: list[Tensor] = []
        norm_NKL = _norm(value_NKLD, options)
        d_norm_NKL = torch.zeros(value_NKLD.shape[:3], dtype=dtype)
        for pair in _pairs(query_NKTD, key_NKLD, weight_P, pairs_2P, lengths_N):
            query, grad, dq = (x[pair.i, :, : pair.queries] for x in (query_NKTD, grad_NKTD, d_query))
            key, value, dk, dv = (x[pair.j, :, : pair.keys] for x in (key_NKLD, value_NKLD, d_key, d_value))
            norm = _of_keys(norm_NKL, pair)
            weights = _weights(query, key, norm, dtype)
            scores = torch.bmm(grad, value.transpose(1, 2)).to(dtype)  # G V^T, and then dS / w
            read = (weights * scores).sum(-1, keepdim=True)  # y
            d_weight.append(read.sum())
            _add_product(dv, weights.transpose(1, 2), grad, pair.weight)
            if norm is None:
                scores.sub_(read)
            else:
                scores.addcmul_(read, norm, value=-1)
                d_norm_NKL[pair.j, :, : pair.keys].sub_((weights * read).sum(1), alpha=pair.weight)
            scores.mul_(weights)
            _add_product(dq, scores, key, pair.weight)
            _add_product(dk, scores.transpose(1, 2), query, pair.weight)
        if norm_NKL is not None:
            length_NKL = (norm_NKL - options.eps).clamp(min=torch.finfo(dtype).tiny)
            d_value.addcmul_(value_NKLD.to(dtype), (d_norm_NKL / length_NKL)[..., None])
        stacked = torch.stack(d_weight) if d_weight else torch.zeros_like(weight_P)
        of_inputs = (d_query, d_key, d_value, stacked)
        return *(d.to(x.dtype) for d, x in zip(of_inputs, inputs, strict=True)), None, None, None


@dataclass(slots=True)
class _Pair:
    """A pair with something to read: queries of chunk i, keys of chunk j."""

    i: int
    j: int
    queries: int
    keys: int
    weight: float


def _pairs(query: Tensor, key: Tensor, weight_P: Tensor, pairs_2P: Tensor, lengths_N: Tensor | None) -> list[_Pair]:
    repeats = query.shape[2] // key.shape[2]
    lengths = [key.shape[2]] * len(key) if lengths_N is None else lengths_N.tolist()
    triples = zip(*pairs_2P.tolist(), weight_P.tolist(), strict=True)
    return [_Pair(i, j, lengths[i] * repeats, lengths[j], weight) for i, j, weight in triples]


def _norm(value_NKLD: Tensor, options: Options) -> Tensor | None:
    """Norms n, of shape (N, K, L)."""
    if not options.v_normalization:
        return None
    value_NKLD = value_NKLD.to(torch.promote_types(value_NKLD.dtype, torch.float32))
    norm_NKL: Tensor = torch.linalg.vector_norm(value_NKLD, dim=-1) + options.eps
    return norm_NKL


def _of_keys(norm_NKL: Tensor | None, pair: _Pair) -> Tensor | None:
    """Norms of the keys that a pair reads, (K, 1, L)."""
    if norm_NKL is None:
        return None
    norm_K1L: Tensor = norm_NKL[pair.j, :, None, : pair.keys]
    return norm_K1L


def _weights(query: Tensor, key: Tensor, norm: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weights A."""
    scores = torch.bmm(query, key.transpose(1, 2)).to(dtype)
    weights = torch.softmax(scores, -1, out=scores)
    # Not as a product of matrices: with one column it takes five times as long.
    return weights if norm is None else weights.div_((weights * norm).sum(-1, keepdim=True))


def _add_product(total: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
    """Adds factor * left @ right to total, in one pass where all are of one type, else the product in the type of `right`."""
    if total.dtype == right.dtype:
        total.baddbmm_(left, right, alpha=factor)
    else:
        total.add_(torch.bmm(left.to(right.dtype), right), alpha=factor)


def _differentiable_gradients(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """The gradients once more, by operations that can be differentiated again."""
    wanted = [x for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[:4], strict=True) if needed]
    output = read_pairs(*ctx.saved_tensors, *ctx.rest)
    gradients = iter(torch.autograd.grad(output, wanted, grad, create_graph=True))
    result: list[Tensor | None] = [next(gradients) if needed else None for needed in ctx.needs_input_grad[:4]]
    return result


def key_mask(lengths_N: Tensor, length: int) -> Tensor:
    """(N, L), True on the tokens that may be read; one in an empty row, because a softmax over nothing is NaN."""
    return torch.arange(length, device=lengths_N.device) < lengths_N[:, None].clamp(min=1)


def checkpointed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Recomputes in the backward pass, where there will be one."""
    if torch.is_grad_enabled():
        result: Tensor = checkpoint(function, *args, use_reentrant=False)
        return result
    return function(*args)


def _read_rows(
    query_NKTD: Tensor,
    key_NKLD: Tensor,
    value_NKLD: Tensor,
    i: Tensor,
    j: Tensor,
    mask_PL: Tensor | None,
    weight_P: Tensor,
    options: Options,
) -> Tensor:
    return weighted_read(query_NKTD[i], key_NKLD[j], value_NKLD[j], mask_PL, weight_P[:, None, None, None], options)


def weighted_read(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, weight: Tensor, options: Options
) -> Tensor:
    """Weighted reads w * b, of shape (X, K, T, D).

    Scaled queries are (X, K, T, D), keys and values (X, K, L, D), the mask (X, L), and weights (X, 1, T or 1, 1).
    """
    if mask is not None:
        mask = mask[:, None, None, :]
    # Torch's fused kernel for CPUs takes twice the time of two products, and has no second derivative.
    if options.eager or options.softcap is not None or query.device.type == "cpu":
        return _eager_read(query, key, value, mask, weight, options)
    return _sdpa_read(query, key, value, mask, weight, options)


def _eager_read(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, weight: Tensor, options: Options
) -> Tensor:
    """Written out, with the softmax in float32 as in the models' eager attention."""
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
    """By a fused kernel without a mask, which the fastest of them do not take: padding is a column of the keys."""
    dim = value.shape[-1]
    if mask is not None:
        key = torch.cat([key, F.pad(PADDING * (~mask.mT).to(key.dtype), (0, 7)).expand(-1, key.shape[1], -1, -1)], -1)
        query = F.pad(F.pad(query, (0, 1), value=1.0), (0, 7))
    elif options.v_normalization:
        query, key = F.pad(query, (0, 8)), F.pad(key, (0, 8))
    # Fused kernels want equal head dimensions.
    value = _with_norm(value) if options.v_normalization else F.pad(value, (0, key.shape[-1] - value.shape[-1]))
    output = F.scaled_dot_product_attention(query, key, value, dropout_p=options.dropout, scale=1.0)
    return _normalized(output, weight, options) if options.v_normalization else output[..., :dim] * weight


def _with_norm(value: Tensor) -> Tensor:
    """(..., D + 8): the values, their norms, and zeros up to a multiple of 8, so that one product gives both sums."""
    norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
    return F.pad(torch.cat([value, norm.to(value.dtype)], dim=-1), (0, 7))


def _normalized(output: Tensor, weight: Tensor, options: Options) -> Tensor:
    """Weighted: w * softmax(.) V / (softmax(.) @ ||V||_2 + eps), from the product with `_with_norm(V)`."""
    norm = output[..., -8:-7].to(weight.dtype)
    return output[..., :-8] * (weight / (norm + options.eps))
