"""RetroMAE as a user of transformers meets it: families of encoders, masks, checkpoints, precision, errors."""

import subprocess
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from processes import reader
from torch import Tensor
from transformers import AutoModel, BertModel, PreTrainedModel

from revela_hub.modeling.configuration_retromae import RetroMAEConfig
from revela_hub.modeling.masked_lm import additive
from revela_hub.modeling.modeling_retromae import RetroMAEForPreTraining

VOCABULARY, POSITIONS = 61, 24
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES = {
    "Bert": SMALL | NO_DROPOUT,
    "Roberta": SMALL | NO_DROPOUT | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "DistilBert": {
        "vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
        "max_position_embeddings": POSITIONS, "dropout": 0.0, "attention_dropout": 0.0,
    },
    "ModernBert": SMALL | {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
}  # fmt: skip
FIRST_TOKEN = 5  # below are the special ones of all families


def masked_lm(family: str = "Bert", **settings: object) -> PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(**(FAMILIES[family] | settings))
    return transformers.AutoModelForMaskedLM.from_config(config)


def build(family: str = "Bert", settings: dict[str, object] | None = None, **config: object) -> RetroMAEForPreTraining:
    return RetroMAEForPreTraining.from_encoder(masked_lm(family, **(settings or {})), **config).eval()


def inputs(decoder: str = "enhanced", lengths: tuple[int, ...] = (12, 9, 3), pad: int = 0) -> dict[str, Tensor]:
    """Return random passages with these numbers of tokens, special tokens included."""
    shape = (len(lengths), max(lengths))
    ids = torch.randint(FIRST_TOKEN, VOCABULARY, shape)
    positions = torch.arange(shape[1])
    last = torch.tensor(lengths)[:, None] - 1
    mask = positions <= last
    ids[:, 0], ids[positions == last] = 2, 3
    ids[~mask] = pad
    word = (positions > 0) & (positions < last)
    masked = word & (torch.rand(shape) < 0.3) | (positions == 1) & word
    visible = mask[:, None, :] & mask[:, :, None] & (torch.rand(*shape, shape[1]) < 0.5)
    visible[:, 1:, 0] = mask[:, 1:]
    visible[:, positions, positions] = False
    hidden = word & (torch.rand(shape) < 0.5) | (positions == 1) & word
    return {
        "encoder_input_ids": ids.masked_fill(masked, 4),
        "encoder_attention_mask": mask.long(),
        "encoder_labels": ids.masked_fill(~masked, -100),
        "decoder_input_ids": ids.masked_fill(hidden, 4) if decoder == "basic" else ids,
        "decoder_attention_mask": visible.long() if decoder == "enhanced" else mask.long(),
        "decoder_labels": ids.masked_fill(~(hidden if decoder == "basic" else word), -100),
    }


@pytest.mark.parametrize("decoder", ["enhanced", "basic", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_its_checkpoint_holds_the_decoder(tmp_path: Path, family: str, decoder: str) -> None:
    """Every weight gets a gradient; scoring the labelled positions alone gives the same losses; all of it is saved."""
    model = build(family, decoder=decoder, decoder_layers=2 if decoder == "basic" else 1)
    batch = inputs(decoder, pad=1 if family == "Roberta" else 0)
    output = model(**batch)
    assert output.encoder_logits.shape == (3, 12, VOCABULARY)
    assert (output.decoder_logits is None) == (decoder == "none")
    fast = model(**batch, return_logits=False)
    assert fast.encoder_logits is None and fast.decoder_logits is None
    for name in ("loss", "encoder_loss", "decoder_loss", "sentence_embedding"):
        expected, got = getattr(output, name), getattr(fast, name)
        assert got is expected is None or torch.allclose(got, expected, rtol=1e-5, atol=1e-6), name
    fast.loss.backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []
    model.save_pretrained(tmp_path)
    loaded, info = RetroMAEForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    loaded_output = loaded.eval()(**batch)
    torch.testing.assert_close(loaded_output.encoder_logits, output.encoder_logits, rtol=0, atol=0)
    if decoder != "none":
        torch.testing.assert_close(loaded_output.decoder_logits, output.decoder_logits, rtol=0, atol=0)
    head, words = loaded.lm.get_output_embeddings().weight, loaded.encoder.get_input_embeddings().weight
    assert head is words


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_sees_what_its_mask_shows_and_nothing_else(family: str) -> None:
    model = build(family)
    batch = inputs(lengths=(10, 10))
    before = model(**batch).decoder_logits
    changed = 4
    other = dict(batch) | {"decoder_input_ids": batch["decoder_input_ids"].clone()}
    other["decoder_input_ids"][:, changed] = (
        batch["decoder_input_ids"][:, changed] - FIRST_TOKEN + 1
    ) % 50 + FIRST_TOKEN
    moved = (model(**other).decoder_logits - before).abs().amax(-1) > 1e-6
    assert torch.equal(moved, batch["decoder_attention_mask"][:, :, changed].bool())
    # The sentence vector reaches every row through the query, seen or not, and the token at position 0 reaches none.
    other["decoder_input_ids"] = batch["decoder_input_ids"].clone()
    other["decoder_input_ids"][:, 0] = 17
    torch.testing.assert_close(model(**other).decoder_logits, before)


@pytest.mark.parametrize("decoder", ["enhanced", "basic", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(family: str, decoder: str) -> None:
    model = build(family, decoder=decoder)
    pad = 1 if family == "Roberta" else 0
    batch = inputs(decoder, pad=pad)
    fill = {"encoder_labels": -100, "decoder_labels": -100, "encoder_input_ids": pad, "decoder_input_ids": pad}
    wider = {}
    for name, tensor in batch.items():
        both = (0, 5, 0, 5) if tensor.dim() == 3 else (0, 5)
        wider[name] = torch.nn.functional.pad(tensor, both, value=fill.get(name, 0))
    a, b = model(**batch), model(**wider)
    for name in ("loss", "encoder_loss", "sentence_embedding"):
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-5)


def test_roberta_counts_the_decoders_positions_from_behind_the_padding_index() -> None:
    """Rows 2 to L + 1 of its table and no others, in the query stream as in the embeddings."""
    model = build("Roberta")
    assert model.max_length == POSITIONS - 2
    batch = inputs(lengths=(9, 9))
    model(**batch).decoder_loss.backward()
    used = model.encoder.embeddings.position_embeddings.weight.grad.abs().sum(-1) > 0
    assert used.nonzero().flatten().tolist() == list(range(2, 11))


def test_an_encoder_without_position_table_gets_one_for_the_decoder() -> None:
    """In both streams, else a decoder over ModernBERT's embeddings could not tell where a word stands."""
    model = build("ModernBert", {"initializer_range": 0.5})
    assert model.max_length == POSITIONS
    assert model.decoder.position_embeddings.weight.shape == (POSITIONS, 32)
    batch = inputs(lengths=(10, 10))
    batch["decoder_attention_mask"][:] = 1
    before = model(**batch).decoder_logits
    order = torch.tensor([0, 2, 1, *range(3, 10)])
    swapped = batch | {"decoder_input_ids": batch["decoder_input_ids"][:, order]}
    assert (model(**swapped).decoder_logits - before)[:, 5].abs().max() > 1e-3
    assert build("Bert").decoder.position_embeddings is None


def test_one_word_and_no_word_at_all() -> None:
    """A passage of one token is reconstructed from the sentence vector alone; one of special tokens has no loss."""
    model = build(bag_of_words=True)
    one = inputs(lengths=(3, 3))
    output = model(**one, return_logits=False)
    assert output.decoder_loss > 0 and torch.isfinite(output.loss)
    none = inputs(lengths=(2, 2))
    for return_logits in (False, True):
        output = model(**none, return_logits=return_logits)
        assert (output.loss, output.encoder_loss, output.decoder_loss, output.bag_of_words_loss) == (0, 0, 0, 0)
        model.zero_grad()
        output.loss.backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    both = {name: torch.cat([one[name][:1], padded(none[name], one[name])[:1]]) for name in one}
    alone = {name: tensor[:1] for name, tensor in one.items()}
    torch.testing.assert_close(model(**both).loss, model(**alone).loss, rtol=1e-5, atol=1e-5)


def padded(tensor: Tensor, like: Tensor) -> Tensor:
    """Widened to the shape of the other, with what that tensor has as padding."""
    value = -100 if (tensor == -100).any() else 0
    result = torch.full_like(like, value)
    result[tuple(slice(size) for size in tensor.shape)] = tensor
    return result


def test_save_load_in_a_fresh_process_with_remote_code_gives_equal_outputs(tmp_path: Path) -> None:
    """`AutoModel` and `AutoModelForPreTraining` run the files in the folder; our package cannot be imported there."""
    model = build(bag_of_words=True)
    batch = inputs()
    expected = model(**batch)
    model.save_pretrained(tmp_path / "model")
    names = ("loss", "encoder_logits", "decoder_logits", "sentence_embedding")
    torch.save({"batch": batch} | {name: expected[name].detach() for name in names}, tmp_path / "expected.pt")
    code = f"""
import sys; sys.modules["revela_hub"] = None
import torch
from transformers import AutoConfig, AutoModel, AutoModelForPreTraining
saved = torch.load({str(tmp_path / "expected.pt")!r})
for auto in (AutoModel, AutoModelForPreTraining):
    model = auto.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True).eval()
    assert type(model).__name__ == "RetroMAEForPreTraining" and type(model).__module__.startswith("transformers_modules")
    output = model(**saved["batch"])
    for name in {names!r}:
        torch.testing.assert_close(output[name], saved[name], rtol=0, atol=0)
print(AutoConfig.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True).bag_of_words)
"""
    done = subprocess.run(reader(code), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_encoder_is_published_as_a_plain_model(tmp_path: Path, family: str) -> None:
    model = build(family)
    batch = inputs(pad=1 if family == "Roberta" else 0)
    expected = model(**batch).sentence_embedding
    model.encoder.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert type(loaded).__name__ == f"{family}Model"
    states = loaded(input_ids=batch["encoder_input_ids"], attention_mask=batch["encoder_attention_mask"])
    torch.testing.assert_close(states.last_hidden_state[:, 0], expected)


def test_outside_of_pre_training_the_encoder_is_what_it_was() -> None:
    """Also after a forward that failed half-way."""
    lm = masked_lm().eval()
    batch = inputs()
    ids, mask = batch["encoder_input_ids"], batch["encoder_attention_mask"]
    before, logits = lm.bert(ids, mask).last_hidden_state, lm(ids, mask).logits
    model = RetroMAEForPreTraining.from_encoder(lm).eval()
    model(**batch)
    with pytest.raises(IndexError):
        model(**(batch | {"decoder_input_ids": batch["decoder_input_ids"] + VOCABULARY}))
    with pytest.raises(IndexError):
        model(**(batch | {"encoder_input_ids": ids + VOCABULARY}))
    assert torch.equal(model.encoder(ids, mask).last_hidden_state, before)
    assert torch.equal(lm(ids, mask).logits, logits)


def test_from_encoder_keeps_the_weights_and_starts_the_decoder_as_the_encoder_was_started() -> None:
    lm = masked_lm(hidden_size=64, initializer_range=0.3)
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    model = RetroMAEForPreTraining.from_encoder(lm)
    after = model.lm.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    layer = model.decoder.layers[0]
    assert layer.attention.self.query.weight.std().item() == pytest.approx(0.3, rel=0.1)
    assert layer.output.dense.weight.std().item() == pytest.approx(0.3, rel=0.1)
    assert not layer.output.dense.bias.any()
    assert (layer.output.LayerNorm.weight == 1).all()


def test_from_encoder_loads_a_folder_in_the_type_asked_for(tmp_path: Path) -> None:
    masked_lm().save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = RetroMAEForPreTraining.from_encoder(str(tmp_path), dtype=torch.bfloat16, decoder="basic")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.isfinite(model(**inputs("basic")).loss)


def test_the_vocabulary_can_grow(tmp_path: Path) -> None:
    model = build()
    size = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(size + 3)
    model.save_pretrained(tmp_path)
    loaded = RetroMAEForPreTraining.from_pretrained(tmp_path)
    assert loaded.get_input_embeddings().num_embeddings == size + 3
    batch = inputs()
    batch["encoder_input_ids"][0, 1] = size + 2
    assert torch.equal(loaded(**batch).loss, model.eval()(**batch).loss)


def test_weights_without_a_masked_lm_head_get_a_fresh_one_and_a_warning(tmp_path: Path) -> None:
    bert = BertModel(transformers.BertConfig(**FAMILIES["Bert"]), add_pooling_layer=False)
    bert.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"no weights for cls\.predictions\.bias, .*they are initialised at random"):
        model = RetroMAEForPreTraining.from_encoder(str(tmp_path))
    assert torch.equal(model.encoder.embeddings.word_embeddings.weight, bert.embeddings.word_embeddings.weight)
    assert torch.isfinite(model(**inputs()).loss)


def test_the_weights_of_a_sentence_transformers_model_are_enough(minilm_folder: Path) -> None:
    with pytest.warns(UserWarning, match="initialised at random"):
        model = RetroMAEForPreTraining.from_encoder(str(minilm_folder)).eval()
    batch = inputs(lengths=(8, 6))
    plain = AutoModel.from_pretrained(minilm_folder).eval()
    states = plain(input_ids=batch["encoder_input_ids"], attention_mask=batch["encoder_attention_mask"])
    torch.testing.assert_close(
        model(**batch, return_logits=False).sentence_embedding, states.last_hidden_state[:, 0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decoder", ["enhanced", "basic"])
def test_autocast_stays_near_float32_and_finite_where_a_row_sees_nothing(decoder: str, dtype: torch.dtype) -> None:
    model = build(decoder=decoder, bag_of_words=decoder == "enhanced").train()
    batch = inputs(decoder)
    expected = model(**batch).loss
    with torch.autocast("cpu", dtype):
        output = model(**batch)
        # Lowest in the type that the kernel sees: float32's lowest would become -infinity in it, and NaN on some devices.
        bias = additive(torch.tensor([[True, False]]), torch.zeros(1))
    assert bias.to(dtype).isfinite().all() and bias[0, 1] < -1e4
    assert torch.isfinite(output.encoder_logits).all() and torch.isfinite(output.decoder_logits).all()
    assert output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, expected, rtol=0.02, atol=0.02)
    output.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("decoder", ["enhanced", "basic"])
def test_gradient_checkpointing_gives_the_same_gradients(decoder: str) -> None:
    model = build(decoder=decoder).train()
    batch = inputs(decoder)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert model.decoder.layers[0].gradient_checkpointing
        model.zero_grad()
        model(**batch, return_logits=False).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": "deep"}, 'decoder must be "enhanced", "basic" or "none"'),
        ({"decoder_layers": 2}, "decoder_layers must be exactly 1 with enhanced decoding, got 2"),
        ({"decoder": "basic", "decoder_layers": 0}, "decoder_layers must be at least 1"),
        ({"decoder": "basic", "bag_of_words": True}, "bag_of_words needs enhanced decoding"),
        ({"bag_of_words_weight": -1.0}, "bag_of_words_weight must not be negative"),
    ],
)
def test_a_wrong_configuration_raises_a_clear_error(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RetroMAEConfig(**change)


@pytest.mark.parametrize(
    ("name", "index", "message"),
    [
        ("decoder_attention_mask", (slice(None), 0), r"decoder_attention_mask must be \(3, 12, 12\) with enhanced"),
        ("decoder_attention_mask", (slice(1),), r"must be \(3, 12, 12\) with enhanced decoding, got \(1, 12, 12\)"),
        ("decoder_labels", (slice(None), slice(11)), r"decoder_labels must be \(3, 12\)"),
        ("encoder_labels", (slice(2),), r"encoder_labels must be \(3, 12\)"),
        ("encoder_attention_mask", (0,), r"encoder_attention_mask must be \(3, 12\)"),
        ("encoder_input_ids", (0,), r"encoder_input_ids must be \(passages, tokens\), got \(12,\)"),
    ],
)
def test_wrong_shapes_are_rejected(name: str, index: tuple[object, ...], message: str) -> None:
    batch = inputs()
    with pytest.raises(ValueError, match=message):
        build()(**(batch | {name: batch[name][index]}))


def test_missing_inputs_and_too_many_tokens_are_rejected() -> None:
    model = build("Roberta")
    batch = inputs()
    del batch["decoder_labels"]
    with pytest.raises(ValueError, match="decoder_labels is missing: enhanced decoding needs it"):
        model(**batch)
    with pytest.raises(ValueError, match="the passages have 23 tokens, the encoder 22 positions"):
        model(**inputs(lengths=(23,)))
    encoder_only = {name: tensor for name, tensor in inputs().items() if name.startswith("encoder")}
    assert build(decoder="none")(**encoder_only).loss > 0


def test_models_that_do_not_fit_are_rejected() -> None:
    bare = BertModel(transformers.BertConfig(**FAMILIES["Bert"]))
    with pytest.raises(ValueError, match="BertModel has no masked-LM head"):
        RetroMAEForPreTraining.from_encoder(bare)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    electra = transformers.ElectraConfig(**sizes, num_attention_heads=4, embedding_size=16)
    with pytest.raises(ValueError, match="embeddings of 16 dimensions and hidden states of 32"):
        RetroMAEForPreTraining.from_encoder(transformers.AutoModelForMaskedLM.from_config(electra))
    bart = transformers.BartConfig(vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32,
        decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=2)  # fmt: skip
    with pytest.raises(ValueError, match="is not a BERT-like encoder"):
        RetroMAEForPreTraining.from_encoder(transformers.AutoModelForMaskedLM.from_config(bart))
