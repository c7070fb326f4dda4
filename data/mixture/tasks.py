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

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import yaml

from revela_hub.data.mixture.pairs import PairMode
from revela_hub.data.sources.source import Source, parse_source
from revela_hub.errors import UserError
from revela_hub.files import local_path

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

    def __post_init__(self) -> None:
        """Checks what would make other pairs than the file describes, or none."""
        for name in ("name", "instruction"):
            self._check(name, isinstance(getattr(self, name), str), "a text")
        self._check("type", self.type in ROLES, ", ".join(ROLES))
        self._check("mode", self.mode in get_args(PairMode), ", ".join(get_args(PairMode)))
        roles = ROLES[self.type]
        self._check("columns", {*self.columns} <= {*roles}, f"columns for {', '.join(roles)}")
        self._check("symmetric", self.symmetric in (None, True, False), "true or false")
        self._check("threshold", _is_number(self.threshold), "a number")
        self._check("weight", self.weight is None or (_is_number(self.weight) and self.weight > 0), "above 0")
        count = self.max_samples
        self._check("max_samples", count is None or (type(count) is int and count > 0), "a whole number above 0")
        self._check("stages", self.stages is None or {*self.stages} in ({1}, {2}, {1, 2}), "[1], [2] or [1, 2]")
        for name in ("corpus", "queries"):
            self._check(
                name, getattr(self, name) is None or self.is_retrieval, f"for {', '.join(RETRIEVAL_TYPES)} only"
            )
        for role in ("label", "score"):
            self._check("columns", len(self.columns.get(role, (role,))) == 1, f"one column for {role}")
        used = [self.columns.get(role, (role,)) for role in roles if role not in ("negatives", "instruction")]
        self._check("columns", len({*used}) == len(used), "different for each role")

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise UserError(f"task {self.name}: {name} is {getattr(self, name)!r}; it must be {expected}")

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
    """
    given: Any = mixture
    if isinstance(mixture, str | Path):
        try:
            given = yaml.safe_load(local_path(mixture).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:  # with the line
            raise UserError(f"{mixture}: {error}") from error
    given = dict(given) if isinstance(given, Mapping) else {"tasks": given}
    tasks, stopping = given.pop("tasks", None), given.pop("stopping_strategy", "first_exhausted")
    folder = given.pop("root", None)
    folder = _expanded(str(folder or "") if root is None else str(root))
    if given or not isinstance(tasks, list | tuple) or not tasks or stopping not in get_args(Stopping):
        raise UserError(
            f"{mixture}: a mixture has tasks (a list of mappings with name, type and source), root, and stopping_strategy"
            f" ({' or '.join(get_args(Stopping))})"
        )
    parsed = tuple(_parse_task(task, folder) for task in tasks)
    names = [task.name for task in parsed]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{mixture}: several tasks have the name {', '.join(repeated)}")
    return MixtureFile(parsed, stopping)


def _parse_task(given: Any, root: str) -> Task:
    known = [item.name for item in fields(Task)]
    values = {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    mappings = all(isinstance(values.get(key, {}), Mapping) for key in ("columns", "where"))
    if not mappings or not {"name", "type", "source"} <= values.keys() <= {*known}:
        raise UserError(f"task {given}: it needs a name, a type and a source; the keys are {', '.join(known)}")
    for key in ("source", "corpus", "queries"):
        if key in values:
            values[key] = _source(values[key], root)
    if "split" in values and values["source"].is_dataset:
        values["source"] = replace(values["source"], split=values.pop("split"))
    for key in ("columns", "where"):
        values[key] = {name: _tuple(value) for name, value in values.get(key, {}).items()}
    if "stages" in values:
        values["stages"] = _tuple(values["stages"])
    return Task(**values)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _source(given: Any, root: str) -> Source:
    source = parse_source(given)
    path = _expanded(source.path)
    if not source.is_dataset:
        path = os.path.join(root, path)
    return replace(source, path=path, data_files=_expanded_files(source.data_files))


def _expanded_files(files: Any) -> Any:
    if isinstance(files, Mapping):
        return {split: _expanded_files(several) for split, several in files.items()}
    return files and tuple(map(_expanded, (files,) if isinstance(files, str) else files))


def _expanded(path: str) -> str:
    """Expand environment variables in a path; one that is not set would be a folder of that name."""
    path = os.path.expandvars(os.path.expanduser(path))
    if unset := re.search(r"\$\{?(\w+)", path):
        raise UserError(f"the environment variable {unset[1]} is not set (in {path})")
    return path
