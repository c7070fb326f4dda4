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
from revela_hub.data.text.groups import GroupSettings, build_groups, groups_needed, mix_groups, stored_groups
from revela_hub.errors import UserError
from revela_hub.options import option, values_of
from revela_hub.ranges import GroupSize, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed, TextLength
from revela_hub.trainers.base.arguments import WARMUP, AdapterArguments, RunArguments, StreamedTextArguments
from revela_hub.trainers.revela.collator import SPAN


@dataclass
class RevelaTrainingArguments(AdapterArguments, RunArguments):
    """`TrainingArguments` with the paper's learning rate, warm-up, step size and LoRA rank; a row of the data set is a group.

    `per_device_train_batch_size` counts groups: by default, a step has 8 micro-batches of 1 group of 16 chunks. The settings of the
    model are in `RevelaTrainer(..., model_init_kwargs={"temperature": 1e-4, "similarity_sides": "query_passage"})`.
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
    lora_rank: NonNegativeInt = option(256, "Rank of the LoRA adapters of both models; 0 trains all weights.")
    lm_training: Literal["frozen"] | None = option(
        None, "Keep the language model as it is (frozen; default: train it like the retriever)."
    )

    def __post_init__(self) -> None:
        """Raise a `ValueError` if the retriever would never be trained, options conflict, or a value is out of range."""
        super().__post_init__()
        if self.total_groups_per_step is not None:
            batch = self.train_batch_size * self.world_size
            self.gradient_accumulation_steps, rest = divmod(self.total_groups_per_step, batch)
            if rest:
                raise ValueError(
                    f"total_groups_per_step {self.total_groups_per_step} is no multiple of the {batch} groups of a forward pass"
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
        None, "Mix the sources in these proportions, until one is used up (default: one source after another)."
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
    """Read the sources, and return their groups, with the columns of `build_groups`, and a report."""
    sources, report, spans = arguments.sources(held_out), ReadReport(), arguments.spans
    if bad := set(spans) - {"full", "first_half"}:
        raise UserError(f"--similarity_span is full or first_half, not {', '.join(sorted(bad))}")
    if len(arguments.weights or sources) != len(sources) or len(spans) not in (1, len(arguments.weights or [0])):
        raise UserError(
            "--weights has one value for each source; --similarity_span has one value, or as many as --weights"
        )
    if arguments.weights is None:
        return _groups(arguments, sources, report), report
    shares = [weight / sum(arguments.weights) for weight in arguments.weights]
    parts = [_groups(arguments, [source], report, share) for source, share in zip(sources, shares, strict=True)]
    if len(spans) > 1:
        parts = [part.map(partial(_with_span, span)) for part, span in zip(parts, spans, strict=True)]
    mixed = _first(mix_groups(parts, arguments.weights, seed=arguments.group_seed), arguments.max_groups)
    if isinstance(mixed, Dataset):
        report.groups = len(mixed)
    return mixed, report


def _groups(arguments: RevelaDataArguments, sources: list[Source], report: ReadReport, share: float = 1.0) -> Any:
    """Return the groups of sources, of which a mixture uses a share."""
    limit = arguments.max_groups
    how: dict[str, Any] = {"cache_dir": arguments.cache_dir, "streaming": arguments.streaming}
    if arguments.groups_column is not None:
        return _first(stored_groups(sources, arguments.groups_column, arguments.group_size, **how), limit)
    own = {"seed": arguments.group_seed, "max_groups": limit and groups_needed(share, limit) if share < 1 else limit}
    how |= {"report": report, "num_proc": arguments.num_proc}
    return build_groups(sources, GroupSettings(**values_of(GroupSettings, arguments) | own), **how)


def _first(groups: Any, limit: int | None) -> Any:
    if limit is None or (isinstance(groups, Dataset) and len(groups) <= limit):
        return groups
    return groups.take(limit)


def _with_span(span: str, row: dict[str, Any]) -> dict[str, Any]:
    return {SPAN: span}
