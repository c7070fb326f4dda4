"""Where training in bf16 pays, and what transformers has to be told before it does."""

import torch
from transformers import TrainingArguments


def bf16_is_fast() -> bool:
    """Whether bf16 autocast gains anything here: a GPU with bf16, or a CPU with bf16 instructions."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)


def settle_precision(arguments: TrainingArguments) -> None:
    """Fills in `bf16` where it was left open. To be called before `TrainingArguments.__post_init__`, which checks it."""
    wanted: bool | None = arguments.bf16
    if wanted is None:
        arguments.bf16 = not arguments.fp16 and bf16_is_fast()
    if not torch.accelerator.is_available():
        arguments.use_cpu = True  # transformers wants it said before it trains in bf16 on a CPU
