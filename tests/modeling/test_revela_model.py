"""Revela as a user of transformers meets it: backbones, padding, checkpoints, precision, errors."""

from pathlib import Path

import pytest
import torch
from small_models import VOCABULARY, bert, decoder
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors

from revela_hub.modeling import RevelaConfig, RevelaForCausalLM


def build(**config: object) -> RevelaForCausalLM:
    settings = {"group_size": 4, "temperature": 0.1} | config
    return RevelaForCausalLM.from_backbones(decoder().model, decoder(), **settings).eval()


def inputs(rows: int = 8, tokens: int = 12, side: str = "right") -> dict[str, Tensor]:
    ids = torch.randint(2, VOCABULARY, (rows, tokens))
    mask = torch.ones_like(ids)
    for row in range(rows):
        padding = (3 * row) % (tokens - 2)
        mask[row, tokens - padding :] = 0
    if side == "left":
        ids, mask = ids.flip(-1), mask.flip(-1)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
        "retriever_input_ids": ids,
        "retriever_attention_mask": mask,
    }


def test_the_soft_cap_of_gemma_2_holds_in_the_cross_document_part() -> None:
    """With a tiny cap all scores are equal, so every chunk is read as the mean of its values."""
    lm = decoder("Gemma2", attn_logit_softcapping=1e-4, num_hidden_layers=1).eval()
    model = RevelaForCausalLM.from_backbones(bert(), lm, group_size=2, pooling="mean").eval()
    ids = torch.randint(2, 61, (2, 5))
    swapped = ids.clone()
    swapped[1] = ids[1].flip(0)
    ones = torch.ones_like(ids)
    similarity = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    first = model(ids, ones, similarity=similarity).logits[0]
    second = model(swapped, ones, similarity=similarity).logits[0]
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_training_without_logits_has_the_loss_and_gradients_of_training_with_them(family: str) -> None:
    """Also where a family changes its logits behind the projection (Gemma 2), which the loss at the head does not see."""
    lm = decoder(family, **({"final_logit_softcapping": 2.0} if family == "Gemma2" else {}))
    model = RevelaForCausalLM.from_backbones(bert(), lm, group_size=4, temperature=0.1, pooling="mean").train()
    batch = inputs()
    results = []
    for return_logits in (True, False):
        model.zero_grad()
        output = model(**batch, return_logits=return_logits, num_items_in_batch=17)
        output.loss.backward()
        results.append([output.loss.detach(), *(p.grad.clone() for p in lm.parameters())])
    assert output.logits is None
    assert ("changes_logits" in vars(model.lm.get_output_embeddings())) == (family == "Gemma2")
    for without, with_logits in zip(*results, strict=True):
        torch.testing.assert_close(without, with_logits, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("retriever", "attention", "pooling"),
    [("bert", "sdpa", "cls"), ("llama", "sdpa", "mean"), ("llama", "eager", "last")],
)
def test_padding_on_either_side_gives_the_same_numbers(retriever: str, attention: str, pooling: str) -> None:
    backbone = bert() if retriever == "bert" else decoder().model
    reading = "joint" if pooling == "mean" else "added"
    settings = {"group_size": 4, "temperature": 0.1, "pooling": pooling, "reading": reading}
    model = RevelaForCausalLM.from_backbones(backbone, decoder(), **settings).eval()
    model.set_attn_implementation(attention)
    right = inputs()
    left = {}
    for name, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        rows = [row[m.bool()] for row, m in zip(right[name], right["attention_mask"], strict=True)]
        left[name] = torch.stack([torch.cat([row.new_full((12 - len(row),), fill), row]) for row in rows])
    left |= {f"retriever_{k}": left[k] for k in ("input_ids", "attention_mask")}
    a, b = model(**right), model(**left)
    torch.testing.assert_close(a.embeddings, b.embeddings, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-5, atol=1e-5)
    wider = {k: torch.nn.functional.pad(v, (0, 5), value=-100 if k == "labels" else 0) for k, v in right.items()}
    torch.testing.assert_close(model(**wider).loss, a.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("return_logits", "reading", "frozen"),
    [(False, "added", False), (True, "added", True), (False, "joint", True), (True, "joint", False)],
)
def test_training_and_inference_agree_with_gradient_checkpointing(
    return_logits: bool, reading: str, frozen: bool
) -> None:
    model = build(v_normalization=reading == "added", reading=reading)
    model.lm.requires_grad_(not frozen)
    batch = inputs()
    with torch.no_grad():
        inference = model(**batch)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        output = model(**batch, return_logits=return_logits)
        output.loss.backward()
        torch.testing.assert_close(output.loss, inference.loss, rtol=1e-6, atol=1e-6)
        assert (output.logits is not None) == return_logits
        if return_logits:
            torch.testing.assert_close(output.logits, inference.logits, rtol=1e-5, atol=1e-6)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-7)


