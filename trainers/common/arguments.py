"""Arguments that every training run has, whatever it trains: those of transformers, and what they do not say."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from peft import LoraConfig
from torch import nn
from transformers import IntervalStrategy, TrainingArguments

from revela_hub.data.own_folder import check_apart
from revela_hub.data.sources.source import Source, parse_sources
from revela_hub.errors import UserError, require
from revela_hub.evaluation.retrieval import METRICS
from revela_hub.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Probability, check_ranges
from revela_hub.trainers.common.early import BY_METRIC, MEASURING, METRIC, check_early
from revela_hub.trainers.common.precision import settle_precision


@dataclass
class RunArguments(TrainingArguments):
    """`TrainingArguments` of our trainers; a method's own arguments are a subclass."""

    bf16: bool | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Train under bf16 autocast; by default where the hardware has bf16."}
    )
    logging_steps: PositiveFloat = field(default=10, metadata={"help": "Log every so many updates."})
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={
            "help": "Hide losses that are not finite. Off: such a run stops; and the filter waits for the device."
        },
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Kept off: the collator reads the columns."})
    overwrite: bool = field(
        default=False, metadata={"help": "Begin anew in an --output_dir that holds a run; its checkpoints are deleted."}
    )
    allow_changes: bool = field(
        default=False,
        metadata={"help": "Resume although settings are others than those the checkpoint was trained with."},
    )
    quiet: bool = field(default=False, metadata={"help": "Print what came out, and nothing on the way."})

    def __post_init__(self) -> None:
        """Resolves what depends on the hardware and on the terminal, and checks the numbers.

        Raises:
            ValueError: for a value out of range.
        """
        check_ranges(self)
        settle_precision(self)
        if self.disable_tqdm is None:
            self.disable_tqdm = self.quiet or not sys.stderr.isatty()  # a bar fills a log
        super().__post_init__()
        check_early(self)

    def say(self, text: object) -> None:
        """Prints a line on the way, once on all processes, unless the run is to be quiet."""
        if self.should_log and not self.quiet:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


@dataclass
class AdapterArguments:
    """What of a model is trained: all its weights, or LoRA adapters. A method says its own rank as the default."""

    lora_rank: NonNegativeInt = field(default=16, metadata={"help": "Rank of the adapters; 0 trains all weights."})
    lora_alpha: PositiveInt | None = field(default=None, metadata={"help": "LoRA alpha; by default equal to the rank."})
    lora_dropout: Probability = field(default=0.0, metadata={"help": "Dropout of the adapters."})

    def lora_config(self, model: nn.Module) -> LoraConfig | None:
        """Adapters on every linear layer but output projections and BERT's unused pooler; None for rank 0."""
        if not self.lora_rank:
            return None
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        layers = list(linear)
        size = self.lora_rank * sum(module.in_features + module.out_features for module in linear.values())
        if 4 * size > (memory := _memory()):
            raise UserError(
                f"adapters of --lora_rank {self.lora_rank} have {size:,} weights, {4 * size / 2**30:,.0f} GiB, and the machine has"
                f" {memory / 2**30:,.0f}: lower it, or train all weights with --lora_rank 0"
            )
        return LoraConfig(
            r=self.lora_rank,
            lora_alpha=self.lora_alpha or self.lora_rank,
            lora_dropout=self.lora_dropout,
            # By name: of "all-linear", PEFT leaves out the output projections of the models that it knows.
            target_modules=[name for name in layers if not {"lm_head", "pooler"} & set(name.split("."))],
        )


