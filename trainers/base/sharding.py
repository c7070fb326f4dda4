"""Weights sharded by FSDP2 or ZeRO-3, of which each process holds a part."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from revela_hub.internals import layer_classes

Hollow = tuple[nn.Module, PeftModel | None]


def prepare(model: nn.Module, plugin: Any) -> None:
    """Set the layers that FSDP2 gathers one at a time to those of the transformers models within a model.

    accelerate asks the outermost model only, which suffices for one of transformers. It would gather a sentence-transformers
    model as a whole, and take its module `Normalize` for a final layer norm, which raises an error.
    """
    if not hasattr(model, "base_model_prefix"):
        setattr(model, "base_model_prefix", "none")  # noqa: B010 (mypy) # no such child: accelerate looks for no layer norm
        if plugin.transformer_cls_names_to_wrap is None:
            plugin.transformer_cls_names_to_wrap = layer_classes(model)


def hollow_copy(model: nn.Module, adapters: PeftModel | None) -> Hollow:
    """Return a copy of a model and its adapters without their values, for `filled_copy`; made before they are sharded."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    return deepcopy((model, adapters), memo)


def filled_copy(hollow: Hollow, weights: Mapping[str, Tensor]) -> Hollow:
    """Return a copy of a hollow model and its adapters, in eval mode, with these weights of the model, which are not copied."""
    model, _ = hollow
    memo: dict[int, Any] = {id(p): nn.Parameter(weights[n], p.requires_grad) for n, p in model.named_parameters()}
    copied, adapters = deepcopy(hollow, memo)
    for name, buffer in copied.named_buffers():
        if name in weights:
            buffer.copy_(weights[name])
    return copied.eval(), adapters


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 gathered for the last forward pass, so that all of them are sharded again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds only a part of the weights (FSDP, ZeRO-3)."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())
