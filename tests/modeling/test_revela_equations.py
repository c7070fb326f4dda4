"""Revela's forward and all its gradients against the paper's equations in plain loops and float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from revela_reference import reference_logits, reference_loss, reference_similarity
from small_models import SMALL, decoder
from torch import Tensor

from revela_hub.modeling import RevelaForCausalLM, joint_reading
from revela_hub.modeling.in_batch_kernels import Options, _eager_read, _sdpa_read

GROUPS, SIZE, VOCABULARY = 2, 3, 29
LENGTHS = (5, 3, 6, 4, 6, 2)


def build(v_normalization: bool, attention: str, **config: object) -> RevelaForCausalLM:
    sizes = SMALL | {"vocab_size": VOCABULARY, "initializer_range": 0.5, "pad_token_id": None}
    lm, retriever = (decoder(**sizes, attn_implementation=attention) for _ in range(2))
    settings = {"group_size": SIZE, "temperature": 0.3, "v_normalization": v_normalization} | config
    return RevelaForCausalLM.from_backbones(retriever.model, lm, **settings).double().eval()


def batch(side: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """The chunks without padding, and the same padded on one side with a mask."""
    chunks = [torch.randint(VOCABULARY, (n,)) for n in LENGTHS]
    ids, mask = torch.zeros(len(chunks), max(LENGTHS), dtype=torch.long), torch.zeros(len(chunks), max(LENGTHS))
    for row, chunk in enumerate(chunks):
        place = slice(0, len(chunk)) if side == "right" else slice(max(LENGTHS) - len(chunk), None)
        ids[row, place], mask[row, place] = chunk, 1
    return chunks, ids, mask.long()


# Left padding with eager attention is left to float32 (test_revela_model): in float64 transformers' own mask overflows.
@pytest.mark.parametrize(("side", "attention"), [("right", "sdpa"), ("right", "eager"), ("left", "sdpa")])
@pytest.mark.parametrize("v_normalization", [False, True])
def test_loss_logits_and_gradients_are_those_of_the_equations(v_normalization: bool, side: str, attention: str) -> None:
    compare(build(v_normalization, attention), side, partial(reference_logits, v_normalization=v_normalization))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("side", "attention"), [("right", "sdpa"), ("right", "eager"), ("left", "sdpa")])
def test_joint_reading_is_one_softmax(side: str, attention: str, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, loss and every gradient, also that of the bias; two rows at a time."""
    monkeypatch.setattr(joint_reading, "BLOCK_ON_CPU", 2 * 4 * 6 * 6 * SIZE)
    model = build(False, attention, reading="joint", reading_bias=-0.7)
    with torch.no_grad():
        model.reading_bias.weight[1] += 0.3
    compare(model, side, partial(reference_logits, bias=model.reading_bias.weight), frozen)


@pytest.mark.parametrize("v_normalization", [False, True])
def test_a_frozen_lm_runs_stream_e_once_without_gradients(v_normalization: bool) -> None:
    model = build(v_normalization, "sdpa")
    compare(model, "right", partial(reference_logits, v_normalization=v_normalization), frozen=True)


@pytest.mark.parametrize("v_normalization", [False, True])
def test_queries_are_compared_with_passages(v_normalization: bool) -> None:
    model = build(v_normalization, "sdpa")
    compare(model, "right", partial(reference_logits, v_normalization=v_normalization), queries=True)


def compare(
    model: RevelaForCausalLM,
    side: str,
    reference: Callable[..., list[Tensor]],
    frozen: bool = False,
    queries: bool = False,
) -> None:
    """Compare logits, loss and gradients with those of a reference, which returns the logits of each chunk."""
    model.lm.requires_grad_(not frozen)
    chunks, ids, mask = batch(side)
    embeddings = torch.randn(len(chunks), 7, dtype=torch.float64, requires_grad=True)
    sides = {"embeddings": embeddings}
    if queries:
        sides["query_embeddings"] = torch.randn(len(chunks), 7, dtype=torch.float64, requires_grad=True)
    leaves = sides | {n: p for n, p in model.named_parameters() if not n.startswith("retriever")}
    output = model(ids, mask, labels=ids.masked_fill(mask == 0, -100), **sides)
    output.similarity.retain_grad()
    output.loss.backward()
    got = {name: p.grad.clone() for name, p in leaves.items() if p.grad is not None}
    assert any(name.startswith("lm.") for name in got) != frozen

    model.zero_grad()
    for leaf in sides.values():
        leaf.grad = None
    similarity = reference_similarity(embeddings, SIZE, temperature=0.3, queries=sides.get("query_embeddings"))
    similarity.retain_grad()
    logits = reference(model.lm, chunks, similarity)
    loss = reference_loss(logits, chunks)
    loss.backward()

    torch.testing.assert_close(output.similarity, similarity, rtol=1e-10, atol=1e-12)
    for row, expected in enumerate(logits):
        torch.testing.assert_close(output.logits[row][mask[row].bool()], expected, rtol=1e-4, atol=1e-5)
    # transformers computes norms, rotary embeddings and the cross-entropy in float32, hence the tolerances.
    torch.testing.assert_close(output.loss.double(), loss, rtol=1e-6, atol=1e-6)
    want = {name: p.grad for name, p in leaves.items() if p.requires_grad}
    off_diagonal = ~torch.eye(SIZE, dtype=torch.bool)
    got["similarity"], want["similarity"] = (x.grad * off_diagonal for x in (output.similarity, similarity))
    assert set(got) == set(want)
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-4, atol=3e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert expected.abs().max() > 1e-6, f"{name}: the test would pass with a gradient of zero"


