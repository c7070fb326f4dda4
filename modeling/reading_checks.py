"""Checks that a decoder can read passages as ImpRAG needs it; run once, when a model is built from a backbone.

Shapes: L tokens of a prompt, S tokens of a passage.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .backbones import (
    DECODER_ADVICE,
    body,
    cache_argument,
    cache_of,
    check_interface,
    check_mask,
    checking,
    recorded_attention,
    some_tokens,
    tolerance,
    use_attention,
)
from .passage_attention import PassageStates, Reading


def check_backbone(backbone: PreTrainedModel) -> None:
    """Raise a ValueError unless the model is a decoder with a head whose layers use transformers' attention interface."""
    name = type(backbone).__name__
    if backbone.config.is_encoder_decoder or not layers_name(body(backbone)):
        raise ValueError(f"{name} is not a causal decoder; {DECODER_ADVICE}")
    if backbone.get_output_embeddings() is None:
        raise ValueError(f"{name} has no language-model head: load it with AutoModelForCausalLM")
    check_interface(backbone, "reading passages")


def layers_name(decoder: PreTrainedModel) -> str:
    """Return the name of a decoder's list of layers; empty if it has none."""
    layers = decoder.config.get_text_config().num_hidden_layers
    found = (name for name, m in decoder.named_children() if isinstance(m, nn.ModuleList) and len(m) == layers)
    return next(found, "")


@torch.no_grad()
def check_reading(model: Any) -> None:
    """Run an `ImpRAGModel` on a few tokens to check that the attention of layers b to t reads passages, also with a cache.

    Raises:
        ValueError: the backbone is not a causal decoder, or reading does not work with its family.
    """
    backbone, b, t = model.backbone, model.config.b, model.config.t
    layers = model.get_decoder().config.get_text_config().num_hidden_layers
    with checking(backbone, "ImpRAG"):
        check_mask(backbone, causal=True)
        before = backbone.config._attn_implementation
        use_attention(backbone, "imprag")
        passage_1S, prompt_1L = some_tokens(backbone, 1, 5).split([2, 3], dim=-1)
        with recorded_attention(backbone) as calls:
            backbone(prompt_1L, imprag=Reading(), use_cache=False)
            called = [call.layer for call in calls if "imprag" in call.arguments]
            reading = [layer for layer in range(layers) if called.count(layer) == 1]
            if wrong := [layer for layer in range(b, t + 1) if layer not in reading]:
                raise ValueError(
                    f"layer {wrong[0]} (of b={b} to t={t}) does not call attention exactly once, so it cannot read passages"
                    f" (layers that can: {', '.join(map(str, reading)) or 'none'})"
                )
            _check_logits(model, passage_1S, prompt_1L)
            if len(reading) == layers:
                _check_against_text(model, prompt_1L)
            model.embed_queries(prompt_1L)
        backbone.set_attn_implementation(before)


def _check_logits(model: Any, passage_1S: Tensor, prompt_1L: Tensor) -> None:
    """Check that logits depend on the passage, and that generating with a cache gives the same logits."""
    backbone, states = model.backbone, model.passage_states(passage_1S, torch.ones_like(passage_1S).bool())
    whole, alone = (
        backbone(prompt_1L, imprag=Reading(states=read), use_cache=False).logits[:, -1] for read in (states, None)
    )
    start = backbone(prompt_1L[:, :-1], imprag=Reading(states=states), use_cache=True)
    cache = cache_argument(backbone, cache_of(start))
    last = backbone(prompt_1L[:, -1:], imprag=Reading(states=states), use_cache=True, **cache).logits[:, -1]
    if float((whole - last).abs().max()) > tolerance(whole):
        raise ValueError("generating with a cache gives different logits from reading the whole text")
    if torch.equal(whole, alone):
        raise ValueError("its logits do not depend on the passages")


def _check_against_text(model: Any, ids_1L: Tensor) -> None:
    """Check that a passage that all layers read gives the same logits as a text that starts with it."""
    backbone, passage_1S, prompt_1L = model.backbone, ids_1L[:, :1], ids_1L[:, 1:]
    layers = model.layer_states(passage_1S, range(model.get_decoder().config.get_text_config().num_hidden_layers))
    states = PassageStates.of_layers(layers, torch.ones_like(passage_1S).bool(), 0)
    positions_1L = torch.arange(1, ids_1L.shape[1], device=ids_1L.device)[None]
    read = backbone(prompt_1L, position_ids=positions_1L, imprag=Reading(states=states), use_cache=False).logits
    text = backbone(ids_1L, use_cache=False).logits[:, 1:]
    if float((read - text).abs().max()) > tolerance(text):
        raise ValueError("its attention does not depend on queries, keys, values and a mask alone")
