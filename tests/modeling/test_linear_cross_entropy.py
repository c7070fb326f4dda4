"""The loss without logits against torch's cross-entropy of a linear layer."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from revela_hub.modeling.linear_cross_entropy import LinearCrossEntropy, head_cross_entropy, linear_cross_entropy


def tensors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden states, weight, bias and labels, some of them -100."""
    made = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((7, 5), (11, 5), (11,))]
    return [*made, torch.tensor([3, -100, 0, 10, -100, 3, 7])]


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), labels, reduction="sum")


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("block", [1, 2, 3, 100, None])
def test_loss_and_gradients_are_torchs(block: int | None, with_bias: bool) -> None:
    hidden, weight, bias, labels = tensors()
    wanted = [hidden, weight, bias] if with_bias else [hidden, weight]
    results = []
    for loss in (
        linear_cross_entropy(hidden, weight, bias if with_bias else None, labels, block),
        plain(hidden, weight, bias if with_bias else None, labels),
    ):
        results.append([loss, *torch.autograd.grad(1.7 * loss, wanted)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_rows_without_a_label_count_nothing_where_they_are_not_left_out() -> None:
    """As on a GPU, where their number is not asked for."""
    hidden, weight, bias, labels = tensors()
    torch.autograd.gradcheck(lambda *x: LinearCrossEntropy.apply(*x, labels, 2, True), (hidden, weight, bias))
    loss = LinearCrossEntropy.apply(hidden, weight, bias, labels, 2, True)
    torch.testing.assert_close(loss, plain(hidden, weight, bias, labels), rtol=1e-12, atol=0)


def test_large_logits_and_bf16() -> None:
    hidden, weight, bias, labels = tensors(torch.float32)
    far = linear_cross_entropy(hidden * 1e4, weight, bias, labels)
    torch.testing.assert_close(far, plain(hidden * 1e4, weight, bias, labels))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, bias, labels)
    assert loss.dtype == torch.float32
    want = plain(hidden, weight, bias, labels)
    torch.testing.assert_close(loss, want, rtol=0.02, atol=0.02)
    for got, expected in zip(
        torch.autograd.grad(loss, (hidden, weight, bias)),
        torch.autograd.grad(want, (hidden, weight, bias)),
        strict=True,
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0.1, atol=0.1)


def test_no_more_than_a_block_of_logits_is_alive() -> None:
    """Of 4096 x 512 logits (8 MiB), blocks of 64 rows: 0.1 MiB each, in addition to the gradients of hidden states and weight."""
    hidden, weight = torch.randn(4096, 8, requires_grad=True), torch.randn(512, 8, requires_grad=True)
    labels = torch.randint(512, (4096,))

    def peak(run: object) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run().backward()
        alive = highest = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                alive += event.nbytes()
                highest = max(highest, alive)
        return highest

    ours = peak(lambda: linear_cross_entropy(hidden, weight, None, labels, 64))
    theirs = peak(lambda: plain(hidden, weight, None, labels))
    assert theirs > 2 * 4096 * 512 * 4
    assert ours < 2**20


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_loss_of_a_head_is_that_of_all_its_logits(scale: float) -> None:
    """With `scale` 2 the model changes its logits after the projection, so it needs all of them."""
    head = nn.Linear(5, 11)
    hidden, labels = torch.randn(2, 3, 5), torch.tensor([[3, 0, 10], [1, -100, 7]])

    def run() -> SimpleNamespace:
        logits = head(hidden)
        return SimpleNamespace(logits=logits if scale == 1 else scale * logits)

    expected = plain(scale * hidden.flatten(0, 1), head.weight, scale * head.bias, labels.flatten())
    for _ in range(2):
        loss, output = head_cross_entropy(head, run, labels)
        torch.testing.assert_close(loss, expected)
        assert output.logits.shape == (2, 1 if scale == 1 else 3, 11)
    assert head(hidden).shape == (2, 3, 11), "the projection stays as it was"


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_of_float16_do_not_underflow_before_the_loss_scale(autocast: bool) -> None:
    """A token of probability 1e-8 has gradients below float16's smallest number, 6e-8."""
    dtype = torch.float32 if autocast else torch.float16
    hidden = torch.tensor([[1.0, 0.0], [0.5, 0.0]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[9.0, 1.0], [8.0, -1.0], [-9.0, 0.5]], dtype=dtype, requires_grad=True)
    labels, scale = torch.tensor([0, -100]), 2.0**13
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        loss = linear_cross_entropy(hidden, weight, None, labels)
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = torch.autograd.grad(scale * plain(doubles[0], doubles[1], None, labels), doubles)
    for got, want in zip(torch.autograd.grad(scale * loss, (hidden, weight)), expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=1e-7)
    assert 0 < expected[1][2, 0] / scale < 6e-8
