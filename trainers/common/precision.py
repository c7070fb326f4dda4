"""Choose the training precision."""

import torch
from transformers import TrainingArguments

from revela_hub.precision import bf16_is_fast


def settle_precision(arguments: TrainingArguments) -> None:
    """Set `bf16` if it was left open. Must run before `TrainingArguments.__post_init__`, which checks it.

    Raises:
        ValueError: fp16 is set without a GPU.
    """
    wanted: bool | None = arguments.bf16
    if wanted is None:
        arguments.bf16 = not arguments.fp16 and bf16_is_fast()
    if arguments.fp16 and not torch.accelerator.is_available():
        raise ValueError("fp16 needs a GPU: remove the option")
    if not torch.accelerator.is_available():
        arguments.use_cpu = True  # required by transformers for bf16 on a CPU
