"""What transformers has to be told before it trains in bf16."""

import torch
from transformers import TrainingArguments

from revela_hub.precision import bf16_is_fast


def settle_precision(arguments: TrainingArguments) -> None:
    """Fills in `bf16` where it was left open. To be called before `TrainingArguments.__post_init__`, which checks it.

    Raises:
        ValueError: fp16 where there is no GPU, which nothing would train in.
    """
    wanted: bool | None = arguments.bf16
    if wanted is None:
        arguments.bf16 = not arguments.fp16 and bf16_is_fast()
    if arguments.fp16 and not torch.accelerator.is_available():
        raise ValueError("fp16 needs a GPU: leave it out")
    if not torch.accelerator.is_available():
        arguments.use_cpu = True  # transformers wants it said before it trains in bf16 on a CPU
