"""Load pre-trained models, and check that they have all weights and an attention that the methods can change.

The methods change a backbone's attention through transformers' attention interface. A family that does not use the interface
in every layer would train without an error, but as a different model. A model that is built from a backbone therefore runs it
once on a few tokens (`check_mask`), and raises a ValueError if a mask is wrong; layers that do not call the attention of the method
are an error of the forward pass. Published models are not checked again when they are loaded.

Shapes: N rows, L tokens, D hidden size.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import ModelOutput, cached_file, find_adapter_config_file

CACHE = "cache" if hasattr(ModelOutput, "past_key_values") else "past_key_values"
"""Name of the cache in a model's output: transformers 5.24 renamed it, and keeps the old name as a property."""
DECODER_ADVICE = "choose another decoder (Llama, Qwen, Mistral, Gemma, ...)"
# Errors that families with an unexpected structure may raise in their forward pass.
_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def load_backbone(auto: Any, name: str, **options: Any) -> PreTrainedModel:
    """Load a pre-trained model, and raise an error instead of initialising missing weights at random.

    Args:
        auto: auto class, such as `AutoModelForCausalLM`.
        name: Hub id or folder.
        **options: arguments of `from_pretrained`; those that are None are left out.

    Raises:
        ValueError: weights are missing, such as those of the output projection in a retriever's checkpoint. A pooler may be
            missing, because its output is not used.
    """
    check_adapter(name)
    options = {option: value for option, value in options.items() if value is not None}
    loaded = auto.from_pretrained(name, output_loading_info=True, use_safetensors=True, **options)
    model: PreTrainedModel = loaded[0]
    check_weights(name, model, loaded[1]["missing_keys"])
    return model


def check_adapter(name: str) -> None:
    """Raise a ValueError if transformers would load an adapter from a pickle, which it has no option to forbid.

    Args:
        name: Hub id or folder.
    """
    if find_adapter_config_file(name):
        weights = cached_file(name, "adapter_model.safetensors", _raise_exceptions_for_missing_entries=False)
        if weights is None:
            raise ValueError(
                f"the adapter in {name} has no safetensors weights, and loading a pickle can run code: save it again as"
                " safetensors"
            )


def check_weights(name: str, model: PreTrainedModel, missing: Iterable[str]) -> None:
    """Raise a ValueError if weights are missing, except those of a pooler, whose output is not used.

    Args:
        name: Hub id or folder.
        model: the model loaded from it.
        missing: names of the missing weights.
    """
    if first := sorted(key for key in missing if "pooler" not in key.split(".")):
        more = f" and {len(first) - 1} more" if len(first) > 1 else ""
        raise ValueError(
            f"{name} has no weights for {first[0]}{more}, which would be initialised at random: choose a checkpoint that was"
            f" saved as {type(model).__name__}"
        )


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
    """Raise a ValueError if the model's attention does not use transformers' attention interface.

    Args:
        model: the backbone.
        purpose: the feature that needs it, for the message.
    """
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


def can_run(model: PreTrainedModel) -> bool:
    """Return whether all weights have values in this process: none on the meta device or in a shard elsewhere."""
    return all(weight.numel() and not weight.is_meta for weight in model.parameters())


@dataclass(frozen=True)
class AttentionCall:
    """A call of the attention function.

    Attributes:
        layer: index of the layer; None if its module has no `layer_idx`.
        reads_later: whether the first token attends to one of the last two.
    """

    layer: int | None
    reads_later: bool


