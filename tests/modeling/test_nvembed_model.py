"""NV-Embed as a user of transformers meets it: backbones, masks, padding, checkpoints, precision, errors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import small_models
import torch
import transformers
from torch import Tensor

from revela_hub.modeling.configuration_nvembed import NVEmbedConfig
from revela_hub.modeling.modeling_nvembed import NVEmbedModel, check_pool_mask, exclude_instruction

SLIDING = {"Mistral": {}, "Qwen2": {"use_sliding_window": True, "max_window_layers": 1}, "Gemma3Text": {}}
POOLINGS = ["latent", "mean", "eos", "self_attention"]


def decoder(family: str = "Llama", **settings: object) -> transformers.PreTrainedModel:
    window = SLIDING[family] | {"sliding_window": 3} if family in SLIDING else {}
    return small_models.decoder(family, **(window | settings))


def build(backbone: transformers.PreTrainedModel | None = None, **settings: object) -> NVEmbedModel:
    small = {"num_latents": 5, "num_heads": 2}
    return NVEmbedModel.from_backbone(backbone or decoder(), **(small | settings)).eval()


def texts(rows: int = 4, tokens: int = 12) -> tuple[Tensor, Tensor]:
    """Ids padded on the right, and their mask."""
    ids = torch.randint(2, small_models.VOCABULARY, (rows, tokens))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, tokens - (3 * row) % (tokens - 2) :] = 0
    mask[0] = 1
    return ids * mask, mask


@pytest.mark.parametrize("family", SLIDING)
def test_the_sliding_window_changes_nothing_without_the_causal_mask(family: str) -> None:
    torch.manual_seed(3)
    windowed = build(decoder(family, sliding_window=3))
    torch.manual_seed(3)
    wide = build(decoder(family, sliding_window=60))
    ids, mask = texts()
    with torch.no_grad():
        torch.testing.assert_close(
            windowed(ids, mask).pooler_output, wide(ids, mask).pooler_output, rtol=1e-5, atol=1e-6
        )


def test_a_causal_mask_is_the_decoders_own() -> None:
    backbone = decoder("Mistral").eval()
    ids, mask = texts()
    with torch.no_grad():
        before = backbone.model(input_ids=ids, attention_mask=mask).last_hidden_state
        both = build(backbone, mask="bidirectional", pooling="mean")(ids, mask).last_hidden_state
        # Lifting the mask took Mistral's window away for good; a causal model is built from a decoder that has it.
        again = decoder("Mistral")
        again.load_state_dict(backbone.state_dict())
        causal = build(again, mask="causal", pooling="mean")(ids, mask).last_hidden_state
    kept = mask.bool()
    torch.testing.assert_close(causal[kept], before[kept], rtol=1e-4, atol=1e-5)
    assert (both - before)[kept].abs().max() > 1e-3


def test_exclude_instruction_counts_from_the_first_token_that_is_no_padding() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert exclude_instruction(mask, 2).tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]
    each = exclude_instruction(mask, torch.tensor([0, 1, 4]))
    assert each.tolist() == [[1, 1, 1, 1, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert mask.sum() == 12, "the attention mask itself must stay"


@pytest.mark.parametrize(
    ("pooling", "mask"),
    [("latent", "bidirectional"), ("self_attention", "causal"), ("mean", "bidirectional"), ("eos", "causal")],
)
def test_a_checkpoint_is_the_model_that_was_saved(pooling: str, mask: str, tmp_path: Path) -> None:
    model = build(decoder("Mistral"), pooling=pooling, mask=mask)
    model.save_pretrained(tmp_path)
    again, report = NVEmbedModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert (again.config.pooling, again.config.mask) == (pooling, mask)
    assert not again.config.official_instruction_mask
    ids, attention_mask = texts()
    with torch.no_grad():
        got, want = again(ids, attention_mask), model(ids, attention_mask)
    assert torch.equal(got.pooler_output, want.pooler_output)


def test_a_loaded_decoder_within_a_decoder_is_saved_as_it_is_loaded(tmp_path: Path) -> None:
    """OPT's body is an `OPTModel`, and the decoder in it an `OPTDecoder`."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    lm = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            **sizes, vocab_size=61, num_attention_heads=4, max_position_embeddings=64, pad_token_id=0
        )
    )
    model = build(lm)
    model.save_pretrained(tmp_path)
    again, report = NVEmbedModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    ids, attention_mask = texts()
    assert torch.equal(again(ids, attention_mask).pooler_output, model(ids, attention_mask).pooler_output)


def test_the_backbone_is_loaded_and_the_rest_fresh(tmp_path: Path) -> None:
    lm = decoder("Qwen2")
    lm.save_pretrained(tmp_path)
    torch.manual_seed(1)
    model = NVEmbedModel.from_backbone(str(tmp_path), num_latents=400, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config.dtype == torch.bfloat16
    frequencies = [each for name, each in model.named_buffers() if name.endswith("inv_freq")]
    assert frequencies and {each.dtype for each in frequencies} == {torch.float32}  # as after loading
    for name, weight in lm.model.named_parameters():
        assert torch.equal(model.embedding_model.get_parameter(name), weight.bfloat16()), name
    latents = model.latent_attention_model.latents.float()
    assert latents.shape == (400, 32)
    assert abs(latents.std() - 1) < 0.05  # the official code's randn
    again = NVEmbedModel.from_backbone(str(tmp_path), num_latents=400)
    assert not torch.equal(again.latent_attention_model.latents, model.latent_attention_model.latents.float())


@pytest.mark.parametrize("pooling", ["latent", "self_attention"])
def test_gradient_checkpointing_gives_the_same_gradients(pooling: str) -> None:
    model = build(pooling=pooling).train()
    ids, mask = texts()
    grads = []
    for _ in range(2):
        model.zero_grad()
        model(ids, mask).pooler_output[:, :3].sum().backward()
        grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        model.gradient_checkpointing_enable()
    assert model.embedding_model.is_gradient_checkpointing
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-7, msg=name)
        assert grad.abs().max() > 0, name


@pytest.mark.parametrize("pooling", ["latent", "mean", "eos"])
def test_a_row_without_a_token_to_pool_is_an_error_where_batches_are_made_and_nan_in_forward(pooling: str) -> None:
    model = build(pooling=pooling)
    ids, mask = texts()
    nothing_left = exclude_instruction(mask, torch.tensor([0, 1, 12, 12]))
    with pytest.raises(ValueError, match="no token to pool"):
        check_pool_mask(nothing_left)
    vectors = model(ids, mask, nothing_left).pooler_output
    assert vectors.isnan().all(-1).tolist() == vectors.isnan().any(-1).tolist() == [False, False, True, True]


def test_a_prompt_that_leaves_no_room_for_text_is_rejected() -> None:
    """All texts would have the same vector."""
    model = build(max_seq_length=12)
    ids = torch.ones(2, 12, dtype=torch.long)
    for limit, longest in ((12, 10), (None, 11)):
        model.config.max_seq_length = limit
        model(ids, prompt_length=longest)
        with pytest.raises(ValueError, match="leaves no room for text"):
            model(ids, prompt_length=longest + 1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: build(pooling="max"),
        lambda: build(mask="none"),
        lambda: NVEmbedConfig(mask_type="x"),
        lambda: build(transformers.BloomModel(transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2))),
    ],
)
def test_what_would_be_another_model_is_rejected(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"pooling|mask|attention interface"):
        wrong()
