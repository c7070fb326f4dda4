"""Load pre-trained models, and check that they have all weights and an attention that the methods can change.

The methods change a backbone's attention through transformers' attention interface. A family that does not use the interface
would train without an error, but as a different model. A model that is built from a backbone therefore runs it once on a few
tokens (`check_mask`), and layers that do not pass on the arguments of the method are an error of the forward pass.
Published models are not checked again when they are loaded.

Shapes: N rows, L tokens, D hidden size.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import ModelOutput, logging

CACHE = "cache" if hasattr(ModelOutput, "past_key_values") else "past_key_values"
"""Name of the cache in a model's output: transformers 5.24 renamed it, and keeps the old name as a property."""
DECODER_ADVICE = "choose another decoder (Llama, Qwen, Mistral, Gemma, ...)"


class ComposedModel(PreTrainedModel):
    """Base class of models made of others, which are initialised or loaded by their own classes and choose their attention."""

    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_set_attn_implementation = classmethod(lambda cls: True)

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing."""


def load_backbone(auto: Any, name: str, *, new_head: bool = False, **options: Any) -> PreTrainedModel:
    """Load a pre-trained model with an auto class; raise a ValueError instead of initialising missing weights at random.

    A pooler may be missing, because its output is not used. With `new_head`, the head's weights are initialised with a warning.
    """
    options = {option: value for option, value in options.items() if value is not None}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # weights that are missing on purpose would be listed, and called corrupted
    try:
        loaded = auto.from_pretrained(name, output_loading_info=True, **options)
    finally:
        logging.set_verbosity(verbosity)
    model: PreTrainedModel = loaded[0]
    missing = sorted(key for key in loaded[1]["missing_keys"] if "pooler" not in key.split("."))
    needed = [key for key in missing if not new_head or key.startswith(f"{model.base_model_prefix}.")]
    if needed:
        more = f" and {len(needed) - 1} more" if len(needed) > 1 else ""
        raise ValueError(
            f"{name} has no weights for {needed[0]}{more}, which would be initialised at random: choose a checkpoint that"
            f" was saved as {type(model).__name__}"
        )
    if missing:
        warnings.warn(f"{name} has no weights for {', '.join(missing)}: they are initialised at random", stacklevel=3)
    return model


def cache_argument(model: PreTrainedModel, cache: Cache | None) -> dict[str, Cache | None]:
    """Return the argument that passes a cache to a model: `cache` since transformers 5.24, `past_key_values` before."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def cache_of(output: ModelOutput) -> Cache | None:
    """Return the cache in a model's output."""
    cache: Cache | None = output.get(CACHE)
    return cache


def body(lm: PreTrainedModel) -> PreTrainedModel:
    """Return a language model without its output projection, or the model itself if it has none."""
    # `get_decoder` may return a projection that is called `decoder` (ModernBERT's decoder), and `base_model` may use the
    # prefix of another class (Llama 4).
    candidates: list[Any] = [lm.get_decoder(), lm.base_model, *lm.children()]
    return next((found for found in candidates if isinstance(found, PreTrainedModel) and found is not lm), lm)


def check_interface(model: PreTrainedModel, purpose: str) -> None:
    """Raise a ValueError if the model's attention does not use transformers' attention interface, which the purpose needs."""
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} does not use transformers' attention interface, which {purpose} needs; {DECODER_ADVICE}"
        )


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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode inside the context, and restore the mode of each of its modules afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def use_attention(model: PreTrainedModel, prefix: str) -> None:
    """Set a model to the attention function `<prefix>_eager` or `<prefix>_sdpa`, depending on its current one."""
    implementation = model.config._attn_implementation
    if not implementation.startswith(f"{prefix}_"):
        # Gemma 2 caps its attention logits, which SDPA kernels do not support.
        capped = getattr(model.config, "attn_logit_softcapping", None) is not None
        eager = capped or implementation.endswith("eager")  # of another method, too
        model.set_attn_implementation(f"{prefix}_eager" if eager else f"{prefix}_sdpa")


def eager_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return a family's eager attention, which is not in the interface: each modeling file defines its own."""
    family = vars(sys.modules[type(module).__module__])
    function: Callable[..., tuple[Tensor, Tensor | None]] = family["eager_attention_forward"]
    return function


def some_tokens(model: PreTrainedModel, rows: int, length: int) -> Tensor:
    """Return (N, L) token ids of the model's vocabulary, on its device."""
    table: Any = model.get_input_embeddings()
    ids = 5 * torch.arange(3, 3 + rows * length, device=model.device) % int(table.num_embeddings)
    return ids.view(rows, length)


def can_run(model: PreTrainedModel) -> bool:
    """Return whether all weights have values in this process: none on the meta device or in a shard elsewhere."""
    return all(weight.numel() and not weight.is_meta for weight in model.parameters())


def tolerance(states: Tensor) -> float:
    """Return an upper bound of differences due to rounding; attending to another token makes a larger difference."""
    return float(states.abs().max()) * float(torch.finfo(states.dtype).eps ** 0.5)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to attention scores: 0 where visible, else the lowest finite number.

    The number is finite so that a row that sees nothing gets the mean of the values instead of NaN.
    """
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)


@torch.no_grad()
def check_mask(model: PreTrainedModel, *, causal: bool) -> None:
    """Run a model on a few tokens, unless its weights are elsewhere; raise a ValueError if a layer's attention has another mask.

    In a causal model, no token may attend to later ones; otherwise, every layer must attend to all tokens.
    """
    if not can_run(model):
        return
    before, name = model.config._attn_implementation, type(model).__name__
    base = "eager" if before.endswith("eager") else "sdpa"
    reads_later: list[bool] = []

    def recording(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        attend = eager_attention(module) if base == "eager" else sdpa_attention_forward
        changed = value.clone()
        changed[:, :, -2:] += 1  # two tokens, because the last may be padding
        result, other = (attend(module, query, key, v, attention_mask, **kwargs) for v in (value, changed))
        reads_later.append(not torch.equal(result[0][:, 0], other[0][:, 0]))
        return result

    AttentionInterface.register("recorded", recording)
    AttentionMaskInterface.register("recorded", AttentionMaskInterface()[base])
    ids_2L = some_tokens(model, 1, 4).repeat(2, 1)
    ids_2L[1, -2] = ids_2L[1, 1]  # two rows that differ in one token
    padded = torch.ones_like(ids_2L)
    padded[:, -1] = 0
    model.set_attn_implementation("recorded")
    try:
        with evaluating(model):
            # transformers builds masks differently with and without padding; causal models also run without a mask.
            runs = [
                model(input_ids=ids_2L, attention_mask=mask, use_cache=False)[0][:, :-2]
                for mask in (None if causal else torch.ones_like(ids_2L), padded)
            ]
    finally:
        model.set_attn_implementation(before)
    if not reads_later:
        raise ValueError(f"{name}: its layers do not call transformers' attention interface; {DECODER_ADVICE}")
    changes = any(float((first - other).abs().max()) > tolerance(first) for first, other in runs)
    if causal and (changes or any(reads_later)):
        raise ValueError(f"{name} is not a causal decoder: its tokens attend to later ones; {DECODER_ADVICE}")
    if not causal and not all(reads_later):
        raise ValueError(f"the attention of {name} stays causal in some layer; {DECODER_ADVICE}")
