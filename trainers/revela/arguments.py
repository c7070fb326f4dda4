"""Training and data arguments of Revela.

The defaults are those of the paper (arXiv 2506.16552, section 4), except --similarity_span and, among the options of the
command, --temperature and --v_normalization, whose help texts give the paper's values; the recipes in `examples/revela` use these.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, IterableDataset

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Source
from revela_hub.data.text.groups import (
    GroupSettings,
    StoppingStrategy,
    build_groups,
    groups_needed,
    mix_groups,
    stored_groups,
)
from revela_hub.errors import UserError
from revela_hub.options import option, values_of
from revela_hub.ranges import GroupSize, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed, TextLength
from revela_hub.trainers.base.arguments import (
    WARMUP,
    AdapterArguments,
    RunArguments,
    StreamedTextArguments,
    text_rows,
)
from revela_hub.trainers.base.matryoshka import MatryoshkaArguments
from revela_hub.trainers.revela.collator import SPAN


@dataclass
class RevelaTrainingArguments(MatryoshkaArguments, AdapterArguments, RunArguments):
    """`TrainingArguments` with the paper's learning rate, warm-up, step size and LoRA rank; a row of the data set is a group.

    `per_device_train_batch_size` counts groups: by default, a step has 8 micro-batches of 1 group of 16 chunks.
    """

    learning_rate: float = option(1e-4, "Peak learning rate of the language model.")
    warmup_steps: float = option(100, WARMUP)
    gradient_accumulation_steps: int = option(8, "Number of batches per training step.")
    per_device_train_batch_size: int = option(1, "Number of groups per device and forward pass.")
    total_groups_per_step: PositiveInt | None = option(
        None, "Number of groups per training step on all devices together, instead of --gradient_accumulation_steps."
    )
    retriever_learning_rate: NonNegativeFloat | None = option(
        None, "Peak learning rate of the retriever (default: --learning_rate)."
    )
    retriever_start_step: NonNegativeInt = option(
        0, "Delay retriever training until the LM has warmed up; otherwise similarities can collapse to uniform."
    )
    temperature_start: PositiveFloat | None = option(
        None, "Start at this temperature and change it geometrically to --temperature over the run."
    )
    lora_rank: NonNegativeInt = option(256, "Rank of the LoRA adapters of both models; 0 trains all weights.")
    lm_training: Literal["frozen", "lora", "full"] | None = option(
        None,
        "Keep the language model as it is (frozen), or train it like the retriever: lora with a --lora_rank, full with"
        " --lora_rank 0 (default: like the retriever).",
    )

    def __post_init__(self) -> None:
        """Raise a `ValueError` if the retriever would never be trained, options conflict, or a value is out of range."""
        super().__post_init__()
        if self.total_groups_per_step is not None:
            batch = self.train_batch_size * self.world_size
            if self.total_groups_per_step % batch:
                raise ValueError(
                    f"--total_groups_per_step {self.total_groups_per_step} is not a multiple of the {batch} groups of one forward"
                    f" pass on all devices"
                )
            self.gradient_accumulation_steps = self.total_groups_per_step // batch
        if self.lm_training == "lora" and not self.lora_rank:
            raise ValueError("--lm_training lora needs adapters: set a --lora_rank above 0")
        if self.lm_training == "full" and self.lora_rank:
            raise ValueError(
                f"--lm_training full trains all weights of both models, but --lora_rank is {self.lora_rank}: set it to 0"
            )
        if 0 < self.max_steps <= self.retriever_start_step:
            raise ValueError(
                f"retriever_start_step {self.retriever_start_step} is not below max_steps {self.max_steps}, so the retriever"
                " would never be trained"
            )


@dataclass
class RevelaDataArguments(StreamedTextArguments):
    """Data of a Revela run. Sizes are the paper's by default; its runs on natural language use `similarity_span="first_half"`."""

    option_group = "data"

    kind: Literal["auto", "text", "code"] = option(
        "auto", "How to split chunks: at sentences (text), at lines (code), or by file extension (auto)."
    )
    max_words: PositiveInt = option(120, "Maximum number of words per chunk.")
    group_size: GroupSize = option(
        16, "Number of chunks per group; each chunk is compared with the others of its group."
    )
    run_length: PositiveInt | None = option(
        None, "Build each group from random runs of N consecutive chunks; must divide --group_size (default: one run)."
    )
    max_length: TextLength = option(160, "Maximum number of tokens per chunk, for both models.")
    similarity_span: list[str] = option(
        ["full"],
        "Part of a chunk that is its query: full, or first_half as in the paper for natural language; one value, or one"
        " per source with --weights.",
    )
    group_seed: Seed = option(0, "Random seed for drawing runs and mixing sources.")
    weights: list[PositiveFloat] | None = option(
        None, "Mix the sources in these proportions (default: one source after another)."
    )
    stopping_strategy: StoppingStrategy = option(
        "first_exhausted", "End a mixture when the first source is used up, or when all are (repeating the others)."
    )
    max_groups: PositiveInt | None = option(None, "Maximum number of groups.")
    groups_column: str | None = option(
        None, "Column with lists of texts that are groups already, as in the data of Revela's authors."
    )

    @property
    def spans(self) -> list[str]:
        """The spans of the queries: one for all sources, or one for each; in YAML, one may be written without a list."""
        spans: Any = self.similarity_span
        return [spans] if isinstance(spans, str) else spans


