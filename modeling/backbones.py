"""What the methods ask of a pre-trained model before they build on it: all of its weights, and attention that they reach.

The methods change a backbone's attention through transformers' attention interface, and a family that does not pass its
calls on would train without an error, as something else. So a model that is built from a backbone runs it once on a few
tokens, with `recorded_attention` around, and raises a ValueError where a call is missing or has another mask. A published
model is not checked again when it is loaded.

Shapes: N rows, L tokens, D hidden size.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import cached_file, find_adapter_config_file

CHOOSE = "choose another decoder (Llama, Qwen, Mistral, Gemma, ...)"
# Errors that a family that is built in another way than expected may raise inside its forward pass.
_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def load_backbone(auto: Any, name: str, **options: Any) -> PreTrainedModel:
    """Loads a pre-trained model with all of its weights; transformers would draw those that are missing at random.

    Args:
        auto: the auto class, such as `AutoModelForCausalLM`.
        name: Hub id or folder.
        **options: of `from_pretrained`.

    Raises:
        ValueError: weights are missing, such as those of the output projection in a retriever's checkpoint. A pooler may
            be missing, because nothing here reads its output.
    """
    check_adapter(name)
    loaded = auto.from_pretrained(name, output_loading_info=True, use_safetensors=True, **options)
    model: PreTrainedModel = loaded[0]
    check_weights(name, model, loaded[1]["missing_keys"])
    return model


def check_adapter(name: str) -> None:
    """Raises ValueError if transformers would read an adapter from a pickle, for which it has no option.

    Args:
        name: Hub id or folder.
    """
    if find_adapter_config_file(name):
        weights = cached_file(name, "adapter_model.safetensors", _raise_exceptions_for_missing_entries=False)
        if weights is None:
            raise ValueError(
                f"the adapter in {name} has no safetensors weights, and a pickle can run code: save it again"
            )


def check_weights(name: str, model: PreTrainedModel, missing: Iterable[str]) -> None:
    """Raises ValueError if weights are missing, other than a pooler's, whose output nothing here reads.

    Args:
        name: Hub id or folder.
        model: what was loaded from it.
        missing: names of the weights that it has not.
    """
    if first := sorted(key for key in missing if "pooler" not in key.split(".")):
        more = f" and {len(first) - 1} more" if len(first) > 1 else ""
        raise ValueError(
            f"{name} has no weights for {first[0]}{more}, which would start at random: choose a checkpoint that was saved"
            f" as {type(model).__name__}"
        )


def body(lm: PreTrainedModel) -> PreTrainedModel:
    """The part of a language model below its output projection; of a model without one, the model."""
    # A family may call its projection `decoder`, which `get_decoder` then returns (ModernBERT's decoder), or have a prefix
    # for another class than this one (Llama 4).
    candidates: list[Any] = [lm.get_decoder(), lm.base_model, *lm.children()]
    return next((found for found in candidates if isinstance(found, PreTrainedModel) and found is not lm), lm)


def check_interface(model: PreTrainedModel, purpose: str) -> None:
    """Raises ValueError if the model's attention does not go through transformers' attention interface.

    Args:
        model: the backbone.
        purpose: what needs it, for the message.
    """
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} does not use transformers' attention interface, which {purpose} needs; {CHOOSE}"
        )


def can_run(model: PreTrainedModel) -> bool:
    """Whether the weights have values here: not on the meta device, and not in shards of other processes."""
    return all(weight.numel() and not weight.is_meta for weight in model.parameters())


@dataclass(frozen=True)
class AttentionCall:
    """A call of the attention function.

    Attributes:
        layer: index of the layer; None if its module does not know.
        arguments: names of the keyword arguments that arrived.
        reads_later: whether the first token reads one of the last two.
    """

    layer: int | None
    arguments: frozenset[str]
    reads_later: bool


@contextmanager
def recorded_attention(model: PreTrainedModel) -> Iterator[list[AttentionCall]]:
    """Inside, every call of the model's attention function is put into the list; in eval mode.

    The function is the one that is set, or SDPA in place of those that need a GPU or half precision.
    """
    before = model.config._attn_implementation
    known = before == "eager" or before.startswith(("revela_", "imprag_"))
    base = before if known else "sdpa"
    calls: list[AttentionCall] = []

    def recording(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        own = eager_attention(module) if base.endswith("eager") else sdpa_attention_forward
        later = _reads_later(own, module, query, key, value, attention_mask, **kwargs)
        calls.append(AttentionCall(getattr(module, "layer_idx", None), frozenset(kwargs), later))
        function = own if base in ("eager", "sdpa") else AttentionInterface()[base]
        result: tuple[Tensor, Tensor | None] = function(module, query, key, value, attention_mask, **kwargs)
        return result

    AttentionInterface.register(f"{base}_recorded", recording)
    AttentionMaskInterface.register(f"{base}_recorded", AttentionMaskInterface()[base])
    training = [module for module in model.modules() if module.training]
    model.eval()
    model.set_attn_implementation(f"{base}_recorded")
    try:
        yield calls
    finally:
        model.set_attn_implementation(before)
        for module in training:
            module.training = True


def eager_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A family's own eager attention, which is not in the interface: each modeling file has its own."""
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
    changed[:, :, -2:] += 1  # the last may be padding
    with torch.no_grad():
        first, other = (own(module, query, key, v, *args, **kwargs)[0][:, 0] for v in (value, changed))
    return not torch.equal(first, other)


@contextmanager
def checking(model: PreTrainedModel, purpose: str) -> Iterator[None]:
    """Around a trial run: whatever a family fails with becomes a ValueError that names it.

    Args:
        model: the backbone.
        purpose: what it is to be used for.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as error:
        lines = str(error).splitlines() or [""]
        raise ValueError(
            f"{type(model).__name__} cannot be used for {purpose}: {lines[0] or repr(error)}; {CHOOSE}"
        ) from error


def some_tokens(model: PreTrainedModel, rows: int, length: int) -> Tensor:
    """(N, L) token ids of the model's vocabulary, on its device."""
    table: Any = model.get_input_embeddings()
    ids = 5 * torch.arange(3, 3 + rows * length, device=model.device) % int(table.num_embeddings)
    return ids.view(rows, length)


def tolerance(states: Tensor) -> float:
    """The difference that rounding makes at most; what a token reads makes a larger one."""
    return float(states.abs().max()) * float(torch.finfo(states.dtype).eps ** 0.5)


@torch.no_grad()
def check_mask(model: PreTrainedModel, *, causal: bool) -> None:
    """Runs a model on a few tokens to see which tokens its attention reads.

    Args:
        model: with or without its output projection.
        causal: whether no token may read later ones; otherwise every layer that has attention must read all tokens.

    Raises:
        ValueError: some layer's attention has another mask, or cannot be reached.
    """
    ids_2L = some_tokens(model, 1, 4).repeat(2, 1)
    ids_2L[1, -2] = ids_2L[1, 1]  # two rows that differ in one token
    whole = torch.ones_like(ids_2L)
    padded = whole.clone()
    padded[:, -1] = 0
    changes = False
    with recorded_attention(model) as calls:
        # Transformers makes masks in different ways for them; causal models are also called without any.
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