def test_under_bf16_autocast_the_similarity_stays_float32() -> None:
    """Two cosines closer than bf16 resolves must still be told apart at the paper's temperature."""
    model = build(temperature=1e-4)
    batch = inputs(rows=4)
    vectors = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.01], [1.0, 0.0101], [1.0, 0.02]]), dim=-1)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batch, embeddings=vectors)
    assert output.similarity.dtype == torch.float32
    cosine = vectors.double() @ vectors.double().T
    expected = (cosine / 1e-4).masked_fill(torch.eye(4, dtype=torch.bool), -torch.inf).softmax(-1)
    torch.testing.assert_close(output.similarity[0].double(), expected, rtol=0.01, atol=1e-3)
    assert output.similarity[0, 0, 1] > 1.005 * output.similarity[0, 0, 2]


def entropy(similarity: Tensor) -> float:
    return float(torch.special.entr(similarity.detach()).sum(-1).mean())


def test_bfloat16_similarities_tie_as_in_the_authors_training() -> None:
    """Each step in bf16, as their code ran under DeepSpeed: equal weights where cosines round to the same number."""
    generator = torch.Generator().manual_seed(0)
    passages, queries = (torch.randn(4 * 40, 24, generator=generator) + 4 for _ in range(2))  # cosines of about 0.94
    model = build(temperature=1e-4, similarity_dtype="bfloat16")
    queries.requires_grad_()
    got = model.similarity(passages, query_embeddings=queries)

    unit = torch.nn.functional.normalize
    sides = [unit(x.detach(), dim=-1).bfloat16().view(40, 4, 24) for x in (queries, passages)]
    scores = (sides[0] @ sides[1].transpose(1, 2)) / 1e-4
    expected = scores.masked_fill(torch.eye(4, dtype=torch.bool), -torch.inf).softmax(-1)
    assert got.dtype == torch.float32 and expected.dtype == torch.bfloat16
    # A sum in another order may round a cosine the other way.
    assert ((got - expected.float()).abs() < 1e-6).all(-1).float().mean() > 0.95
    model.config.similarity_dtype = "float32"
    in_float32 = model.similarity(passages, query_embeddings=queries)
    assert 4 * entropy(in_float32) < entropy(got)
    direction = torch.randn(got.shape, generator=generator)
    (gradient,) = torch.autograd.grad((got * direction).sum(), queries)
    assert gradient.any(-1).float().mean() > 0.1  # chunks that tie have one


@pytest.mark.parametrize("change", [{"v_normalization": True}, {"reading": "joint"}], ids=str)
def test_pairs_can_be_skipped_under_bf16_autocast(change: dict[str, object]) -> None:
    model = build(temperature=0.02, similarity_tolerance=0.1, **change)
    batch = inputs()
    similarity = torch.eye(4).roll(1, 0)[None].repeat(2, 1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batch, similarity=similarity)
        model.config.similarity_tolerance = 0.0
        whole = model(**batch, similarity=similarity)
    output.loss.backward()
    torch.testing.assert_close(output.logits.float(), whole.logits.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("reading", ["added", "joint"])
def test_absent_chunks_are_read_by_no_one_and_a_group_of_one_is_plain_language_modelling(reading: str) -> None:
    model = build(reading=reading)
    batch = inputs(rows=4)
    for name in ("attention_mask", "retriever_attention_mask"):
        batch[name] = batch[name].clone()
        batch[name][1:] = 0
    batch["labels"] = batch["labels"].clone()
    batch["labels"][1:] = -100
    output = model(**batch)
    assert output.similarity.abs().max() == 0
    alone = model.lm(
        input_ids=batch["input_ids"][:1], attention_mask=batch["attention_mask"][:1], labels=batch["labels"][:1]
    )
    torch.testing.assert_close(output.loss, alone.loss)
    output.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_tied_embeddings_stay_tied_through_a_round_trip(tmp_path: Path) -> None:
    lm = decoder(tie_word_embeddings=True)
    model = RevelaForCausalLM.from_backbones(bert(), lm, group_size=4, pooling="mean").eval()
    batch = inputs()
    model.save_pretrained(tmp_path)
    loaded = RevelaForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.lm.lm_head.weight is loaded.lm.get_input_embeddings().weight
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize(
    "change",
    [
        {"pooling": "max"},
        {"similarity_span": "half"},
        {"similarity_sides": "both"},
        {"reading": "joint", "v_normalization": True},
    ],
    ids=str,
)
def test_a_configuration_that_would_train_something_else_is_rejected(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        RevelaConfig(**change)


def test_inputs_that_would_be_misread_are_rejected() -> None:
    model = build()
    batch = inputs(rows=6)
    with pytest.raises(ValueError, match="group_size=4"):
        model(**batch)
    ids = batch["input_ids"][:4]
    with pytest.raises(TypeError, match="token_type_ids"):
        model(ids, torch.ones_like(ids), token_type_ids=ids)
    lm = decoder()
    with pytest.raises(ValueError, match="same object"):
        RevelaForCausalLM.from_backbones(lm, lm)


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_may_be_passed_copies_of_their_inputs(frozen: bool) -> None:
    """As FSDP2 does, of dataclasses and dictionaries."""

    def copied(layer: nn.Module, args: object, kwargs: object) -> object:
        return _apply_to_tensors(torch.clone, (args, kwargs))

    model, batch = build(), inputs()
    model.lm.requires_grad_(not frozen)
    expected = model(**batch).loss
    for layer in model.lm.model.layers:
        layer.register_forward_pre_hook(copied, with_kwargs=True)
    torch.testing.assert_close(model(**batch).loss, expected)
