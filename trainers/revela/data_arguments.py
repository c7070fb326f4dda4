"""The data options of `revela-hub train revela`, and what they load."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import parse_sources
from revela_hub.data.text.groups import (
    GroupSettings,
    StoppingStrategy,
    build_groups,
    check_weights,
    groups_needed,
    mix_groups,
)
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass
class RevelaDataArguments:
    """What Revela trains on. The defaults are those of the paper's general-domain runs where it names them."""

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
    kind: Literal["auto", "text", "code"] = field(
        default="auto",
        metadata={
            "help": "Cut chunks at the ends of sentences (text) or of lines (code). auto: code for the file extensions "
            "of programming languages, otherwise text."
        },
    )
    exclude: list[str] = field(
        default_factory=list,
        metadata={"help": "Patterns of file and folder names not to read, for example '*.min.js' tests."},
    )
    language: str = field(
        default="en", metadata={"help": "Language of the text (ISO 639-1), by which the ends of sentences are found."}
    )
    max_words: int = field(default=120, metadata={"help": "Words in a chunk at most."})
    group_size: int = field(
        default=16, metadata={"help": "Chunks in a group: what one chunk's language modelling may look at."}
    )
    run_length: int | None = field(
        default=None,
        metadata={
            "help": "Put each group together of runs of as many successive chunks, drawn at random, so that it mixes "
            "documents: for small corpora and long documents. Must divide group_size. Default: one run."
        },
    )
    max_length: int = field(default=160, metadata={"help": "Tokens of a chunk at most, for both models."})
    similarity_span: Literal["full", "first_half"] = field(
        default="full",
        metadata={
            "help": "How much of a chunk the retriever sees. The paper: first_half for natural language, full for code."
        },
    )
    group_seed: int = field(default=0, metadata={"help": "Seed for drawing runs and mixing sources."})
    weights: list[float] | None = field(
        default=None,
        metadata={"help": "Mix the sources group by group in these proportions, instead of one after another."},
    )
    stopping_strategy: StoppingStrategy = field(
        default="first_exhausted",
        metadata={
            "help": "When a mixture ends: first_exhausted, with the first source used up; all_exhausted, when each has "
            "been used up once (the others are repeated)."
        },
    )
    max_documents: int | None = field(default=None, metadata={"help": "Documents to read from each source at most."})
    max_groups: int | None = field(default=None, metadata={"help": "Groups to make at most."})
    cache_dir: str | None = field(
        default=None, metadata={"help": "Where the groups are kept between runs. Default: in the cache of datasets."}
    )


def load_groups(arguments: RevelaDataArguments) -> "tuple[Dataset, ReadReport]":
    """Reads, chunks and groups what the arguments name; see `build_groups` for the columns.

    Returns:
        The groups, and the report to show.

    Raises:
        UserError: Options that do not fit together, or anything that `build_groups` raises.
    """
    defaults: dict[str, Any] = {
        "text_column": arguments.text_column,
        "kind": None if arguments.kind == "auto" else arguments.kind,
        "exclude": tuple(arguments.exclude),
        "max_documents": arguments.max_documents,
    }
    sources = parse_sources(arguments.data, **defaults)
    report = ReadReport()
    if arguments.weights is None:
        return build_groups(sources, _settings(arguments), cache_dir=arguments.cache_dir, report=report), report
    check_weights(arguments.weights, len(sources))
    if len(sources) == 1:
        raise UserError("weights are for a mixture of two or more sources; there is one")
    parts = []
    for source, weight in zip(sources, arguments.weights, strict=True):
        settings = _settings(arguments, weight / sum(arguments.weights))
        parts.append(build_groups([source], settings, cache_dir=arguments.cache_dir, report=report))
    mixed = mix_groups(
        parts, arguments.weights, seed=arguments.group_seed, stopping_strategy=arguments.stopping_strategy
    )
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
