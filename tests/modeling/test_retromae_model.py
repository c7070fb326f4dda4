"""RetroMAE as a user of transformers meets it: families of encoders, masks, checkpoints, precision, errors."""

from pathlib import Path

import pytest
import torch
import transformers
from small_models import ENCODERS, POSITIONS, VOCABULARY, masked_lm
from torch import Tensor
from transformers import AutoModel, BertModel

from revela_hub.modeling.configuration_retromae import RetroMAEConfig
from revela_hub.modeling.masked_lm import attention_bias
from revela_hub.modeling.modeling_retromae import RetroMAEForPreTraining

FIRST_TOKEN = 5  # below are the special ones of all families


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


CASES = [
    ("Bert", "enhanced"),
    ("Bert", "basic"),
    ("Bert", "none"),
    ("Roberta", "enhanced"),
    ("DistilBert", "basic"),
    ("ModernBert", "enhanced"),
]


@pytest.mark.parametrize(("family", "decoder"), CASES)
def test_every_weight_is_trained_and_saved_and_padding_changes_nothing(
    tmp_path: Path, family: str, decoder: str
) -> None:
    model = build(family, decoder=decoder, decoder_layers=2 if decoder == "basic" else 1)
    pad = 1 if family == "Roberta" else 0
    batch = inputs(decoder, pad=pad)
    output = model(**batch)
    output.loss.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    fill = {"encoder_labels": -100, "decoder_labels": -100, "encoder_input_ids": pad, "decoder_input_ids": pad}
    wider = {
        name: torch.nn.functional.pad(tensor, (0, 5) * (tensor.dim() - 1), value=fill.get(name, 0))
        for name, tensor in batch.items()
    }
    padded = model(**wider)
    for name in ("loss", "encoder_loss", "sentence_embedding"):
        torch.testing.assert_close(padded[name], output[name], rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded, info = RetroMAEForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(loaded.eval()(**batch).loss, output.loss)
    assert loaded.lm.get_output_embeddings().weight is loaded.encoder.get_input_embeddings().weight


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_a_row_sees_what_its_mask_shows_and_nothing_else(family: str) -> None:
    model = build(family)
    batch = inputs(lengths=(10, 10))
    sentence, ids, mask = torch.randn(2, 32), batch["decoder_input_ids"], batch["decoder_attention_mask"]
    before, other = model._decode(sentence, ids, mask), ids.clone()
    other[:, 4] = (ids[:, 4] - FIRST_TOKEN + 1) % 50 + FIRST_TOKEN
    moved = (model._decode(sentence, other, mask) - before).abs().amax(-1) > 1e-6
    assert torch.equal(moved, mask[:, :, 4].bool())
    # The sentence vector reaches every row through the query, seen or not, and the token at position 0 reaches none.
    other = ids.clone()
    other[:, 0] = 17
    torch.testing.assert_close(model._decode(sentence, other, mask), before)


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
    assert model.decoder.position_embeddings.weight.shape == (model.max_length, 32) == (POSITIONS, 32)
    ids, sentence, mask = inputs(lengths=(10, 10))["decoder_input_ids"], torch.randn(2, 32), torch.ones(2, 10, 10)
    swapped = ids[:, torch.tensor([0, 2, 1, *range(3, 10)])]
    difference = model._decode(sentence, ids, mask) - model._decode(sentence, swapped, mask)
    assert difference[:, 5].abs().max() > 1e-3
    assert build("Bert").decoder.position_embeddings is None


def test_one_word_and_no_word_at_all() -> None:
    """A passage of one token is reconstructed from the sentence vector alone; one of special tokens has no loss."""
    model = build()
    output = model(**inputs(lengths=(3, 3)))
    assert output.decoder_loss > 0 and torch.isfinite(output.loss)
    output = model(**inputs(lengths=(2, 2)))
    assert (output.loss, output.encoder_loss, output.decoder_loss) == (0, 0, 0)
    output.loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_outside_of_pre_training_the_encoder_is_what_it_was(tmp_path: Path) -> None:
    """Also after a forward that failed half-way; it is published as a plain model."""
    lm = masked_lm().eval()
    batch = inputs()
    ids, mask = batch["encoder_input_ids"], batch["encoder_attention_mask"]
    before, logits = lm.bert(ids, mask).last_hidden_state, lm(ids, mask).logits
    model = RetroMAEForPreTraining.from_encoder(lm).eval()
    model(**batch)
    with pytest.raises(IndexError):
        model(**(batch | {"decoder_input_ids": batch["decoder_input_ids"] + VOCABULARY}))
    assert torch.equal(model.encoder(ids, mask).last_hidden_state, before)
    assert torch.equal(lm(ids, mask).logits, logits)
    model.encoder.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    assert torch.equal(AutoModel.from_pretrained(tmp_path).eval()(ids, mask).last_hidden_state, before)


def test_the_weights_of_a_sentence_transformers_model_are_enough(minilm_folder: Path) -> None:
    with pytest.warns(UserWarning, match="initialised at random"):
        model = RetroMAEForPreTraining.from_encoder(str(minilm_folder)).eval()
    batch = inputs(lengths=(8, 6))
    plain = AutoModel.from_pretrained(minilm_folder).eval()
    states = plain(input_ids=batch["encoder_input_ids"], attention_mask=batch["encoder_attention_mask"])
    torch.testing.assert_close(model(**batch).sentence_embedding, states.last_hidden_state[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decoder", ["enhanced", "basic"])
def test_autocast_stays_near_float32_and_finite_where_a_row_sees_nothing(decoder: str, dtype: torch.dtype) -> None:
    model = build(decoder=decoder).train()
    batch = inputs(decoder)
    expected = model(**batch).loss
    with torch.autocast("cpu", dtype):
        output = model(**batch)
        # Lowest in the type that the kernel sees: float32's lowest would become -infinity in it, and NaN on some devices.
        bias = attention_bias(torch.tensor([[True, False]]), torch.zeros(1))
    assert bias.to(dtype).isfinite().all() and bias[0, 1] < -1e4
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
        model(**batch).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("change", [{"decoder": "deep"}, {"decoder_layers": 2}], ids=str)
def test_a_configuration_that_would_train_something_else_is_rejected(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(reversed(change))):
        RetroMAEConfig(**change)


def test_models_that_do_not_fit_are_rejected() -> None:
    bare = BertModel(transformers.BertConfig(**ENCODERS["Bert"]))
    with pytest.raises(ValueError, match="BertModel has no masked-LM head"):
        RetroMAEForPreTraining.from_encoder(bare)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    electra = transformers.ElectraConfig(**sizes, num_attention_heads=4, embedding_size=16)
    with pytest.raises(ValueError, match="embeddings of 16 dimensions and hidden states of 32"):
        RetroMAEForPreTraining.from_encoder(transformers.AutoModelForMaskedLM.from_config(electra))
    causal = masked_lm(is_decoder=True)
    with pytest.raises(ValueError, match="does not attend to the last"):
        RetroMAEForPreTraining.from_encoder(causal)
