"""CoT-MoTE as a user of transformers meets it: families, variants, routes, checkpoints, remote code, errors."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from processes import reader
from safetensors import safe_open
from test_retromae_model import FAMILIES, masked_lm
from torch import Tensor
from transformers import AutoModelForMaskedLM, BertModel

from revela_hub.modeling import CoTMoTEConfig, CoTMoTEForPreTraining, CoTMoTEModel, RetroMAEForPreTraining

VOCABULARY = FAMILIES["Bert"]["vocab_size"]
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


@pytest.mark.parametrize("variant", ["experts", "separate", "siamese"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_its_checkpoint_holds_decoder_and_experts_once(
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
    published = CoTMoTEModel.from_pretrained(tmp_path / "published").eval()
    torch.testing.assert_close(published(**inputs, expert=MIXED), model.encoder(**inputs, expert=MIXED), rtol=0, atol=0)


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
    mixed = model(**inputs, expert=MIXED, output_hidden_states=True)
    assert len(mixed.hidden_states) == 3
    torch.testing.assert_close(mixed.pooler_output, model(**inputs, expert=torch.tensor([0, 1, 1])).pooler_output)
    for row, kind in enumerate(MIXED):
        alone = model(**{name: tensor[row : row + 1] for name, tensor in inputs.items()}, expert=kind)
        for name in ("pooler_output", "sparse"):
            torch.testing.assert_close(mixed[name][row], alone[name][0], rtol=1e-5, atol=1e-6)
    assert model(**inputs, expert="query", return_sparse=False).sparse is None


@pytest.mark.parametrize("decoder", ["ar", "ae"])
def test_padding_changes_nothing(decoder: str) -> None:
    model = CoTMoTEForPreTraining.from_backbone(masked_lm(), decoder=decoder).eval()
    batch = pre_training(decoder=decoder)
    wider = {
        name: torch.nn.functional.pad(tensor, (0, 4), value=-100 if "labels" in name else 0)
        for name, tensor in batch.items()
    }
    one, other = model(**batch, expert="query"), model(**wider, expert="query")
    for name in ("encoder_loss", "dense_decoder_loss", "sparse_decoder_loss", "pooler_output", "sparse"):
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6)


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


LOADED_ELSEWHERE = """
import sys, torch
from transformers import AutoModel
assert "revela_hub" not in sys.modules
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
torch.manual_seed(1)
ids = torch.randint(5, 61, (2, 8))
out = model(ids, torch.ones_like(ids), expert="query")
torch.save({"dense": out.pooler_output.detach(), "sparse": out.sparse.detach()}, sys.argv[1] + "/vectors")
assert "revela_hub" not in sys.modules
"""


def test_the_published_folder_loads_in_a_fresh_process_by_its_own_code(tmp_path: Path) -> None:
    model = CoTMoTEForPreTraining.from_backbone(masked_lm()).eval()
    shake(model)
    model.encoder.save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.glob("*.py")) == [
        "backbones.py", "configuration_cot_mote.py", "expert_encoders.py", "linear_cross_entropy.py", "masked_lm.py",
        "modeling_cot_mote.py",
    ]  # fmt: skip
    command = reader(LOADED_ELSEWHERE, str(tmp_path))
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    torch.manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (2, 8))
    expected = model.encoder(ids, torch.ones_like(ids), expert="query")
    vectors = torch.load(tmp_path / "vectors", weights_only=True)
    assert torch.equal(vectors["dense"], expected.pooler_output) and torch.equal(vectors["sparse"], expected.sparse)


def error(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text))


def test_wrong_experts_raise_clear_errors() -> None:
    model = CoTMoTEModel.from_backbone(masked_lm()).eval()
    inputs = texts()
    with pytest.raises(ValueError, match=error('no expert given: pass expert="query" or expert="passage"')):
        model(**inputs)
    with pytest.raises(ValueError, match=error("expert has 2 entries for 3 rows: give one expert per row")):
        model(**inputs, expert=["query", "passage"])
    with pytest.raises(ValueError, match=error('expert must be "query" or "passage", got \'document\'')):
        model(**inputs, expert="document")
    with pytest.raises(ValueError, match=error("24 positions: cut the texts")):
        model(torch.zeros(1, 25, dtype=torch.long), torch.ones(1, 25), expert="query")
    with pytest.raises(ValueError, match=error("attention_mask must be (3, 10) like input_ids, got (3, 9)")):
        model(inputs["input_ids"], inputs["attention_mask"][:, :9], expert="query")
    trained = CoTMoTEForPreTraining.from_backbone(masked_lm())
    batch = pre_training()
    with pytest.raises(ValueError, match=error('decoder_input_ids is missing: decoder="ar" needs a contextual span')):
        trained(**inputs, labels=batch["labels"], expert="query")
    with pytest.raises(ValueError, match=error("one span per text")):
        trained(**(batch | {k: v[:2] for k, v in batch.items() if k.startswith("decoder")}), expert="query")
    siamese = CoTMoTEModel.from_backbone(masked_lm(), variant="siamese").eval()
    assert torch.equal(siamese(**inputs).sparse, siamese(**inputs, expert="query").sparse)


def test_wrong_backbones_raise_clear_errors(tmp_path: Path, bert_folder: Path, llama_folder: Path) -> None:
    pre_trained = CoTMoTEForPreTraining.from_backbone(masked_lm())
    pre_trained.save_pretrained(tmp_path / "cot-mote")
    RetroMAEForPreTraining.from_encoder(masked_lm()).save_pretrained(tmp_path / "retromae")
    with pytest.raises(ValueError, match=error("load it with CoTMoTEForPreTraining")):
        CoTMoTEModel.from_pretrained(tmp_path / "cot-mote")
    for name, kind in (("cot-mote", "CoTMoTEForPreTraining"), ("retromae", "RetroMAEForPreTraining")):
        told = f"is a {kind} checkpoint, which holds an encoder and a decoder: give its encoder with fresh_head=True"
        with pytest.raises(ValueError, match=error(told)):
            CoTMoTEModel.from_backbone(str(tmp_path / name))
    with pytest.raises(ValueError, match=error("CoTMoTEForPreTraining is not a backbone")):
        CoTMoTEModel.from_backbone(pre_trained)
    with pytest.raises(ValueError, match=error("has no masked-LM head (no weights for cls.predictions")):
        CoTMoTEModel.from_backbone(str(bert_folder))
    with pytest.warns(UserWarning, match="they are initialised at random"):
        CoTMoTEModel.from_backbone(str(bert_folder), fresh_head=True)
    with pytest.raises(ValueError, match=error("BertModel has no masked-LM head")):
        CoTMoTEModel.from_backbone(BertModel(transformers.BertConfig(**FAMILIES["Bert"])))
    with pytest.raises(ValueError, match=error("(LlamaForCausalLM) is not an encoder with a masked-LM head")):
        CoTMoTEModel.from_backbone(str(llama_folder))
    other = AutoModelForMaskedLM.from_config(transformers.BertConfig(**(FAMILIES["Bert"] | {"vocab_size": 62})))
    with pytest.raises(ValueError, match=error("query and passage encoder differ in vocab_size (62 and 61)")):
        CoTMoTEModel.from_backbone(masked_lm(), query_backbone=other, variant="separate")
    with pytest.raises(ValueError, match=error('query_backbone needs variant="separate"')):
        CoTMoTEModel.from_backbone(masked_lm(), query_backbone=masked_lm())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "moe"}, "variant must be one of 'experts', 'separate', 'siamese', got 'moe'"),
        ({"decoder": "gpt"}, "decoder must be one of 'ar', 'ae', 'none', got 'gpt'"),
        ({"bottlenecks": []}, 'bottlenecks must be "dense", "sparse" or both'),
        ({"bottlenecks": "cls"}, "bottlenecks must be one of 'dense', 'sparse', got 'cls'"),
        ({"decoder_layers": 0}, "decoder_layers must be at least 1, got 0"),
        ({"decoder": "ae", "attention_window": 3}, 'attention_window must be at least 1, and needs decoder="ar"'),
    ],
)
def test_invalid_configurations_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=error(message)):
        CoTMoTEConfig(transformers.BertConfig(), **settings)


def test_a_checkpoint_that_lacks_a_layer_is_rejected_even_with_a_fresh_head(tmp_path: Path) -> None:
    lm = masked_lm()
    weights = {name: value for name, value in lm.state_dict().items() if "layer.1.output.dense" not in name}
    lm.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match=r"has no weights for bert\.encoder\.layer\.1\.output\.dense"):
        CoTMoTEModel.from_backbone(str(tmp_path), fresh_head=True)
