r"""Print where the CPU time of a command goes: forward passes of the models, backward passes, generation and training steps.

A forward pass within another one, or within generation, is counted with it; output projections (linear layers with more than 30,000
outputs) also have a row of their own.

    python benchmarks/real/step_profile.py --command "train replug --data texts --retriever $MINILM --lm $SMOLLM2 --group_size 4 \
        --max_length 64 --gradient_accumulation_steps 1 --max_steps 2 --probe none"
"""

import argparse
import functools
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import GenerationMixin, PreTrainedModel, Trainer

from revela_hub.cli.main import main

VOCABULARY = 30_000
MODELS = (PreTrainedModel, SentenceTransformer)
seconds: Counter[str] = Counter()
calls: Counter[str] = Counter()
open_parts: list[tuple[nn.Module, str, float]] = []


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the CPU time of a function to `seconds`."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        began = time.process_time()
        try:
            return function(*args, **options)
        finally:
            seconds[name] += time.process_time() - began
            calls[name] += 1

    return call


def part_of(module: nn.Module) -> str | None:
    """Return the row of a module's forward pass, or None if it has none."""
    if isinstance(module, nn.Linear) and module.out_features > VOCABULARY:
        return f"output projection to {module.out_features:,} words"
    outermost = not any(isinstance(other, MODELS) for other, _, _ in open_parts)
    return f"forward pass of {type(module).__name__}" if isinstance(module, MODELS) and outermost else None


def enter(module: nn.Module, _: Any) -> None:
    if name := part_of(module):
        open_parts.append((module, name, time.process_time()))


def leave(module: nn.Module, *_: Any) -> None:
    if open_parts and open_parts[-1][0] is module:
        _, name, began = open_parts.pop()
        seconds[name] += time.process_time() - began
        calls[name] += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", required=True, help="arguments of revela-hub")
    words = shlex.split(parser.parse_args().command)
    torch.set_num_threads(1)
    register_module_forward_pre_hook(enter)
    register_module_forward_hook(leave, always_call=True)
    torch.autograd.backward = timed("backward passes", torch.autograd.backward)
    Trainer.training_step = timed("training steps without the optimizer", Trainer.training_step)  # type: ignore[method-assign]
    GenerationMixin.generate = timed("generation", GenerationMixin.generate)  # type: ignore[method-assign]
    began = time.process_time()
    status = main(words)
    print("\n| part | calls | CPU seconds |\n|---|---|---|")
    for name, value in seconds.most_common():
        print(f"| {name} | {calls[name]} | {value:.1f} |")
    print(f"| the whole command | 1 | {time.process_time() - began:.1f} |")
    sys.exit(status)
