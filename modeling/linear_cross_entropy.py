"""Cross-entropy of an output projection, which never has all logits, nor any together with their gradient.

    logits = hidden W^T + b       loss = sum over the rows with a label of logsumexp(logits) - logits[label]

Rows are taken a block at a time; a block's logits become their own gradient, softmax(logits) - onehot(label), in place, and
that the gradients to hidden, W and b, all in the forward pass. So a step has three products with the vocabulary, as the
plain version has, a few passes over memory less, and a peak that does not grow with the number of rows. Torch has the like
from 2.13 on (`torch.nn.functional.linear_cross_entropy`), which took longer where it was measured (benchmarks/README.md).

In float16 all of this is computed in float32: the loss scale comes with the backward pass, when gradients in float16 would
already have underflowed.

Shapes: P rows, D hidden size, V vocabulary, C rows of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
# Logits of a block: 32 MiB of float32 on a CPU; where products are wider, more.
BLOCK_ON_CPU, BLOCK_ELSEWHERE = 2**23, 2**27


def linear_cross_entropy(
    hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_P: Tensor, block: int | None = None
) -> Tensor:
    """Returns the sum of the cross-entropies in nats, a scalar, at least float32.

    Args:
        hidden_PD: (P, D), what is projected.
        weight_VD: (V, D), of the projection.
        bias_V: (V,) or None.
        labels_P: (P,), -100 on rows that do not count.
        block: rows at a time; by default what makes blocks of 32 MiB on a CPU, of 512 MiB elsewhere.
    """
    device = hidden_PD.device.type
    if device == "cpu":  # elsewhere the number of rows would have to be asked for
        labelled_P = labels_P != IGNORED
        hidden_PD, labels_P = hidden_PD[labelled_P], labels_P[labelled_P]
    if torch.is_autocast_enabled(device):
        hidden_PD = hidden_PD.to(_wide(torch.get_autocast_dtype(device)))
    hidden_PD = hidden_PD.to(_wide(hidden_PD.dtype))
    if block is None:
        block = max(128, (BLOCK_ON_CPU if device == "cpu" else BLOCK_ELSEWHERE) // len(weight_VD))
    loss: Tensor = _apply(hidden_PD, weight_VD, bias_V, labels_P, block, torch.is_grad_enabled())
    return loss


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as torch's own, it computes gradients in the forward pass, which the compiler does not follow
def _apply(hidden_PD: Tensor, *args: Any) -> Tensor:
    with torch.autocast(hidden_PD.device.type, enabled=False):
        loss: Tensor = LinearCrossEntropy.apply(hidden_PD, *args)
        return loss


class LinearCrossEntropy(torch.autograd.Function):
    """See the head of this file; products in the type of `hidden`, softmax and sums in float32 at least."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_P: Tensor,
        block: int,
        with_gradient: bool,
    ) -> Tensor:
        """The loss, and already its gradients."""
        needed = [with_gradient and bool(n) for n in ctx.needs_input_grad[:3]]
        weight = weight_VD.to(hidden_PD.dtype)
        bias = None if bias_V is None else bias_V.to(hidden_PD.dtype)
        wide = torch.promote_types(hidden_PD.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden_PD.device)
        d_hidden = torch.empty_like(hidden_PD) if needed[0] else None
        d_weight = torch.zeros_like(weight_VD, dtype=_wide(weight_VD.dtype)) if needed[1] else None
        d_bias = None
        if bias_V is not None and needed[2]:
            d_bias = torch.zeros_like(bias_V, dtype=_wide(bias_V.dtype))
        for start in range(0, len(hidden_PD), block):
            rows = slice(start, start + block)
            hidden_CD, labels_C1 = hidden_PD[rows], labels_P[rows, None]
            counts_C1, labels_C1 = labels_C1 != IGNORED, labels_C1.clamp(min=0)
            logits_CV = F.linear(hidden_CD, weight, bias).to(wide)
            torch.log_softmax(logits_CV, -1, out=logits_CV)
            loss -= logits_CV.gather(1, labels_C1).mul_(counts_C1).sum()
            if not any(needed):
                continue
            logits_CV.exp_().scatter_add_(1, labels_C1, logits_CV.new_full((), -1.0).expand_as(labels_C1))
            gradient_CV = logits_CV.mul_(counts_C1).to(hidden_PD.dtype)
            if d_hidden is not None:
                torch.mm(gradient_CV, weight, out=d_hidden[rows])
            if d_weight is not None:
                _add_product(d_weight, gradient_CV.T, hidden_CD)
            if d_bias is not None:
                d_bias += gradient_CV.sum(0)
        ctx.save_for_backward(hidden_PD, weight_VD, bias_V, labels_P, d_hidden, d_weight, d_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the forward pass times that of the loss."""
        *inputs, labels_P, d_hidden, d_weight, d_bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the plain version can be differentiated again
            hidden, weight = (x.to(inputs[0].dtype) for x in inputs[:2])
            bias = None if inputs[2] is None else inputs[2].to(hidden.dtype)
            loss = F.cross_entropy(F.linear(hidden, weight, bias), labels_P, reduction="sum", ignore_index=IGNORED)
            wanted = [x for x, needed in zip(inputs, ctx.needs_input_grad[:3], strict=True) if needed]
            gradients = iter(torch.autograd.grad(loss, wanted, grads[0].to(loss.dtype), create_graph=True))
            return *(next(gradients) if needed else None for needed in ctx.needs_input_grad[:3]), None, None, None
        return (
            *(
                None if d is None else (d * grads[0].to(d.dtype)).to(x.dtype)
                for d, x in zip((d_hidden, d_weight, d_bias), inputs, strict=True)
            ),
            None,
            None,
            None,
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Of gradients before the loss scale."""
    return torch.float32 if dtype == torch.float16 else dtype


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:  # weights in float32, products in bf16
        total += left @ right


@dataclass
class HeadLoss:
    """A loss to be computed inside the call of a model's output projection, from what the model hands to it.

    Inside, because there the weights are whole, whatever shards them between calls (FSDP, ZeRO-3). The projection itself
    then sees one token of a row, so that the model's own forward goes on without its logits.

    Attributes:
        of_head: from the projection's input, its weight and its bias to the loss.
        result: what that returned; None if the projection was not called, or is none that `watch_head` watches.
        output: what the projection gave the model. If the model returns another tensor as its logits, it changes them (soft
            caps, scales), and the loss is not of this projection alone.
    """

    of_head: Callable[[Tensor, Tensor, Tensor | None], Any]
    result: Any = None
    output: Tensor | None = None
    hidden: Tensor | None = None

    def ask(self, head: nn.Module) -> None:
        """For the next call of `head`. On the module, not in the hook: copies under `nn.DataParallel` share hooks."""
        head.__dict__["head_loss"] = self


def watch_head(head: nn.Module | None) -> None:
    """Lets `HeadLoss.ask` work on a plain linear layer; others, such as one with an adapter, are left alone."""
    if type(head) is nn.Linear and _take_input not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(_take_input)
        head.register_forward_hook(_compute)


def _take_input(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    asked: HeadLoss | None = head.__dict__.get("head_loss")
    if asked is None:
        return None
    asked.hidden = args[0]
    return (args[0][..., :1, :], *args[1:])


def _compute(head: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
    asked: HeadLoss | None = head.__dict__.pop("head_loss", None)
    if asked is not None and asked.hidden is not None:
        linear: Any = head
        asked.result, asked.output = asked.of_head(asked.hidden, linear.weight, linear.bias), output
        asked.hidden = None