def load_groups(
    arguments: RevelaDataArguments, held_out: str | Path | None = None
) -> tuple[Dataset | IterableDataset, ReadReport]:
    """Read the sources, and cut them into chunks and groups; see `build_groups` for the columns.

    Returns:
        The groups, and a report on the sources.

    Raises:
        UserError: the options conflict, or `build_groups` raises an error.
    """
    sources, report = arguments.sources(held_out), ReadReport()
    _check_spans(arguments, len(sources))
    if arguments.weights is None:
        if arguments.groups_column is not None:
            return _stored(arguments, sources), report
        return text_rows(arguments, build_groups, held_out, settings=_settings(arguments))
    if len(arguments.weights) != len(sources):
        raise UserError(f"--weights has {len(arguments.weights)} values for {len(sources)} sources")
    spans = arguments.spans * (len(sources) if len(arguments.spans) == 1 else 1)
    shares = [weight / sum(arguments.weights) for weight in arguments.weights]
    parts = [_part(arguments, *given, report) for given in zip(sources, shares, spans, strict=True)]
    mixed = mix_groups(
        parts, arguments.weights, seed=arguments.group_seed, stopping_strategy=arguments.stopping_strategy
    )
    if arguments.streaming:
        return mixed if arguments.max_groups is None else mixed.take(arguments.max_groups), report
    if arguments.max_groups is not None:
        mixed = mixed.select(range(min(arguments.max_groups, len(mixed))))
    report.groups = len(mixed)
    return mixed, report


def _check_spans(arguments: RevelaDataArguments, sources: int) -> None:
    spans = arguments.spans
    if bad := set(spans) - {"full", "first_half"}:
        raise UserError(f"--similarity_span is full or first_half, not {', '.join(sorted(bad))}")
    if arguments.weights is None and len(spans) > 1:
        raise UserError("--similarity_span needs --weights for a value per source: a group may have two sources")
    if len(spans) not in (1, sources):
        raise UserError(f"--similarity_span has {len(spans)} values for {sources} sources")


def _part(arguments: RevelaDataArguments, source: Source, share: float, span: str, report: ReadReport) -> Any:
    """Return the groups of one source of a mixture, with their span if the spans differ."""
    if arguments.groups_column is not None:
        part = _stored(arguments, [source])
    else:
        kept: dict[str, Any] = {"cache_dir": arguments.cache_dir, "streaming": arguments.streaming}
        part = build_groups([source], _settings(arguments, share), report=report, **kept)
    return part if len(arguments.spans) == 1 else part.map(partial(_with_span, span))


def _stored(arguments: RevelaDataArguments, sources: list[Source]) -> Any:
    """Return the groups that the sources hold, at most `max_groups`."""
    how: dict[str, Any] = {"cache_dir": arguments.cache_dir, "streaming": arguments.streaming}
    groups: Any = stored_groups(sources, str(arguments.groups_column), arguments.group_size, **how)
    return groups if arguments.max_groups is None else groups.take(arguments.max_groups)


def _with_span(span: str, row: dict[str, Any]) -> dict[str, Any]:
    return {SPAN: span}


def _settings(arguments: RevelaDataArguments, share: float = 1.0) -> GroupSettings:
    limit = arguments.max_groups
    groups = limit if limit is None or share == 1.0 else groups_needed(share, limit)
    return GroupSettings(**values_of(GroupSettings, arguments) | {"max_groups": groups, "seed": arguments.group_seed})