@contextmanager
def recorded_attention(model: PreTrainedModel) -> Iterator[list[AttentionCall]]:
    """Record every call of the model's attention function inside the context, with the model in eval mode.

    The function is the current one, or SDPA if the current one needs a GPU or half precision.
    """
    before = model.config._attn_implementation
    known = before == "eager" or before.endswith(("_eager", "_sdpa"))  # of a family, or of `use_attention`
    base = before if known else "sdpa"
    calls: list[AttentionCall] = []

    def recording(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        own = eager_attention(module) if base.endswith("eager") else sdpa_attention_forward
        later = _reads_later(own, module, query, key, value, attention_mask, **kwargs)
        calls.append(AttentionCall(getattr(module, "layer_idx", None), later))
        function = own if base in ("eager", "sdpa") else AttentionInterface()[base]
        result: tuple[Tensor, Tensor | None] = function(module, query, key, value, attention_mask, **kwargs)
        return result

    AttentionInterface.register(f"{base}_recorded", recording)
    AttentionMaskInterface.register(f"{base}_recorded", AttentionMaskInterface()[base])
    model.set_attn_implementation(f"{base}_recorded")
    try:
        with evaluating(model):
            yield calls
    finally:
        model.set_attn_implementation(before)


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
    function: Callable[..., tuple[Tensor, Tensor | None]] = vars(sys.modules[type(module).__module__])[
        "eager_attention_forward"
    ]
    return function


def _reads_later(
    own: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> bool:
    if query.shape[2] < 2 or query.shape[2] != key.shape[2]:  # a step with a cache
        return False
    changed = value.clone()
    changed[:, :, -2:] += 1  # two tokens, because the last may be padding
    with torch.no_grad():
        first, other = (own(module, query, key, v, *args, **kwargs)[0][:, 0] for v in (value, changed))
    return not torch.equal(first, other)


@contextmanager
def checking(model: PreTrainedModel, purpose: str, advice: str = DECODER_ADVICE) -> Iterator[None]:
    """Turn any error of a trial run inside the context into a ValueError that names the model's class.

    Args:
        model: the backbone.
        purpose: the method it is checked for.
        advice: the end of the message.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as error:
        lines = str(error).splitlines() or [""]
        raise ValueError(
            f"{type(model).__name__} cannot be used for {purpose}: {lines[0] or repr(error)}; {advice}"
        ) from error


def some_tokens(model: PreTrainedModel, rows: int, length: int) -> Tensor:
    """Return (N, L) token ids of the model's vocabulary, on its device."""
    table: Any = model.get_input_embeddings()
    ids = 5 * torch.arange(3, 3 + rows * length, device=model.device) % int(table.num_embeddings)
    return ids.view(rows, length)


def tolerance(states: Tensor) -> float:
    """Return an upper bound of differences due to rounding; attending to another token makes a larger difference."""
    return float(states.abs().max()) * float(torch.finfo(states.dtype).eps ** 0.5)


@torch.no_grad()
def check_mask(model: PreTrainedModel, *, causal: bool) -> None:
    """Run a model on a few tokens to check which tokens its attention reads.

    Args:
        model: the model, with or without its output projection.
        causal: whether no token may attend to later ones; otherwise every attention layer must attend to all tokens.

    Raises:
        ValueError: the attention of some layer has the wrong mask, or does not use the attention interface.
    """
    ids_2L = some_tokens(model, 1, 4).repeat(2, 1)
    ids_2L[1, -2] = ids_2L[1, 1]  # two rows that differ in one token
    whole = torch.ones_like(ids_2L)
    padded = whole.clone()
    padded[:, -1] = 0
    changes = False
    with recorded_attention(model) as calls:
        # transformers builds masks differently with and without padding; causal models also run without a mask.
        for mask in (None if causal else whole, padded):
            states_2LD = model(input_ids=ids_2L, attention_mask=mask, use_cache=False)[0]
            first, other = states_2LD[:, :-2]
            changes |= float((first - other).abs().max()) > tolerance(first)
    if causal:
        if changes or any(call.reads_later for call in calls):
            raise ValueError("it is not a causal decoder: its tokens attend to later ones")
    elif not all(call.reads_later for call in calls):
        layers = ", ".join(sorted({str(call.layer) for call in calls if not call.reads_later}))
        raise ValueError(f"its attention stays causal in layer {layers}")
    if not calls:
        raise ValueError("its layers do not call transformers' attention interface")
