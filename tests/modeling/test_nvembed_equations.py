"""NV-Embed's forward and all its gradients against the official computation in plain loops and float64."""

from collections.abc import Callable

import pytest
import torch
from nvembed_reference import Sizes, decoder_states, latent_attention, self_attention
from small_models import SMALL, decoder
from torch import Tensor

from revela_hub.modeling.modeling_nvembed import NVEmbedModel, exclude_instruction

VOCABULARY = 29
TEXTS = ([3, 7, 1, 12, 9, 2], [5, 5, 2], [20, 8, 14, 2])
LEFT_OUT = (3, 0, 1)


def build(pooling: str, mask: str, attention: str) -> NVEmbedModel:
    settings = SMALL | {"vocab_size": VOCABULARY, "initializer_range": 0.5, "pad_token_id": None}
    mistral = decoder("Mistral", **settings, sliding_window=None, attn_implementation=attention)
    latent = {"num_latents_value": 5, "num_cross_heads": 2, "hidden_dim": 16, "latent_dim": 16, "cross_dim_head": 12}
    model = NVEmbedModel.from_backbone(mistral.model, pooling=pooling, mask=mask, latent_attention_config=latent)
    return model.double().eval()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.zeros(len(TEXTS), max(map(len, TEXTS)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(TEXTS):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
    return ids, mask, exclude_instruction(mask, torch.tensor(LEFT_OUT))


def mean(states: list[Tensor], left_out: int) -> Tensor:
    vector = sum(states[left_out:]) / (len(states) - left_out)
    return vector / torch.sqrt((vector * vector).sum())


def last(states: list[Tensor], _left_out: int) -> Tensor:
    return states[-1] / torch.sqrt((states[-1] * states[-1]).sum())


REFERENCES: dict[str, tuple[Callable[..., list[Tensor]], Callable[[list[Tensor], int], Tensor]]] = {
    "latent": (latent_attention, mean),
    "self_attention": (self_attention, mean),
    "mean": (lambda weights, sizes, states: states, mean),
    "eos": (lambda weights, sizes, states: states, last),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mask", ["bidirectional", "causal"])
@pytest.mark.parametrize("pooling", REFERENCES)
def test_states_vectors_and_gradients_are_those_of_the_equations(pooling: str, mask: str, attention: str) -> None:
    model = build(pooling, mask, attention)
    sizes = Sizes(heads=4, kv_heads=2, latent_heads=2, causal=mask == "causal")
    ids, attention_mask, pool_mask = batch()
    direction = torch.randn(len(TEXTS), 16, dtype=torch.float64)
    output = model(ids, attention_mask, pool_mask)
    (output.pooler_output * direction).sum().backward()
    got = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    layer, pool = REFERENCES[pooling]
    vectors = []
    for row, (text, left_out) in enumerate(zip(TEXTS, LEFT_OUT, strict=True)):
        states = layer(weights, sizes, decoder_states(weights, sizes, text))
        vectors.append(pool(states, left_out))
        torch.testing.assert_close(
            output.last_hidden_state[row, : len(text)], torch.stack(states), rtol=1e-5, atol=1e-5
        )
    # transformers computes norms and rotary embeddings in float32, hence the tolerances.
    torch.testing.assert_close(output.pooler_output, torch.stack(vectors), rtol=1e-5, atol=1e-6)
    (torch.stack(vectors) * direction).sum().backward()
    for name, weight in weights.items():
        torch.testing.assert_close(got[name], weight.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert weight.grad.abs().max() > 1e-6, f"{name}: the test would pass with a gradient of zero"
