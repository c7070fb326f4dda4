"""Cross-entropy of an output projection without ever holding all logits in memory.

    logits = hidden W^T + b       loss = sum over the rows with a label of logsumexp(logits) - logits[label]

Rows are processed in blocks, and the gradients of hidden, W and b are computed with the loss of each block, in the forward pass. A
step thus needs three products with the vocabulary, like the plain version, but its peak memory does not grow with the number of
rows. Since 2.13 torch has a similar function (`torch.nn.functional.linear_cross_entropy`), which was slower in our measurements
(benchmarks/README.md).

Float16 inputs are computed in float32: the loss scale is only applied in the backward pass, and float16 gradients would have
underflowed by then.

Shapes: P rows, D hidden size, V vocabulary, B texts, L tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORED = -100
# Logits per block: 32 MiB in float32 on a CPU, 512 MiB elsewhere.
BLOCK_ON_CPU, BLOCK_ELSEWHERE = 2**23, 2**27


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the compiler cannot trace gradients computed in the forward pass
def linear_cross_entropy(
    hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_P: Tensor, block: int | None = None
) -> Tensor:
    """Return the sum of the cross-entropies in nats, in float32 or wider; labels of -100 are ignored. `block`: rows per block."""
    device = hidden_PD.device.type
    if device == "cpu":  # on other devices, selecting rows would wait for the device
        labelled_P = labels_P != IGNORED
        hidden_PD, labels_P = hidden_PD[labelled_P], labels_P[labelled_P]
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_PD.dtype
    hidden_PD = hidden_PD.to(_wide(dtype))
    if block is None:
        block = max(128, (BLOCK_ON_CPU if device == "cpu" else BLOCK_ELSEWHERE) // len(weight_VD))
    with torch.autocast(device, enabled=False):
        inputs = (hidden_PD, weight_VD, bias_V, labels_P, block, torch.is_grad_enabled())
        loss: Tensor = LinearCrossEntropy.apply(*inputs)
        return loss


class LinearCrossEntropy(torch.autograd.Function):
    """Compute the loss as described at the top of this file: products in the dtype of `hidden`, sums in float32 or wider."""

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
        """Return the loss, and save its gradients."""
        inputs: tuple[Any, ...] = (hidden_PD, weight_VD, bias_V)
        needed = [with_gradient and bool(n) for n in ctx.needs_input_grad[:3]]
        parameters = [None if x is None else x.detach().to(hidden_PD.dtype) for x in inputs[1:]]
        sums = [torch.zeros_like(x, dtype=_wide(x.dtype)) if n else None for x, n in zip(inputs, needed, strict=True)]
        loss = hidden_PD.new_zeros((), dtype=torch.promote_types(hidden_PD.dtype, torch.float32))
        for start in range(0, len(hidden_PD), block):
            rows = slice(start, start + block)
            own: list[Any] = [hidden_PD[rows].detach(), *parameters]
            differentiated = [x.requires_grad_() for x, n in zip(own, needed, strict=True) if n]
            with torch.enable_grad():
                part = summed_cross_entropy(F.linear(*own), labels_P[rows])
            loss += part.detach()
            if not any(needed):
                continue
            places: list[Any] = [rows, ..., ...]
            gradients = iter(torch.autograd.grad(part, differentiated))
            for total, place in zip(sums, places, strict=True):
                if total is not None:
                    total[place] += next(gradients)
        ctx.save_for_backward(*sums)
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the saved gradients, scaled by the gradient of the loss."""
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        gradients = (None if d is None else (d * grads[0].to(d.dtype)).to(dtype) for d, dtype in saved)
        return *gradients, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for gradients that the loss scale has not been applied to."""
    return torch.float32 if dtype == torch.float16 else dtype


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross-entropies in nats, in float32 or wider; labels of -100 are ignored."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORED)


def head_cross_entropy(head: nn.Module | None, run: Callable[[], Any], labels: Tensor) -> tuple[Tensor, Any]:
    """Run a model and return the summed cross-entropy of its logits, without holding all logits where possible.

    The loss is computed inside the call of the output projection: if weights are sharded between calls (FSDP), they
    are only whole there. The projection then returns the logits of one token per row. If the model changes its logits after
    the projection (soft caps, scales), it is run again with all logits; this is remembered on the projection.

    `head` is the output projection; only a plain `nn.Linear` can skip logits, so not one with an adapter. `run` calls the model and
    returns its output, which has `logits`. `labels` has one label for each position that the projection is applied to.
    """
    if isinstance(head, nn.Linear) and _is_plain(head):
        loss: Tensor | None = None
        logits: Tensor | None = None

        def forward(hidden: Tensor) -> Tensor:
            nonlocal loss, logits
            loss = linear_cross_entropy(hidden.flatten(0, -2), head.weight, head.bias, labels.flatten())
            logits = F.linear(hidden[..., :1, :], head.weight, head.bias)
            return logits

        # On the instance, not as a hook: replicas of `nn.DataParallel` share hooks.
        vars(head)["forward"] = forward
        try:
            output = run()
        finally:
            del vars(head)["forward"]
        if loss is None:
            return summed_cross_entropy(output.logits, labels), output
        if output.logits is logits:
            return loss, output
        vars(head)["changes_logits"] = True
    output = run()
    return summed_cross_entropy(output.logits, labels), output


def _is_plain(head: nn.Linear) -> bool:
    """Whether the projection computes x W^T + b and the model returns that as its logits, as far as is known."""
    return type(head).forward is nn.Linear.forward and vars(head).keys().isdisjoint({"forward", "changes_logits"})


def next_token_loss(
    head: nn.Module | None,
    run: Callable[[], Any],
    labels_BL: Tensor | None,
    attention_mask_BL: Tensor | None,
    num_items_in_batch: Tensor | int | None,
    *,
    with_logits: bool,
) -> tuple[Tensor | None, Any]:
    """Run a causal language model and return the mean loss of its next tokens, if there are labels, and its output.

    Labels are not shifted, and -100 where there is no loss. The summed loss is divided by `num_items_in_batch`, by default the number
    of labels. Without `with_logits`, the output has none, and they are never held as a whole.
    """
    if labels_BL is None:
        return None, run()
    if attention_mask_BL is not None:  # the first token after left padding is no label, because no token predicts it
        first_BL = F.pad(attention_mask_BL[:, 1:] > attention_mask_BL[:, :-1], (1, 0))
        labels_BL = labels_BL.masked_fill(first_BL, IGNORED)
    labels_BL = F.pad(labels_BL[:, 1:], (0, 1), value=IGNORED)  # position i is labelled with token i + 1
    if with_logits:
        output = run()
        total = summed_cross_entropy(output.logits, labels_BL)
    else:
        total, output = head_cross_entropy(head, run, labels_BL)
        output.logits = None
    count = (labels_BL != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, Tensor) else count), output
