"""Training arguments shared by the methods: those of transformers, and options for adapters, text and evaluation."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from transformers import TrainingArguments

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Source, parse_sources
from revela_hub.data.sources.text_options import TextOptions
from revela_hub.errors import UserError
from revela_hub.loading import bf16_is_fast
from revela_hub.options import option
from revela_hub.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Probability, check_ranges

Rows = TypeVar("Rows")
METRIC = "ndcg_at_10"
"""Metric that selects the best checkpoint."""
WARMUP = "Linear warm-up: number of steps, or a fraction below 1 of all steps."
WEIGHT_DECAY = "Weight decay of AdamW, applied to all weights except biases and norms."


@dataclass
class RunArguments(TrainingArguments):
    """`TrainingArguments` of all trainers; each method has a subclass."""

    option_group = "run"

    bf16: bool | None = option(  # type: ignore[assignment]
        None, "Train under bf16 autocast (default: true if the hardware supports it)."
    )
    logging_steps: PositiveFloat = option(10, "Log every N steps.")
    shuffle_buffer: PositiveInt = option(
        10_000, "Number of rows that are shuffled together when training from a stream; 1 keeps their order."
    )
    overwrite: bool = option(False, "Start over in a non-empty --output_dir, deleting its checkpoints.")
    quiet: bool = option(False, "Print only the final result.")
    plan: bool = option(
        False, "Only print steps, memory, disk and hours; needs no GPU, and of the models only config.json."
    )

    def __post_init__(self) -> None:
        """Set defaults that depend on the hardware and the terminal; raise a `ValueError` for a value out of range."""
        check_ranges(type(self), vars(self))
        if self.max_steps == 0:  # transformers would train --num_train_epochs
            raise ValueError("nothing to train: max_steps is 0")
        self.logging_nan_inf_filter = False  # a run stops at a NaN loss
        self.remove_unused_columns = False  # the collators read all columns
        self.hub_token = None  # nothing is uploaded, and checkpoints contain the arguments
        if self.bf16 is None:
            self.bf16 = not self.fp16 and bf16_is_fast()
        if not torch.accelerator.is_available():
            self.use_cpu = True  # required by transformers for bf16 on a CPU
        if self.disable_tqdm is None:
            self.disable_tqdm = self.quiet or not sys.stderr.isatty()  # progress bars would fill log files
        super().__post_init__()
        checkpointing: Any = self.gradient_checkpointing_kwargs or {}  # JSON has been parsed above
        if self.save_on_each_node:
            raise ValueError("all nodes write to the same output_dir: remove save_on_each_node")
        if checkpointing.get("use_reentrant"):
            raise ValueError("reentrant gradient checkpointing would lose a part of the gradient: remove use_reentrant")
        if self.label_smoothing_factor:
            raise ValueError("the methods have their own losses: remove label_smoothing_factor")
        if self.push_to_hub:
            raise ValueError(
                "the Trainer would upload checkpoints: call trainer.push_to_hub() or revela-hub publish after the run"
            )

    def sources(self) -> list[Source]:
        """Return the text that the run reads, for the check that it does not contain the output folder."""
        return []

    def log(self, text: object) -> None:
        """Log a line to standard output, on the main process only and not with `quiet`."""
        if self.should_log and not self.quiet:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


@dataclass
class AdapterArguments:
    """Whether to train all weights or LoRA adapters. Methods have different default ranks."""

    option_group = "LoRA"

    lora_rank: NonNegativeInt = option(16, "Rank of the LoRA adapters; 0 trains all weights.")
    lora_alpha: PositiveInt | None = option(None, "LoRA alpha (default: equal to the rank).")
    lora_dropout: Probability = option(0.0, "Dropout of the LoRA adapters.")


def check_positions(name: str, positions: int | None, max_length: int) -> None:
    """Raise a `UserError` if a model has fewer positions than `max_length`; None means no limit."""
    if positions is not None and max_length > positions:
        raise UserError(f"{name} has {positions} positions, fewer than max_length {max_length}: lower it")


@dataclass
class TextArguments(TextOptions):
    """Raw text to train on, and the cache for data prepared from it."""

    option_group = "data"

    data: list[str] = option(
        [],
        "Text to train on: folders, files, glob patterns, JSON lines, data sets (hf:owner/name[:configuration][:split]), or mappings in a YAML file.",
    )
    language: str = option("en", "ISO 639-1 code of the text's language, used to split sentences.")
    cache_dir: str | None = option(None, "Cache folder for prepared data (default: the cache of datasets).")
    num_proc: PositiveInt = option(1, "Number of processes that prepare large text, in parts of 64 million characters.")

    def sources(self, held_out: str | Path | None = None) -> list[Source]:
        """Return the sources that `data` names.

        `held_out` is the folder of a probe, whose queries are excluded from the text.
        """
        own = self.text_options()
        return parse_sources(self.data, **own, held_out=held_out and str(held_out)) if self.data else []


@dataclass
class StreamedTextArguments(TextArguments):
    """Raw text that may be larger than the disk."""

    option_group = "data"
    streaming: bool = option(
        False, "Prepare the text during training instead of writing it to the cache first; needs --max_steps."
    )

    def sources(self, held_out: str | Path | None = None) -> list[Source]:
        """Return the sources that `data` names; the length of a run on a stream has to be set."""
        if self.streaming and getattr(self, "max_steps", 1) <= 0:  # an option of the training arguments
            raise UserError("--streaming needs --max_steps N: the rows of a stream are not counted before training")
        return super().sources(held_out)


def text_rows(
    arguments: StreamedTextArguments, build: Callable[..., Rows], held_out: str | Path | None = None, **settings: Any
) -> tuple[Rows, ReadReport]:
    """Make rows of the text with `build`, such as `build_passages`, and its settings; return them with a report on the sources."""
    report = ReadReport()
    how = {name: getattr(arguments, name) for name in ("cache_dir", "streaming", "num_proc")} | {"report": report}
    return build(arguments.sources(held_out), **settings, **how), report


@dataclass
class ProbeArguments:
    """Evaluation of a run: a BEIR folder, a probe made from raw text, or queries held out of labelled rows (`run_probe`).

    Must come before `TextArguments` and the training arguments in a command's list of base classes.
    """

    option_group = "evaluation"

    eval_corpus: str | None = option(None, "BEIR folder to evaluate on before, during and after training.")
    eval_split: str = option("test", "Split of the BEIR folder to evaluate on.")
    eval_strategy: Literal["no", "steps", "epoch"] | None = option(
        None, "When to evaluate during training (default: steps if there is something to evaluate on)."
    )
    eval_steps: float | None = option(
        None, "Evaluate every N steps, or every fraction N < 1 of the run (default: 0.25)."
    )
    probe: str = option(
        "auto",
        "Evaluation set if there is no --eval_corpus: a folder of `revela-hub probe`, none, or auto, made from the text or"
        " from up to a tenth of the labelled queries, which are held out of training.",
    )
    probe_queries: PositiveInt = option(200, "Maximum number of queries in the evaluation set that --probe auto makes.")
    probe_passages: PositiveInt = option(500, "Number of passages in the evaluation set that --probe auto makes.")
    export: Literal["best", "last"] | None = option(
        None,
        "Export the best evaluated weights, the base model included, or those of the last step (default: best; last in pre-training"
        " and second stages).",
    )

    def __post_init__(self) -> None:
        """Evaluate during training if there is a task."""
        if self.eval_strategy is None:
            self.eval_strategy = "steps" if self.eval_corpus or self.probe != "none" else "no"
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = 0.25
        self.export = self.export or "best"
        self.load_best_model_at_end = False  # --export selects
        super().__post_init__()  # type: ignore[misc] # of the training arguments
