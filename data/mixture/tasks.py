"""Parsing and validating the YAML description of a multi-task mixture.

    root: $MY_DATA                              # base folder of relative paths; default: the current folder
    tasks:
      - name: medquad
        type: retrieval
        source: medquad/train.jsonl.gz          # a file, folder or pattern of JSON lines, a BEIR folder, or hf:owner/name
        columns: {anchor: question, positive: passage_id}
        corpus: medquad/passages.jsonl.gz       # the column then contains the id of a passage
        instruction: Given a medical question, retrieve passages that answer the question
      - {name: mined, type: retrieval, source: mined.jsonl}       # written by `revela-hub mine`, with the default columns
      - {name: scifact, type: retrieval, source: beir/scifact, split: train}
      - {name: banking77, type: classification, source: banking77/train.jsonl, columns: {label: label_name}}

The file may also contain only the list of tasks.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import yaml

from revela_hub.data.mixture.pairs import PairMode
from revela_hub.data.sources.source import Source, parse_source
from revela_hub.data.yaml_lines import line_of, open_yaml
from revela_hub.errors import UserError, did_you_mean
from revela_hub.paths import local_path

TaskType: TypeAlias = Literal["retrieval", "pairs", "triplets", "classification", "clustering", "sts"]
Stopping: TypeAlias = Literal["first_exhausted", "all_exhausted"]

RETRIEVAL_TYPES = ("retrieval", "pairs", "triplets")

# The columns of each type; `instruction` is read only if the task names a column for it.
ROLES: dict[TaskType, tuple[str, ...]] = {
    "retrieval": ("anchor", "positive", "negatives", "instruction"),
    "pairs": ("anchor", "positive", "instruction"),
    "triplets": ("anchor", "positive", "negative", "instruction"),
    "classification": ("text", "label"),
    "clustering": ("text", "label"),
    "sts": ("sentence1", "sentence2", "score"),
}


@dataclass(frozen=True)
class Task:
    """One task of a mixture.

    Attributes:
        name: The name in the data set's column `task` and in messages.
        type: The type of its rows: `retrieval` (anchor, positive, and optional negatives), `pairs` (anchor, positive),
            `triplets` (anchor, positive, negative), `classification` and `clustering` (text, label), `sts` (sentence1,
            sentence2, score).
        source: The source of its rows: a `Source` (its fields for files and data sets, and `max_documents` as the maximum
            number of rows), or a BEIR folder, whose judgements above 0 are the pairs.
        split: The split of a BEIR folder.
        columns: The columns by role (`{anchor: question}`); default: a column with the role's name. Several columns are
            joined by a space (`{text: [title, abstract]}`). The default of `negatives` is every column named `negatives`,
            `negative` or `negative_1`, `negative_2`, .... A column for `instruction` overrides the task's instruction in
            each row (as written by `revela-hub synthesize`).
        where: Use only rows with these values: `{label: 1}`, or one of several: `{score: [1, 2]}`.
        corpus: The source of the texts, if positives and negatives are ids (its `id_column`, `text_column` and
            `title_column`, joined by a space as in BEIR). Missing negatives are drawn from the whole corpus.
        queries: The source of the texts, if anchors are ids.
        instruction: The instruction for queries (see `revela_hub.data.mixture.instructions`); `""`: none.
        symmetric: Whether documents have the instruction too. None: true for classification, clustering and sts.
        mode: How classification and clustering make pairs: `example` or `label` (see `revela_hub.data.mixture.pairs`).
        threshold: The minimum score of a pair in sts.
        weight: The task's proportion of the mixture, relative to the other weights.
        max_samples: Maximum number of rows, sampled at random.
        stages: The training stages that use it. None: both for retrieval, pairs and triplets, 2 for the others.
    """

    name: str
    type: TaskType
    source: Source
    split: str | None = None
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    corpus: Source | None = None
    queries: Source | None = None
    instruction: str = ""
    symmetric: bool | None = None
    mode: PairMode = "example"
    threshold: float = 4.0
    weight: float | None = None
    max_samples: int | None = None
    stages: tuple[int, ...] | None = None

    @property
    def is_retrieval(self) -> bool:
        """Whether the positives of other rows can be negatives (the in-batch negatives of stage one)."""
        return self.type in RETRIEVAL_TYPES

    @property
    def is_symmetric(self) -> bool:
        """Whether documents have the instruction too."""
        return not self.is_retrieval if self.symmetric is None else self.symmetric

    @property
    def in_stages(self) -> tuple[int, ...]:
        """The training stages that use the task."""
        return ((1, 2) if self.is_retrieval else (2,)) if self.stages is None else self.stages


@dataclass(frozen=True)
class MixtureFile:
    """The tasks of a mixture, and its length if the tasks have weights.

    Attributes:
        tasks: The tasks, with unique names.
        stopping_strategy: `first_exhausted` ends with the first exhausted task, so no row is repeated; `all_exhausted` ends
            with the last one and repeats rows of the others.
    """

    tasks: tuple[Task, ...]
    stopping_strategy: Stopping = "first_exhausted"


def parse_mixture(
    mixture: str | Path | Mapping[str, Any] | Sequence[Any], root: str | Path | None = None
) -> MixtureFile:
    """Parse the description of a mixture.

    Args:
        mixture: A YAML file, or its content.
        root: The base folder of relative paths; overrides the file.

    Raises:
        UserError: The file cannot be read, or a task is invalid; the message has file, line and remedy.
    """
    place, given = "mixture", cast("Any", mixture)
    lines: list[int] = []
    if isinstance(mixture, str | Path):
        place = str(mixture)
        given, lines = _read_yaml(local_path(mixture))
    if not isinstance(given, Mapping):
        given = {"tasks": given}
    _check_keys(given, ("root", "stopping_strategy", "tasks"), place)
    tasks = given.get("tasks")
    if not isinstance(tasks, list | tuple) or not tasks:
        raise UserError(f"{place}: it needs tasks, a list of mappings with name, type and source")
    stopping = given.get("stopping_strategy", "first_exhausted")
    _check_choice("stopping_strategy", stopping, get_args(Stopping), place)
    folder = _expanded(str(given.get("root") or "") if root is None else str(root), f"{place}: root")
    parsed: list[Task] = []
    for number, values in enumerate(tasks):
        where = f"{place}:{lines[number]}" if lines else f"{place}: task {number + 1}"
        task = _parse_task(values, folder, where)
        if any(task.name == other.name for other in parsed):
            raise UserError(f"{where}: duplicate task name {task.name!r}; names must be unique")
        parsed.append(task)
    return MixtureFile(tuple(parsed), stopping)


def _read_yaml(path: Path) -> tuple[Any, list[int]]:
    """Return the content of the file, and the line of each task."""
    with open_yaml(path, "mixture") as (loader, root):
        if root is None:
            return None, []
        node = root
        if isinstance(root, yaml.MappingNode):
            node = next((value for key, value in root.value if key.value == "tasks"), root)
        lines = [line_of(item) for item in node.value] if isinstance(node, yaml.SequenceNode) else []
        return loader.construct_document(root), lines


def _parse_task(given: Any, root: str, place: str) -> Task:
    if not isinstance(given, Mapping):
        raise UserError(f"{place}: a task must be a mapping with name, type and source, not {given!r}")
    place = f"{place}: {given['name']}" if isinstance(given.get("name"), str) else place
    _check_keys(given, [item.name for item in fields(Task)], place)
    for key in ("name", "type", "source"):
        if not given.get(key):
            raise UserError(f"{place}: the task needs a {key}")
    values = {key: value for key, value in given.items() if value is not None}
    _check_kinds(values, place)
    _check_keys(values.get("columns", {}), ROLES[cast("TaskType", values["type"])], f"{place}: columns")
    return Task(**_converted(values, root, place))


def _converted(values: dict[str, Any], root: str, place: str) -> dict[str, Any]:
    """Convert the values to the types of `Task`."""
    for key in ("corpus", "queries"):
        if key in values and values["type"] not in RETRIEVAL_TYPES:
            raise UserError(f"{place}: {key} is for {', '.join(RETRIEVAL_TYPES)}, not for {values['type']}")
    for key in ("source", "corpus", "queries"):
        if key in values:
            values[key] = _source(values[key], root, f"{place}: {key}")
    if "split" in values and values["source"].is_dataset:
        values["source"] = replace(values["source"], split=values.pop("split"))
    for key in ("columns", "where"):
        values[key] = {name: _tuple(value) for name, value in values.get(key, {}).items()}
    _check_columns(values["columns"], place)
    if "stages" in values:
        values["stages"] = tuple(values["stages"])
    return values


def _check_columns(columns: Mapping[str, tuple[str, ...]], place: str) -> None:
    for key in ("label", "score"):
        if len(columns.get(key, (key,))) != 1:
            raise UserError(f"{place}: columns: {key} is {list(columns[key])}; it must be one column")
    for one, other in (("anchor", "positive"), ("positive", "negative"), ("sentence1", "sentence2"), ("text", "label")):
        both = [columns.get(role, (role,)) for role in (one, other)]
        if both[0] == both[1]:
            names = " and ".join(both[0])
            raise UserError(f"{place}: columns: {one} and {other} are both {names}; name two different ones")


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(name, str) for name in value))


# Checks of values here, where the message can name the file and line.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda value: isinstance(value, str), "a text"),
    "split": (lambda value: isinstance(value, str), "a text"),
    "instruction": (lambda value: isinstance(value, str), "a text"),
    "symmetric": (lambda value: isinstance(value, bool), "true or false"),
    "threshold": (_is_number, "a number"),
    "weight": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "max_samples": (_is_count, "a whole number above 0"),
    "stages": (
        lambda value: isinstance(value, list | tuple) and bool(value) and all(stage in (1, 2) for stage in value),
        "a list of stages, [1], [2] or [1, 2]",
    ),
    "where": (lambda value: isinstance(value, Mapping), "a mapping from columns to values"),
    "columns": (
        lambda value: isinstance(value, Mapping) and all(map(_are_names, value.values())),
        "a mapping to names of columns",
    ),
}


def _check_kinds(values: Mapping[str, Any], place: str) -> None:
    _check_choice("type", values["type"], get_args(TaskType), place)
    _check_choice("mode", values.get("mode", "example"), get_args(PairMode), place)
    for key, (fits, expected) in _KINDS.items():
        if key in values and not fits(values[key]):
            raise UserError(f"{place}: {key} is {values[key]!r}; it must be {expected}")


def _check_keys(given: Mapping[Any, Any], known: Sequence[str], place: str) -> None:
    for key in given:
        if key not in known:
            remedy = did_you_mean(str(key), known, "{!r}") or f"the keys are {', '.join(known)}"
            raise UserError(f"{place}: unknown key {key!r}: {remedy}")


def _check_choice(key: str, value: Any, choices: Sequence[str], place: str) -> None:
    if value not in choices:
        suggestion = did_you_mean(str(value), choices)
        more = f" ({suggestion})" if suggestion else ""
        raise UserError(f"{place}: {key} is {value!r}; it must be one of {', '.join(choices)}{more}")


def _source(given: Any, root: str, place: str) -> Source:
    if not isinstance(given, str | Mapping):
        raise UserError(f"{place}: it must be a path or a mapping with one, not {given!r}")
    try:
        source = parse_source(given)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    path = _expanded(source.path, place)
    if not source.is_dataset:
        path = os.path.join(root, os.path.expanduser(path))
    return replace(source, path=path, data_files=_expanded_files(source.data_files, place))


def _expanded_files(files: Any, place: str) -> Any:
    if isinstance(files, Mapping):
        return {split: _expanded_files(several, place) for split, several in files.items()}
    return files and tuple(_expanded(file, place) for file in ((files,) if isinstance(files, str) else files))


def _expanded(path: str, place: str) -> str:
    """Expand environment variables in a path."""
    path = os.path.expandvars(os.path.expanduser(path))
    if unset := re.search(r"\$\{?(\w+)", path):
        raise UserError(
            f"{place}: the environment variable {unset[1]} is not set (in {path}); set it, or write out the path"
        )
    return path
