"""CoT-MoTE as a user of transformers meets it: variants, routes, checkpoints, remote code, errors."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from small_models import ENCODERS, VOCABULARY, masked_lm
from torch import Tensor
from transformers import BertModel

from revela_hub.modeling import CoTMoTEConfig, CoTMoTEForPreTraining, CoTMoTEModel

MIXED = ["query", "passage", "passage"]


def texts(pad: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(5, VOCABULARY, (3, 10))
    mask = torch.ones_like(ids)
    ids[:, 0], ids[1, 6:], mask[1, 6:] = 2, pad, 0
    return {"input_ids": ids, "attention_mask": mask}


def pre_training(pad: int = 0, decoder: str = "ar") -> dict[str, Tensor]:
    inputs, span = texts(pad), texts(pad)
    inputs["labels"] = torch.full_like(inputs["input_ids"], -100)
    inputs["labels"][:, 2:4] = 7
    for name, tensor in span.items():
        inputs[f"decoder_{name}"] = tensor
    if decoder == "ae":
        inputs["decoder_labels"] = inputs["labels"].clone()
    return inputs


def shake(model: torch.nn.Module) -> None:
    """So that nothing is as it was initialised, and the experts differ."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)


CASES = [
    ("Bert", "experts"),
    ("Bert", "separate"),
    ("Bert", "siamese"),
    ("Roberta", "experts"),
    ("ModernBert", "experts"),
]


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_every_weight_is_trained_and_the_checkpoint_holds_decoder_and_experts_once(
    tmp_path: Path, family: str, variant: str
) -> None:
    backbone, pad = masked_lm(family).eval(), 1 if family == "Roberta" else 0
    shake(backbone)
    model = CoTMoTEForPreTraining.from_backbone(backbone, variant=variant, attention_window=3).eval()
    inputs = texts(pad)
    expected = backbone(**inputs, output_hidden_states=True)
    for expert in ("query", "passage"):  # equal weights: exactly the backbone
        vectors = model.encoder(**inputs, expert=expert)
        assert torch.equal(vectors.last_hidden_state, expected.hidden_states[-1])
        assert torch.equal(vectors.pooler_output, expected.hidden_states[-1][:, 0])
    shake(model)
    batch = pre_training(pad)
    output = model(**batch, expert=MIXED)
    output.loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []

    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 (no mapping)
    assert stored == sum(p.numel() for p in model.parameters())
    loaded, info = CoTMoTEForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(loaded.eval()(**batch, expert=MIXED).loss, output.loss, rtol=0, atol=0)
    loaded.encoder.save_pretrained(tmp_path / "published")
    for folder in (
        tmp_path / "published",
        tmp_path,
    ):  # the encoder of a pre-training checkpoint is loaded without its decoder
        published = CoTMoTEModel.from_pretrained(folder).eval()
        assert published.config.decoder == "none"
        torch.testing.assert_close(
            published(**inputs, expert=MIXED), model.encoder(**inputs, expert=MIXED), rtol=0, atol=0
        )


def test_attention_is_shared_and_feed_forwards_are_not() -> None:
    """What an expert learns moves its own texts alone; what the attention learns moves all."""
    model = CoTMoTEModel.from_backbone(masked_lm()).eval()
    inputs = texts()
    before = {kind: model(**inputs, expert=kind).pooler_output for kind in ("query", "passage")}
    layer, query_layer = model.lm.bert.encoder.layer[0], model.query_lm.bert.encoder.layer[0]
    assert layer.attention is query_layer.attention and layer.output is not query_layer.output
    query_layer.output.LayerNorm.bias.data += 1
    assert torch.equal(model(**inputs, expert="passage").pooler_output, before["passage"])
    assert not torch.allclose(model(**inputs, expert="query").pooler_output, before["query"])
    layer.attention.output.dense.bias.data += torch.randn(32)
    assert not torch.allclose(model(**inputs, expert="passage").pooler_output, before["passage"])
    backbone, experts = (sum(p.numel() for p in m.parameters()) for m in (model.lm, model))
    feed_forward = sum(p.numel() for layer in model.lm.bert.encoder.layer for p in layer.intermediate.parameters())
    feed_forward += sum(p.numel() for layer in model.lm.bert.encoder.layer for p in layer.output.parameters())
    assert experts == backbone + feed_forward


def test_a_mixed_batch_gives_each_row_its_own_expert() -> None:
    model = CoTMoTEModel.from_backbone(masked_lm()).eval()
    shake(model)
    inputs = texts()
    mixed = model(**inputs, expert=MIXED)
    torch.testing.assert_close(mixed.pooler_output, model(**inputs, expert=torch.tensor([0, 1, 1])).pooler_output)
    for row, kind in enumerate(MIXED):
        alone = model(**{name: tensor[row : row + 1] for name, tensor in inputs.items()}, expert=kind)
        for name in ("pooler_output", "sparse"):
            torch.testing.assert_close(mixed[name][row], alone[name][0], rtol=1e-5, atol=1e-6)
    assert model(**inputs, expert="query", return_sparse=False).sparse is None


def test_gradient_checkpointing_changes_nothing() -> None:
    """The layers are run again after the other expert was: nothing in them may have switched."""
    model = CoTMoTEForPreTraining.from_backbone(masked_lm()).train()
    batch, gradients = pre_training(), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(**batch, expert=MIXED).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_bf16_autocast_and_half_weights_run() -> None:
    model = CoTMoTEForPreTraining.from_backbone(masked_lm())
    batch = pre_training()
    expected = model.eval()(**batch, expert=MIXED).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch, expert=MIXED).loss
    loss.backward()
    assert loss.dtype == torch.float32 and abs(loss - expected) < 0.1
    assert abs(model.bfloat16()(**batch, expert=MIXED).loss - expected) < 0.1


def test_each_row_needs_an_expert() -> None:
    model = CoTMoTEModel.from_backbone(masked_lm()).eval()
    inputs = texts()
    for expert in (None, ["query", "passage"], "document", ["query", "passage", "document"]):
        with pytest.raises(ValueError, match="expert"):
            model(**inputs, expert=expert)
    siamese = CoTMoTEModel.from_backbone(masked_lm(), variant="siamese").eval()
    assert torch.equal(siamese(**inputs).sparse, siamese(**inputs, expert="query").sparse)


def test_backbones_that_do_not_fit_are_rejected(bert_folder: Path, llama_folder: Path) -> None:
    pre_trained = CoTMoTEForPreTraining.from_backbone(masked_lm())
    for given in (pre_trained, str(llama_folder), BertModel(transformers.BertConfig(**ENCODERS["Bert"]))):
        with pytest.raises(ValueError, match=r"AutoModelForMaskedLM"):
            CoTMoTEModel.from_backbone(given)
    with pytest.raises(ValueError, match=r"no weights for cls\.predictions"):
        CoTMoTEModel.from_backbone(str(bert_folder))
    with pytest.warns(UserWarning, match="they are initialised at random"):
        CoTMoTEForPreTraining.from_backbone(str(bert_folder))  # which trains the head


@pytest.mark.parametrize("settings", [{"variant": "moe"}, {"decoder": "gpt"}, {"bottlenecks": "cls"}], ids=str)
def test_a_configuration_that_would_train_something_else_is_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        CoTMoTEConfig(encoder=transformers.BertConfig(), **settings)
