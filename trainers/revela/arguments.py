"""Training and data arguments of Revela, with the defaults of the paper (arXiv 2506.16552, section 4)."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.text.groups import (
    GroupSettings,
    StoppingStrategy,
    build_groups,
    check_weights,
    groups_needed,
    mix_groups,
)
from revela_hub.errors import UserError
from revela_hub.ranges import GroupSize, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed, TextLength
from revela_hub.trainers.common.arguments import WARMUP, AdapterArguments, RunArguments, StreamedTextArguments
from revela_hub.trainers.common.matryoshka import MatryoshkaArguments

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


@dataclass
class RevelaTrainingArguments(MatryoshkaArguments, AdapterArguments, RunArguments):
    """`TrainingArguments` with the paper's defaults; a row of the data set is a group of chunks.

    `per_device_train_batch_size` counts groups: by default, a step has 8 micro-batches of 1 group of 16 chunks.
    """

    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate of the language model."})
    warmup_steps: float = field(default=100, metadata=WARMUP)
    gradient_accumulation_steps: int = field(default=8, metadata={"help": "Number of batches per training step."})
    per_device_train_batch_size: int = field(
        default=1, metadata={"help": "Number of groups per device and forward pass."}
    )
    retriever_learning_rate: NonNegativeFloat | None = field(
        default=None, metadata={"help": "Peak learning rate of the retriever (default: --learning_rate)."}
    )
    retriever_start_step: NonNegativeInt = field(
        default=0,
        metadata={
            "help": "Delay retriever training until the LM has warmed up; otherwise similarities can collapse to uniform."
        },
    )
    temperature_start: PositiveFloat | None = field(
        default=None,
        metadata={"help": "Start at this temperature and change it geometrically to --temperature over the run."},
    )
    lora_rank: NonNegativeInt = field(
        default=256, metadata={"help": "Rank of the LoRA adapters of both models; 0 trains all weights."}
    )
    lm_training: Literal["frozen", "lora", "full"] | None = field(
        default=None,
        metadata={
            "help": "Keep the language model as it is (frozen), or train it like the retriever: lora with a --lora_rank, full with"
            " --lora_rank 0 (default: like the retriever)."
        },
    )

    def __post_init__(self) -> None:
        """Check that the retriever starts before the run ends, if `max_steps` is set, and that both models are trained alike.

        Raises:
            ValueError: the retriever would never be trained, the options conflict, or a value is out of range.
        """
        super().__post_init__()
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
    """Data of a Revela run. The defaults are those of the paper's general-domain runs, as far as it gives them."""

    _argument_group_name = "data"

    kind: Literal["auto", "text", "code"] = field(
        default="auto",
        metadata={"help": "How to split chunks: at sentences (text), at lines (code), or by file extension (auto)."},
    )
    max_words: PositiveInt = field(default=120, metadata={"help": "Maximum number of words per chunk."})
    group_size: GroupSize = field(
        default=16,
        metadata={"help": "Number of chunks per group; each chunk is compared with the others of its group."},
    )
    run_length: PositiveInt | None = field(
        default=None,
        metadata={
            "help": "Build each group from random runs of N consecutive chunks; must divide --group_size (default: one run)."
        },
    )
    max_length: TextLength = field(
        default=160, metadata={"help": "Maximum number of tokens per chunk, for both models."}
    )
    similarity_span: Literal["full", "first_half"] = field(
        default="full",
        metadata={"help": "Part of a chunk that the retriever reads; the paper uses first_half for natural language."},
    )
    group_seed: Seed = field(default=0, metadata={"help": "Random seed for drawing runs and mixing sources."})
    weights: list[PositiveFloat] | None = field(
        default=None,
        metadata={"help": "Mix the sources in these proportions (default: one source after another)."},
    )
    stopping_strategy: StoppingStrategy = field(
        default="first_exhausted",
        metadata={"help": "End a mixture when the first source is used up, or when all are (repeating the others)."},
    )
    max_groups: PositiveInt | None = field(default=None, metadata={"help": "Maximum number of groups."})


def load_groups(arguments: RevelaDataArguments) -> "tuple[Dataset | IterableDataset, ReadReport]":
    """Read the sources, and cut them into chunks and groups; see `build_groups` for the columns.

    Returns:
        The groups, and a report on the sources.

    Raises:
        UserError: the options conflict, or `build_groups` raises an error.
    """
    sources = arguments.sources()
    report = ReadReport()
    kept: dict[str, Any] = {"cache_dir": arguments.cache_dir, "streaming": arguments.streaming}
    if arguments.weights is None:
        return build_groups(sources, _settings(arguments), report=report, **kept), report
    check_weights(arguments.weights, len(sources))
    if len(sources) == 1:
        raise UserError("--weights needs two or more sources, but there is only one: leave it out")
    parts = []
    for source, weight in zip(sources, arguments.weights, strict=True):
        settings = _settings(arguments, weight / sum(arguments.weights))
        parts.append(build_groups([source], settings, report=report, **kept))
    mixed = mix_groups(
        parts, arguments.weights, seed=arguments.group_seed, stopping_strategy=arguments.stopping_strategy
    )
    if arguments.streaming:
        return mixed if arguments.max_groups is None else mixed.take(arguments.max_groups), report
    if arguments.max_groups is not None:
        mixed = mixed.select(range(min(arguments.max_groups, len(mixed))))
    report.groups = len(mixed)
    return mixed, report


def _settings(arguments: RevelaDataArguments, share: float = 1.0) -> GroupSettings:
    limit = arguments.max_groups
    return GroupSettings(
        group_size=arguments.group_size,
        run_length=arguments.run_length,
        max_words=arguments.max_words,
        language=arguments.language,
        max_groups=limit if limit is None or share == 1.0 else groups_needed(share, limit),
        seed=arguments.group_seed,
    )
