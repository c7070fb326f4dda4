"""RetroMAE's losses, sentence vector and all gradients against the paper's equations in plain loops and float64."""

import pytest
import torch
from retromae_reference import IGNORED, Reference, ReferenceRetroMAE, reference_visibility
from small_models import SMALL, masked_lm
from torch import Tensor

from revela_hub.modeling.modeling_retromae import RetroMAEForPreTraining, RetroMAEOutput

VOCABULARY, CLS, SEP, MASK = 31, 2, 3, 4
# The tokens of each word, [CLS] and [SEP] around them; the last two passages have one word, and none.
PASSAGES = ([1, 2, 1, 1], [2, 3], [1], [])


def build(**config: object) -> RetroMAEForPreTraining:
    bert = masked_lm(**SMALL, vocab_size=VOCABULARY, max_position_embeddings=12, initializer_range=0.4)
    model = RetroMAEForPreTraining.from_encoder(bert, **config)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "LayerNorm" in name:  # zeros and ones would hide what goes wrong with them
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def batch(decoder: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    width = max(sum(words) for words in PASSAGES) + 2
    shape = (len(PASSAGES), width)
    original = torch.zeros(shape, dtype=torch.long)
    mask, visible = torch.zeros(shape, dtype=torch.long), torch.zeros(*shape, width, dtype=torch.long)
    encoder_ids, encoder_labels = original.clone(), torch.full(shape, IGNORED)
    decoder_ids, decoder_labels = original.clone(), torch.full(shape, IGNORED)
    for row, words in enumerate(PASSAGES):
        length = sum(words) + 2
        tokens = torch.randint(5, VOCABULARY, (length - 2,), generator=generator)
        original[row, :length] = torch.cat([torch.tensor([CLS]), tokens, torch.tensor([SEP])])
        mask[row, :length] = 1
        starts = [1 + sum(words[:number]) for number in range(len(words))]
        positions = [list(range(start, start + size)) for start, size in zip(starts, words, strict=True)]
        visible[row] = reference_visibility(positions, length, width, generator)
        encoder_ids[row], decoder_ids[row] = original[row], original[row]
        if words:
            masked = positions[0]
            encoder_ids[row, masked], encoder_labels[row, masked] = MASK, original[row, masked]
            decoder_labels[row, 1 : length - 1] = original[row, 1 : length - 1]
        if decoder == "basic":
            hidden = [i for word in positions[::2] for i in word]
            decoder_labels[row] = IGNORED
            decoder_ids[row, hidden], decoder_labels[row, hidden] = MASK, original[row, hidden]
    return {
        "encoder_input_ids": encoder_ids,
        "encoder_attention_mask": mask,
        "encoder_labels": encoder_labels,
        "decoder_input_ids": decoder_ids,
        "decoder_attention_mask": visible if decoder == "enhanced" else mask,
        "decoder_labels": decoder_labels,
    }


def reference(model: RetroMAEForPreTraining, inputs: dict[str, Tensor]) -> tuple[Reference, dict[str, Tensor]]:
    """The reference's results, and its weights, from which gradients can be taken."""
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    config = model.config
    written_out = ReferenceRetroMAE(weights, heads=4, layers=2, eps=config.encoder.layer_norm_eps)
    return written_out(inputs, decoder=config.decoder, decoder_layers=config.decoder_layers), weights


def compare(output: RetroMAEOutput, expected: Reference, tolerance: float) -> None:
    for name in ("encoder_loss", "decoder_loss", "sentence_embedding"):
        got = output[name].double()
        torch.testing.assert_close(
            got, getattr(expected, name), rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


DECODERS = [("enhanced", 1), ("basic", 1), ("basic", 3)]


@pytest.mark.parametrize(("decoder", "layers"), DECODERS)
def test_losses_and_sentence_vector_are_those_of_the_equations(decoder: str, layers: int) -> None:
    """In float32 to 1e-4, with padding, a passage of one word and one of none; and float64 to rounding."""
    model = build(decoder=decoder, decoder_layers=layers)
    inputs = batch(decoder)
    expected, _ = reference(model, inputs)
    assert expected.decoder_logits.std() > 0.1, "the test must have something to tell apart"
    output = model(**inputs)
    compare(output, expected, 1e-4)
    torch.testing.assert_close(output.loss, output.encoder_loss + output.decoder_loss)
    compare(model.double()(**inputs), expected, 1e-10)


@pytest.mark.parametrize(("decoder", "layers"), DECODERS)
def test_gradients_of_all_weights_are_those_of_the_equations(decoder: str, layers: int) -> None:
    """Of embeddings and head, too, which encoder and decoder share."""
    model = build(decoder=decoder, decoder_layers=layers).double()
    inputs = batch(decoder)
    expected, weights = reference(model, inputs)
    (expected.encoder_loss + expected.decoder_loss).backward()
    model(**inputs).loss.backward()
    assert model.lm.get_output_embeddings().weight is model.encoder.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        wanted = torch.zeros_like(parameter) if weights[name].grad is None else weights[name].grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-8, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