def _memory() -> float:
    """Bytes of the machine's memory; no limit where the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")


def check_positions(name: str, positions: int, max_length: int) -> None:
    """Refuses texts that are longer than a model can read.

    Raises:
        UserError: they may be.
    """
    if max_length > positions:
        raise UserError(f"{name} has {positions} positions, fewer than --max_length {max_length}: lower it")


@dataclass
class TextArguments:
    """Raw text to train on, and where what is made of it is kept."""

    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "What to train on, one or more of: folders or files of text or code, glob patterns, JSON lines "
            "(.jsonl, .jsonl.gz), data sets as hf:owner/name[:configuration][:split] (of the Hub, or a folder). In a "
            "YAML file also mappings with a path and more: see revela_hub.data.sources.source."
        },
    )
    text_column: str = field(
        default="text", metadata={"help": "The field of JSON lines, or the column of data sets, that holds the text."}
    )
    exclude: list[str] = field(
        default_factory=list,
        metadata={"help": "Patterns of file and folder names not to read, for example '*.min.js' tests."},
    )
    language: str = field(
        default="en", metadata={"help": "Language of the text (ISO 639-1), by which the ends of sentences are found."}
    )
    max_documents: PositiveInt | None = field(
        default=None, metadata={"help": "Documents to read from each source at most."}
    )
    cache_dir: str | None = field(
        default=None, metadata={"help": "Where what is made of the text is kept. Default: in the cache of datasets."}
    )
    held_out: str | None = field(default=None, init=False)  # a probe's folder: its queries are no text to train on

    def sources(self) -> list[Source]:
        """What `data` names.

        Raises:
            UserError: nothing is named, or something that cannot be read; a number is out of its range.
        """
        try:
            check_ranges(self)
        except ValueError as error:
            raise UserError(str(error)) from error
        kind = getattr(self, "kind", "auto")  # of a command that reads text and code differently
        sources = parse_sources(
            self.data,
            kind=None if kind == "auto" else kind,
            text_column=self.text_column,
            exclude=tuple(self.exclude),
            max_documents=self.max_documents,
            held_out=self.held_out,
        )
        if output := getattr(self, "output_dir", None):  # of a command, which has a run's arguments besides
            check_apart(sources, Path(output))
        return sources


@dataclass
class ProbeArguments:
    """What a run on raw text is measured on: a BEIR folder, or a probe made of the text itself (`run_probe.hold_out_text`).

    To be listed before `TextArguments` and the training arguments among a command's bases.
    """

    eval_corpus: str | None = field(
        default=None, metadata={"help": "BEIR folder to measure retrieval on, before, during and after training."}
    )
    eval_split: str = field(default="test", metadata={"help": "Which of its qrels to use."})
    eval_strategy: Literal["no", "steps", "epoch"] | None = field(
        default=None,
        metadata={"help": "When to measure during training; by default steps where there is --eval_corpus."},
    )
    eval_steps: float | None = field(
        default=None,
        metadata={"help": "Measure every so many updates, or below 1 every such share of the run; by default 0.25."},
    )
    probe: str = field(
        default="auto",
        metadata={
            "help": "What to measure on without --eval_corpus. auto: queries made of the text, which are taken out of what"
            " is trained on; none; or a folder of revela-hub probe."
        },
    )
    probe_queries: PositiveInt = field(default=200, metadata={"help": "Queries of the probe that is made, at most."})
    probe_passages: PositiveInt = field(default=500, metadata={"help": "Passages of it: what a measurement costs."})
    keep_worse: bool = field(
        default=False, metadata={"help": "Export what was trained also where the start was better."}
    )

    def __post_init__(self) -> None:
        """Measures during the run where there is something to measure."""
        if self.eval_strategy is None:
            self.eval_strategy = "steps" if self.eval_corpus or self.probe != "none" else "no"
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = 0.25
        if self.eval_strategy != "no":
            require(*MEASURING)
            self._settle_best()
        super().__post_init__()  # type: ignore[misc] # of the training arguments beside it

    def _settle_best(self) -> None:
        """Has the best checkpoint chosen by what is measured: of the loss, transformers' default, nothing is.

        Raises:
            ValueError: by something else.
        """
        of: Any = self
        if not of.load_best_model_at_end and of.save_strategy != "best" and of.lr_scheduler_type not in BY_METRIC:
            return
        name = METRIC if of.metric_for_best_model is None else of.metric_for_best_model.removeprefix("eval_")
        if name not in METRICS:
            raise ValueError(f"metric_for_best_model {name} is not measured: choose one of {', '.join(METRICS)}")
        of.metric_for_best_model, of.greater_is_better = name, True

    def measure_nothing(self) -> None:
        """Has the Trainer not evaluate: there is nothing to measure on."""
        of: Any = self
        of.eval_strategy, of.load_best_model_at_end = IntervalStrategy.NO, False


@dataclass
class HeldOutArguments(ProbeArguments):
    """What a run on labelled rows is measured on: a BEIR folder, or questions held out of them (`run_probe.hold_out_rows`)."""

    probe: str = field(
        default="auto",
        metadata={
            "help": "What to measure on without --eval_corpus. auto: questions of the mixture, one in ten at most, which are"
            " not trained on; none; or a folder of revela-hub probe, whose queries are not trained on either."
        },
    )
