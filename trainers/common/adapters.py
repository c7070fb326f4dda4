"""Adapters on a model, in place, for any trainer."""

from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn

from revela_hub.errors import UserError


def add_adapters(model: nn.Module, config: PeftConfig) -> PeftModel:
    """Puts adapters into the model, whose other weights are frozen; the adapters are float32 also beside frozen bf16.

    The model's own structure and names stay: what is returned wraps it, for saving and merging. LoRA without
    `target_modules` goes on every linear layer but output projections and BERT's unused pooler.
    """
    given: Any = model
    if isinstance(config, LoraConfig) and config.target_modules is None:
        config = replace(config, target_modules=linear_layers(model))
    try:
        adapted: Any = get_peft_model(given, config)
    except (RuntimeError, MemoryError) as error:
        if "alloc" not in str(error).lower() and "memory" not in str(error).lower() and str(error):
            raise
        rank = getattr(config, "r", "")
        raise UserError(f"adapters of rank {rank} do not fit into memory: lower --lora_rank") from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    for own in adapted.peft_config.values():  # peft keeps a set, and writes it in an order that changes from run to run
        if isinstance(own.target_modules, set):
            own.target_modules = sorted(own.target_modules)
    wrapped: PeftModel = adapted
    return wrapped


def linear_layers(model: nn.Module) -> list[str]:
    """The names of the layers that adapters go on.

    By name: of "all-linear", PEFT leaves out the output projections of the models that it knows.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in linear if not {"lm_head", "pooler"} & set(name.split("."))]
