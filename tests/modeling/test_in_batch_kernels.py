"""The cross-document part by its own backward pass, and by fused calls, against the equation in loops and float64."""

import pytest
import torch
from torch import Tensor

from revela_hub.modeling import in_batch_attention
from revela_hub.modeling.in_batch_attention import InBatch, all_pairs, cross_document_attention, every_pair
from revela_hub.modeling.in_batch_kernels import Options, read_pairs, read_pairs_on_cpu

GROUPS, SIZE, HEADS, KV_HEADS, LENGTH, DIM = 2, 3, 4, 2, 5, 4
N = GROUPS * SIZE
LENGTHS = torch.tensor([5, 3, 1, 4, 0, 5])  # the fifth chunk is absent


def tensors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries (already scaled), keys, values and similarities."""
    shapes = ((N, HEADS, LENGTH, DIM), (N, KV_HEADS, LENGTH, DIM), (N, KV_HEADS, LENGTH, DIM))
    made = [torch.randn(shape, dtype=dtype) for shape in shapes]
    similarity = torch.randn(GROUPS, SIZE, SIZE, dtype=torch.promote_types(dtype, torch.float32)).softmax(-1)
    similarity[1, 1], similarity[1, :, 1] = 0.0, 0.0
    return [x.requires_grad_() for x in (*made, similarity)]


def in_loops(query: Tensor, key: Tensor, value: Tensor, similarity: Tensor, options: Options) -> Tensor:
    """sum_{j != i} Sim[i, j] * b_ij of every query that is no padding, one at a time."""
    rows = []
    for i in range(N):
        for t in range(LENGTH):
            for head in range(HEADS):
                total = torch.zeros(DIM, dtype=similarity.dtype)
                first = i // SIZE * SIZE
                for j in range(first, first + SIZE):
                    if j == i or t >= LENGTHS[i] or not LENGTHS[j]:
                        continue
                    keys, values = (x[j, head // (HEADS // KV_HEADS), : LENGTHS[j]] for x in (key, value))
                    weights = (keys @ query[i, head, t]).softmax(0)
                    read = weights @ values
                    if options.v_normalization:
                        read = read / (weights @ values.norm(dim=-1) + options.eps)
                    total = total + similarity[i // SIZE, i % SIZE, j % SIZE] * read
                rows.append(total)
    return torch.stack(rows).view(N, LENGTH, HEADS, DIM)


def attend(query: Tensor, key: Tensor, value: Tensor, similarity: Tensor, options: Options) -> Tensor:
    output = cross_document_attention(query, key, value, InBatch(similarity, LENGTHS), options)
    return output * (torch.arange(LENGTH) < LENGTHS[:, None])[:, :, None, None]


OPTIONS = [Options(), Options(v_normalization=True), Options(v_normalization=True, eps=0.3)]


@pytest.mark.parametrize("options", OPTIONS)
def test_values_and_gradients_are_those_of_the_equation(options: Options) -> None:
    inputs = tensors()
    grad = torch.randn(N, LENGTH, HEADS, DIM, dtype=torch.float64)
    results = []
    for function in (attend, in_loops):
        output = function(*inputs, options)
        results.append([output, *torch.autograd.grad(output, inputs, grad)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    singles = [x.detach().float().requires_grad_() for x in inputs]
    output = attend(*singles, options)
    for got, want in zip((output, *torch.autograd.grad(output, singles, grad.float())), results[1], strict=True):
        assert (got - want).abs().max() < 6e-7 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS[:2])
def test_the_pairs_at_a_time_of_a_gpu_give_the_same(options: Options, dtype: torch.dtype) -> None:
    query, key, value, similarity = tensors(dtype)
    folded = query.detach().view(N, KV_HEADS, -1, DIM).requires_grad_()
    pairs_2P = every_pair(similarity)
    pairs_2P = pairs_2P[:, (pairs_2P != 4).all(0)]
    weight_P = torch.rand(pairs_2P.shape[1], dtype=similarity.dtype, requires_grad=True)
    results = []
    for read in (read_pairs, read_pairs_on_cpu):
        output = read(folded, key, value, weight_P, pairs_2P, LENGTHS, options)
        repeats = HEADS // KV_HEADS
        real = (torch.arange(LENGTH * repeats) < LENGTHS[:, None] * repeats)[:, None, :, None]
        output = output * real
        results.append([output, *torch.autograd.grad(output.square().sum(), (folded, key, value, weight_P))])
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.1}
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("chunks_at_a_time", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS[:2])
def test_the_fused_calls_of_a_gpu_give_the_same(
    monkeypatch: pytest.MonkeyPatch, options: Options, chunks_at_a_time: int
) -> None:
    """All chunks of a group, or a block of them, in one call."""
    query, key, value, similarity = inputs = tensors()
    folded = query.view(N, KV_HEADS, -1, LENGTH, DIM).transpose(2, 3).reshape(N, KV_HEADS, -1, DIM)
    size = folded.numel() * folded.element_size()
    monkeypatch.setattr(in_batch_attention, "BLOCK_BYTES", chunks_at_a_time * size)
    output = all_pairs(folded, key, value, InBatch(similarity, LENGTHS), options)
    output = output.view(N, KV_HEADS, LENGTH, -1, DIM).transpose(1, 2).reshape(N, LENGTH, HEADS, DIM)
    output = output * (torch.arange(LENGTH) < LENGTHS[:, None])[:, :, None, None]
    want = attend(*inputs, options)
    torch.testing.assert_close(output, want, rtol=1e-10, atol=1e-12)
    grad = torch.randn_like(want)
    for got, expected in zip(
        torch.autograd.grad(output, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True
    ):
        off_diagonal = ~torch.eye(SIZE, dtype=torch.bool) if got.shape[-1] == SIZE else 1
        present = 1 if got.shape[-1] != SIZE else (LENGTHS.view(GROUPS, 1, SIZE) > 0)
        torch.testing.assert_close(got * off_diagonal * present, expected * off_diagonal, rtol=1e-8, atol=1e-10)


def test_dropout_and_soft_caps_take_the_path_that_has_them() -> None:
    inputs = tensors()
    capped = attend(*inputs, Options(softcap=1e-6))
    uniform = attend(torch.zeros_like(inputs[0]), *inputs[1:], Options())
    torch.testing.assert_close(capped, uniform, rtol=1e-4, atol=1e-5)
    dropped = torch.stack([attend(*inputs, Options(dropout=0.5)).detach() for _ in range(400)])
    plain = attend(*inputs, Options())
    assert dropped.std(0).max() > 0.1
    torch.testing.assert_close(dropped.mean(0), plain, rtol=0, atol=0.3)


def test_a_value_of_zero_has_a_gradient_with_v_normalisation() -> None:
    """Where torch's norm has the gradient 0, so has ours, and no NaN."""
    inputs = tensors()
    with torch.no_grad():
        inputs[2][0, :, 1] = 0.0
    options = Options(v_normalization=True)
    results = [torch.autograd.grad(f(*inputs, options).square().sum(), inputs) for f in (attend, in_loops)]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
