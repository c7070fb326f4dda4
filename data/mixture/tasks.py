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
      - {name: emotion, type: classification, source: "hf:mteb/emotion::train", exclude: "hf:mteb/emotion::test"}
      - {name: scifact, type: retrieval, source: beir/scifact, split: train}
      - {name: banking77, type: classification, source: banking77/train.jsonl, columns: {label: label_name}}

The file may also contain only the list of tasks. `revela-hub mine --mixture` writes such a file, with mined hard negatives.
"""

import os
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
        type: The type of its rows; see `ROLES` for their columns.
        source: The source of its rows: a `Source` (its fields for files and data sets, and `max_documents` to read only the
            first rows), or a BEIR folder, whose judgements above 0 are the pairs.
        split: The split of a BEIR folder.
        columns: The columns by role (`{anchor: question}`); default: a column with the role's name. Several columns are
            joined by a space (`{text: [title, abstract]}`). The default of `negatives` is every column named `negatives`,
            `negative` or `negative_1`, `negative_2`, .... A column for `instruction` overrides the task's instruction in
            each row (as written by `revela-hub synthesize`).
        where: Use only rows with these values: `{label: 1}`, or one of several: `{score: [1, 2]}`.
        labels: Names of the values in the column of labels, for `mode: label`: `{0: negative, 1: positive}`.
        max_rows: Keep a uniform sample of this many rows while the source is read, so that it need not fit in memory.
        exclude: Evaluation sets: BEIR folders, or sources with texts or lists of texts in their `text_column`. Rows whose text
            (of pairs: the anchor) overlaps with one of theirs are dropped; see `revela_hub.data.text.ngram_overlap`.
        corpus: The source of the texts, if positives and negatives are ids (its `id_column`, `text_column` and
            `title_column`, joined by a space as in BEIR). Missing negatives are drawn from the whole corpus.
        queries: The source of the texts, if anchors are ids.
        instruction: The instruction for queries (see `revela_hub.data.mixture.instructions`); `""`: none.
        symmetric: Whether documents have the instruction too. None: true for sts, and for classes by example.
        mode: How classification and clustering make pairs: `example` or `label` (see `revela_hub.data.mixture.pairs`). None: as
            the argument `classes` of `load_mixture` says.
        threshold: The minimum score of a pair in sts.
        max_samples: Maximum number of rows, sampled at random: the task's proportion of the mixture.
        stages: The training stages that use it. None: both for retrieval, pairs and triplets, 2 for the others.
        mined_from: The data set of a mined task's rows, for the model card; `revela-hub mine --mixture` sets it.
    """

    name: str
    type: TaskType
    source: Source
    split: str | None = None
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    labels: Mapping[Any, str] = field(default_factory=dict)
    max_rows: int | None = None
    exclude: tuple[Source, ...] = ()
    corpus: Source | None = None
    queries: Source | None = None
    instruction: str = ""
    symmetric: bool | None = None
    mode: PairMode | None = None
    threshold: float = 4.0
    max_samples: int | None = None
    stages: tuple[int, ...] | None = None
    mined_from: str | None = None

    def __post_init__(self) -> None:
        """Check what would make other pairs than the file describes, without an error."""
        roles = ROLES.get(self.type, ())
        columns = [self.columns.get(role, (role,)) for role in roles if role not in ("negatives", "instruction")]
        valid = {
            "type": self.type in ROLES,
            "mode": self.mode in (None, *get_args(PairMode)),
            "columns": {*self.columns} <= {*roles} and len({*columns}) == len(columns),
            "corpus": self.has_passages or not (self.corpus or self.queries),
            "symmetric": self.symmetric in (None, True, False),
            "stages": self.stages is None or {*self.stages} in ({1}, {2}, {1, 2}),
        }
        for name, holds in valid.items():
            if not holds:
                known = f"types are {', '.join(ROLES)}; columns of {self.type} are {', '.join(roles)}"
                raise UserError(f"task {self.name}: wrong {name} {getattr(self, name)!r} ({known})")

    @property
    def has_passages(self) -> bool:
        """Whether its rows are pairs of an anchor and a passage."""
        return self.type in ("retrieval", "pairs", "triplets")

    @property
    def is_retrieval(self) -> bool:
        """Whether the positives of other rows can be negatives (the in-batch negatives of stage one)."""
        return self.has_passages and 1 in self.in_stages

    @property
    def is_symmetric(self) -> bool:
        """Whether documents have the instruction too."""
        by_example = not self.has_passages and (self.type == "sts" or self.mode != "label")
        return by_example if self.symmetric is None else self.symmetric

    @property
    def sources(self) -> list[Source]:
        """All sources of the task."""
        return [source for source in (self.source, self.corpus, self.queries, *self.exclude) if source]

    @property
    def in_stages(self) -> tuple[int, ...]:
        """The training stages that use the task."""
        return ((1, 2) if self.has_passages else (2,)) if self.stages is None else self.stages


def read_mixture(mixture: str | Path | Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """Return the content of a mixture, given as a YAML file, in which environment variables are replaced, or as its content."""
    given: Any = mixture
    if isinstance(mixture, str | Path):
        given = yaml.safe_load(os.path.expandvars(local_path(mixture).read_text(encoding="utf-8")))
    content: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"tasks": given}
    tasks = content.get("tasks")
    if content.keys() - {"tasks", "root"} or not isinstance(tasks, list | tuple) or not tasks:
        raise UserError(
            f"{mixture}: a mixture has tasks (a list of mappings with name, type and source), and may have a root"
        )
    return content


def parse_mixture(
    mixture: str | Path | Mapping[str, Any] | Sequence[Any], root: str | Path | None = None
) -> tuple[Task, ...]:
    """Parse a mixture (see `read_mixture`); `root` is the base folder of relative paths, and overrides the file."""
    given = read_mixture(mixture)
    root = str(given.get("root") or "") if root is None else str(root)
    parsed = tuple(_parse_task(task, root) for task in given["tasks"])
    names = [task.name for task in parsed]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{mixture}: several tasks have the name {', '.join(repeated)}")
    return parsed


def _parse_task(given: Any, root: str) -> Task:
    known = [item.name for item in fields(Task)]
    values = {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    if not {"name", "type", "source"} <= values.keys() <= {*known}:
        raise UserError(f"task {given}: it needs a name, a type and a source; the keys are {', '.join(known)}")

    def source(value: Any) -> Source:
        parsed = parse_source(value)
        path = parsed.path if parsed.is_dataset else os.path.join(root, os.path.expanduser(parsed.path))
        return replace(parsed, path=path)

    values |= {key: source(values[key]) for key in ("source", "corpus", "queries") if key in values}
    values["exclude"] = tuple(map(source, _tuple(values.get("exclude", ()))))
    if "split" in values and values["source"].is_dataset:
        values["source"] = replace(values["source"], split=values.pop("split"))
    for key in ("columns", "where"):
        values[key] = {name: _tuple(value) for name, value in values.get(key, {}).items()}
    if "stages" in values:
        values["stages"] = _tuple(values["stages"])
    return Task(**values)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