@pytest.mark.parametrize("queries", [False, True])
def test_the_retriever_gets_the_gradient_of_its_embeddings(queries: bool) -> None:
    """With queries that of both sides, whose widths differ."""
    model = build(True, "sdpa")
    _, ids, mask = batch("right")
    labels = ids.masked_fill(mask == 0, -100)
    embeddings = {"embeddings": model.embed(ids, mask)}
    inputs = {"retriever_input_ids": ids, "retriever_attention_mask": mask}
    if queries:
        embeddings["query_embeddings"] = model.embed(ids[:, :4], mask[:, :4])
        inputs |= {"retriever_query_input_ids": ids[:, :4], "retriever_query_attention_mask": mask[:, :4]}
    model(ids, mask, labels=labels, **embeddings).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.retriever.named_parameters()}
    model.zero_grad()
    model(ids, mask, labels=labels, **inputs).loss.backward()
    for name, parameter in model.retriever.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-6, atol=1e-10)
    assert max(g.abs().max() for g in expected.values()) > 1e-6


@pytest.mark.parametrize("v_normalization", [False, True])
def test_skipping_pairs_is_exact_to_the_tolerance(v_normalization: bool) -> None:
    """Error of a logit gradient is bounded by what was skipped; with nothing skipped the two paths agree."""
    tolerance = 1e-3
    model = build(v_normalization, "sdpa", temperature=0.02)
    _, ids, mask = batch("right")
    embeddings = torch.randn(len(ids), 4, dtype=torch.float64, requires_grad=True)
    labels = ids.masked_fill(mask == 0, -100)

    def run(value: float) -> tuple[Tensor, Tensor, int]:
        model.config.similarity_tolerance = value
        embeddings.grad = None
        output = model(ids, mask, labels=labels, embeddings=embeddings)
        output.loss.backward()
        pairs = model._pairs(output.similarity, model._resolution(output.similarity))
        return output.logits.detach(), embeddings.grad.clone(), pairs.shape[1]

    exact_logits, exact_grad, _ = run(0.0)
    some_logits, some_grad, pairs = run(tolerance)
    assert 0 < pairs < GROUPS * SIZE * (SIZE - 1), "the test must skip some pairs, and not all"
    torch.testing.assert_close(some_logits, exact_logits, rtol=0, atol=1e2 * tolerance * model.config.temperature)
    torch.testing.assert_close(some_grad, exact_grad, rtol=0, atol=10 * tolerance)
    none_logits, none_grad, _ = run(1e-300)
    torch.testing.assert_close(none_logits, exact_logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(none_grad, exact_grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("v_normalization", [False, True])
def test_the_fused_kernel_that_gpus_use_gives_the_same(v_normalization: bool, masked: bool) -> None:
    """Values and gradients of `_sdpa_read`, which no CPU run takes, against the written-out version."""
    options = Options(v_normalization=v_normalization)
    shapes = ((2, 2, 12, 8), (2, 2, 5, 8), (2, 2, 5, 8), (2, 1, 12, 1))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    query, key, value, weight = tensors
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)[:, None, None, :] if masked else None
    results = []
    for read in (_sdpa_read, _eager_read):
        output = read(query, key, value, mask, weight, options)
        results.append([output, *torch.autograd.grad(output.square().sum(), tensors)])
    for fused, written_out in zip(*results, strict=True):
        torch.testing.assert_close(fused, written_out, rtol=1e-8, atol=1e-10)


def test_the_gradient_of_the_mask_does_not_come_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only the mask needs a gradient, torch's memory-efficient kernel for GPUs fails (pytorch/pytorch#148476)."""
    seen: list[tuple[bool, bool]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def recorded(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        needed = attn_mask is not None and attn_mask.requires_grad
        seen.append((needed, any(x.requires_grad for x in (query, key, value))))
        return attend(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    model = build(False, "sdpa", reading="joint")
    model.lm.requires_grad_(False)
    ids = torch.randint(2, 20, (2 * SIZE, 5))
    embeddings = torch.randn(2 * SIZE, 8, requires_grad=True)
    model(ids, torch.ones_like(ids), labels=ids, embeddings=embeddings).loss.backward()
    assert embeddings.grad is not None and embeddings.grad.abs().sum() > 0
    assert (True, True) in seen and (True, False) not in seen
