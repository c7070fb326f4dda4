"""LoRA adapters: added to a model in place, and merged into a copy of it for the export."""

import warnings
from collections import Counter
from copy import copy, deepcopy
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, set_seed

from revela_hub.errors import UserError
from revela_hub.trainers.base.arguments import AdapterArguments, RunArguments

Model = TypeVar("Model", bound=nn.Module)


def refuse_adapters(name: str, model: nn.Module) -> None:
    """Raise a `UserError` for a model that has adapters, below which it is frozen."""
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise UserError(
            f"cannot train {name}: it has adapters already; load it again, or merge them (merge_and_unload)"
        )


def lora_config(args: AdapterArguments, model: nn.Module) -> LoraConfig | None:
    """Return the configuration of adapters on the layers that `linear_layers` lists; None for rank 0."""
    refuse_adapters(type(model).__name__, model)  # they would be trained, but not merged
    if not args.lora_rank:
        return None
    return LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha or args.lora_rank, lora_dropout=args.lora_dropout)


def with_adapters(model: nn.Module, config: PeftConfig | None, args: RunArguments) -> PeftModel | None:
    """Add adapters in place, with a configuration or, without one, from the LoRA options; return None without adapters."""
    if config is None and isinstance(args, AdapterArguments):
        config = lora_config(args, model)
    if config is None:
        return None
    set_seed(args.seed)  # as the Trainer does, but before the adapters are drawn
    return add_adapters(model, config)


def add_adapters(model: nn.Module, config: PeftConfig) -> PeftModel:
    """Add float32 adapters to a model in place and freeze its other weights.

    The model keeps its structure and parameter names, and `save_pretrained` saves it with merged adapters (`saving_merged`). The
    returned wrapper is for saving and merging. A LoRA configuration without `target_modules` applies to the layers that
    `linear_layers` lists. One that adapts tied weights is rejected, because their merged copies would differ.
    """
    refuse_adapters(type(model).__name__, model)
    holders = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    config = copy(config)
    if isinstance(config, LoraConfig) and config.target_modules is None:
        config.target_modules = linear_layers(model)
    # The task would only choose the methods of the wrapper; the configuration of a saved adapter is for inference.
    config.task_type, config.inference_mode = None, False
    with warnings.catch_warnings():  # PEFT reads the old name of is_activation_checkpointing
        warnings.simplefilter("ignore", FutureWarning)
        adapted: Any = get_peft_model(model, config)
    adapted.create_or_update_model_card = lambda folder: None  # it would write an empty one, or change the user's
    layers = [layer for layer in adapted.modules() if isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    if any(holders[id(weight)] > 1 for layer in layers for weight in layer.parameters()):  # type: ignore[union-attr]
        raise UserError("peft_config adapts weights that are tied (token embeddings and output projection)")
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    for own in adapted.peft_config.values():  # a set would be written in a different order in every run
        if isinstance(own.target_modules, set):
            own.target_modules = sorted(own.target_modules)
    saving_merged(model, adapted)
    return adapted  # type: ignore[no-any-return]


def linear_layers(model: nn.Module) -> list[str]:
    """Return the layers that get adapters: all linear layers that are not frozen, without output projections and BERT's pooler.

    They are listed by name because PEFT's "all-linear" skips the output projections of the models it knows.
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.weight.requires_grad
        and not {"lm_head", "pooler"} & set(name.split("."))
    ]


def freeze_pooler(model: nn.Module) -> None:
    """Freeze BERT's pooler, which gets no gradient from the token states; DDP would raise an error."""
    for name, parameter in model.named_parameters():
        if "pooler" in name.split("."):
            parameter.requires_grad_(False)


def saving_merged(model: nn.Module, adapters: PeftModel) -> None:
    """Let `save_pretrained` of a transformers model save a copy with merged adapters, because weights below them have other names.

    Its `push_to_hub` and the methods of a sentence-transformers model around it call `save_pretrained`.
    """
    given: Any = model
    given.save_pretrained = partial(_save_merged, model, adapters)


def _save_merged(model: nn.Module, adapters: PeftModel, *args: Any, **kwargs: Any) -> None:
    merged: Any = merged_copy(model, adapters)
    merged.save_pretrained(*args, **kwargs)


def merged_copy(model: Model, adapters: object = None, dtype: torch.dtype | None = None) -> Model:
    """Return a copy of a model on the CPU and in eval mode, with its adapters merged; the model itself is not changed.

    Weights that are on the CPU already are shared with the model unless an adapter changes them. `adapters` is the return value
    of `add_adapters`; anything else means that the model has none. Weights are cast to `dtype` before the merge, which would round
    an adapter's small changes away in half precision.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().cpu(), requires_grad=False) for p in model.parameters()}
    copied, wrapper = deepcopy((model, adapters if isinstance(adapters, PeftModel) else None), memo)
    for name in ("forward", "_original_forward"):  # accelerate's wrappers, which call the original model
        copied.__dict__.pop(name, None)
    for module in copied.modules():
        module.__dict__.pop("save_pretrained", None)  # of `saving_merged`: there is nothing left to merge
    config: Any = getattr(copied, "config", None)
    if isinstance(config, PreTrainedConfig) and "use_cache" not in {field.name for field in fields(config)}:
        vars(config).pop("use_cache", None)  # set by the Trainer; not a field of this configuration
    if dtype is not None:
        copied.to(dtype)
    if wrapper is not None:
        merge(wrapper)
    return copied.cpu().eval()


def merge(adapters: PeftModel) -> Any:
    """Merge adapters into their model, and return it."""
    parts = [part for part in adapters.modules() if isinstance(part, PreTrainedModel)]
    ties = [getattr(part.config, "tie_word_embeddings", None) for part in parts]
    wrapped: Any = adapters
    merged = wrapped.merge_and_unload(safe_merge=True)  # otherwise the merge would change the weights that copies share
    for part, tie in zip(parts, ties, strict=True):
        if tie is not None:
            part.config.tie_word_embeddings = tie  # PEFT compares the storage of weights, not their values
    return merged
