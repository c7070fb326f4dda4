"""Reading the rows of one task of a mixture into an Arrow file, from which training examples are made.

    source --read_rows--> Row --(where, columns, ids resolved)--> Arrow file on disk, memory-mapped

Sources are streamed, and texts stay on disk; memory holds the ids of the passages that the task refers to.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from revela_hub.data.mixture.tasks import Task
from revela_hub.data.row_cache import write_rows
from revela_hub.data.sources.beir import beir_files, beir_splits, titled
from revela_hub.data.sources.rows import Row, column_text, column_value, id_text, read_rows
from revela_hub.data.sources.source import Source
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")

EXCLUDED_BY_WHERE = "excluded by where"
NO_PASSAGE = "passage is not in the corpus"
NO_QUERY = "query is not in queries"

_ID_COLUMN = re.compile(r"(^|[_-])ids?$", re.IGNORECASE)
_MIN_ID_ROWS = 8  # rows of single words with digits after which a column is taken for ids
_NUMBERED = re.compile(r"negative_(\d+)")


class Column(Sequence[T]):
    """A column of a data set, read from disk value by value."""

    def __init__(self, dataset: "Dataset", name: str) -> None:
        self._column = dataset.data.column(name)  # not dataset[name][i], which takes 20 times as long

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: Any) -> Any:
        return self._column[index].as_py()

    def __iter__(self) -> Iterator[T]:
        for chunk in self._column.iterchunks():
            yield from chunk.to_pylist()


@dataclass
class TaskRows:
    """The rows of a task.

    Attributes:
        rows: The columns `text`, `label` (classification and clustering), `sentence1`, `sentence2`, `score` (sts), or
            `anchor`, `positive`, `negatives`, `instruction` (all others).
        corpus: The whole corpus in the column `text`, if the task has one.
        dropped: Dropped rows, by reason.
    """

    rows: "Dataset"
    corpus: "Dataset | None" = None
    dropped: Counter[str] = field(default_factory=Counter)


def read_task(task: Task, folder: Path) -> TaskRows:
    """Read a task's source into Arrow files in a folder, replacing ids by the texts of its corpus and queries.

    The folder must exist as long as the rows are used.
    """
    from datasets import List, Value

    task = _with_beir_parts(task)
    dropped: Counter[str] = Counter()
    queries = corpus = None
    if task.corpus or task.queries:
        anchors, passages = _named_ids(task)
        queries = _Texts(task.queries, anchors, folder / "queries.arrow") if task.queries else None
        corpus = _Texts(task.corpus, passages, folder / "corpus.arrow") if task.corpus else None
    text = Value("string")
    if task.is_retrieval:
        records = _pairs(task, dropped, queries, corpus)
        features = {"anchor": text, "positive": text, "negatives": List(text), "instruction": text}
    elif task.type == "sts":
        records = _scored(task, dropped)
        features = {"sentence1": text, "sentence2": text, "score": Value("float64")}
    else:
        records = _labelled(task, dropped)
        features = {"text": text, "label": text}
    rows = write_rows(records, features, folder / "rows.arrow")
    return TaskRows(rows, corpus.dataset if corpus else None, dropped)


def _with_beir_parts(task: Task) -> Task:
    """A task on a BEIR folder as a task on its three files."""
    folder = task.source.path
    splits = [] if task.source.is_dataset else beir_splits(folder)
    if not splits:
        if task.split is not None:
            raise UserError(
                f"task {task.name}: split is for a BEIR folder (with qrels/<split>.tsv) or a data set; {folder} is neither"
            )
        return task
    if not task.is_retrieval or task.corpus or task.queries or task.columns:
        raise UserError(f"task {task.name}: {folder} is a BEIR folder: only type retrieval, without corpus and columns")
    if task.split is None:
        raise UserError(f"task {task.name}: set split for the BEIR folder {folder}, which has {', '.join(splits)}")
    files = beir_files(folder, task.split)
    return replace(
        task,
        source=Source(str(files.qrels)),
        columns={"anchor": ("query-id",), "positive": ("corpus-id",)},
        corpus=Source(str(files.corpus)),
        queries=Source(str(files.queries)),
    )


def _selected_rows(task: Task, dropped: Counter[str]) -> Iterator[Row]:
    """Yield the rows selected by `where`, with the task added to their locations for messages."""
    for row in read_rows(task.source):
        row = Row(f"{row.where}: task {task.name}", row.columns)
        for name, allowed in task.where.items():
            value = column_value(row, name, "where names it")
            if value not in allowed and str(value) not in map(str, allowed):
                dropped[EXCLUDED_BY_WHERE] += 1
                break
        else:
            yield row


# --- columns


def _remedy(key: str) -> str:
    return f"choose with columns: {{{key}: ...}}"


def _texts(row: Row, key: str, task: Task, names: Sequence[str] = (), *, ids: bool = False) -> list[str]:
    """Return the texts or ids of a row for a key, or in the columns `names`: one, or those of a list."""
    names = names or task.columns.get(key, (key,))
    values = [(name, column_value(row, name, _remedy(key))) for name in names]
    if len(values) > 1:
        texts = [_text(value, name, row, key, ids=ids) for name, value in values]
        return [" ".join(text for text in texts if text)]
    [(name, value)] = values
    several = value if isinstance(value, list | tuple) else [value]
    return [_text(value, name, row, key, ids=ids) for value in several]


def _text(value: Any, name: str, row: Row, key: str, *, ids: bool) -> str:
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):  # passages written as {title, text}
        return titled(value.get("title"), value["text"])
    if ids and isinstance(value, int | str):
        return id_text(value)
    return column_text(Row(row.where, {name: value}), name, _remedy(key))


def _one(row: Row, key: str, task: Task, *, ids: bool = False) -> str:
    texts = _texts(row, key, task, ids=ids)
    if len(texts) != 1:
        raise UserError(f"{row.where}: {key} is a list of {len(texts)}; one text is needed")
    return texts[0]


def _negatives(row: Row, task: Task, *, ids: bool) -> list[str]:
    """Return the row's negatives, from the task's columns or by default from those with such names."""
    if task.type == "pairs":
        return []
    key = "negative" if task.type == "triplets" else "negatives"
    names = list(task.columns.get(key, ()))
    if not names:
        names = [name for name in row.columns if name in ("negatives", "negative") or _NUMBERED.fullmatch(name)]
        names.sort(key=lambda name: int(match[1]) if (match := _NUMBERED.fullmatch(name)) else 0)
    if not names and task.type == "triplets":
        names = [key]  # missing; the error below names it
    texts = (text for name in names for text in _texts(row, key, task, (name,), ids=ids))
    return [text for text in texts if text]


# --- ids


def _named_ids(task: Task) -> tuple[set[str], set[str]]:
    """Return the ids of queries and of passages that the task's rows refer to."""
    anchors: set[str] = set()
    passages: set[str] = set()
    for row in _selected_rows(task, Counter()):
        if task.queries is not None:
            anchors.add(_one(row, "anchor", task, ids=True))
        if task.corpus is not None:
            passages.update(_texts(row, "positive", task, ids=True), _negatives(row, task, ids=True))
    return anchors, passages


class _Texts:
    """The texts of a corpus on disk, found by id; memory holds only the `wanted` ids."""

    def __init__(self, source: Source, wanted: set[str], path: Path) -> None:
        from datasets import Value

        self._rows: dict[str, int] = {}
        self.dataset = write_rows(self._read(source, wanted), {"text": Value("string")}, path)
        self._texts = Column[str](self.dataset, "text")

    def _read(self, source: Source, wanted: set[str]) -> Iterator[dict[str, str]]:
        title = "title" if source.title_column is None else source.title_column
        for number, row in enumerate(read_rows(source)):
            id_ = id_text(column_value(row, source.id_column or "_id", "choose with id_column"))
            if id_ in wanted:
                self._rows.setdefault(id_, number)
            # Joined by a space, as in BEIR and in the evaluation.
            values = [column_value(row, name, "choose with text_column") for name in source.text_columns]
            text = " ".join(str(value) for value in (row.columns.get(title), *values) if value)
            yield {"text": text}

    def find(self, id_: str) -> str | None:
        """Return the text with this id."""
        row = self._rows.get(id_)
        return None if row is None else cast("str", self._texts[row])


# --- records


def _pairs(
    task: Task, dropped: Counter[str], queries: _Texts | None, corpus: _Texts | None
) -> Iterator[dict[str, Any]]:
    by_id = corpus is not None
    first = list(islice(_selected_rows(task, Counter()), 8 * _MIN_ID_ROWS))
    _check_no_ids(first, task)
    for row in _selected_rows(task, dropped):
        anchor: str | None = _one(row, "anchor", task, ids=queries is not None)
        if queries is not None:
            anchor = queries.find(cast("str", anchor))
        if anchor is None:
            dropped[NO_QUERY] += 1
            continue
        instruction = _one(row, "instruction", task) if "instruction" in task.columns else ""
        negatives: list[str | None] = [*_negatives(row, task, ids=by_id)]
        if corpus is not None:
            negatives = [corpus.find(cast("str", id_)) for id_ in negatives]
        for positive in _texts(row, "positive", task, ids=by_id):
            found = positive if corpus is None else corpus.find(positive)
            if found is None:
                dropped[NO_PASSAGE] += 1
                continue
            yield {
                "anchor": anchor,
                "positive": found,
                "negatives": [text for text in negatives if text],
                "instruction": instruction,
            }


def _check_no_ids(rows: Sequence[Row], task: Task) -> None:
    """Raise an error if the first rows have ids instead of text: without its `corpus`, a task would train on the ids of passages."""
    for role, file, source in (("positive", "corpus", task.corpus), ("anchor", "queries", task.queries)):
        texts = [text for row in rows for text in _texts(row, role, task)] if source is None else []
        are_ids = bool(texts) and all(len(text.split()) < 2 and any(map(str.isdigit, text)) for text in texts)
        names = task.columns.get(role, (role,))
        if are_ids and (len(rows) >= _MIN_ID_ROWS or any(map(_ID_COLUMN.search, names))):
            raise UserError(
                f"{rows[0].where}: {role} is the column {' and '.join(names)}, which contains ids instead of text: name the file"
                f" with the texts ({file}: FILE), or choose another with {_remedy(role)}"
            )


def _labelled(task: Task, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    (label_name,) = task.columns.get("label", ("label",))
    for row in _selected_rows(task, dropped):
        texts, labels = _texts(row, "text", task), column_value(row, label_name, _remedy("label"))
        labels = labels if isinstance(labels, list | tuple) else [labels]
        if len(texts) != len(labels):
            raise UserError(f"{row.where}: {len(texts)} texts, but {len(labels)} labels")
        numbers = [label for label in labels if isinstance(label, int | float)]
        if task.mode == "label" and numbers:
            raise UserError(
                f"{row.where}: the label is {numbers[0]!r}, but with mode: label it is the text of the positive; choose a column with"
                " the names of the labels, or mode: example"
            )
        for text, label in zip(texts, labels, strict=True):
            yield {"text": text, "label": "" if label is None else str(label)}


def _scored(task: Task, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    (score_name,) = task.columns.get("score", ("score",))
    for row in _selected_rows(task, dropped):
        value = column_value(row, score_name, _remedy("score"))
        try:
            score = float(value)
        except (TypeError, ValueError) as error:
            raise UserError(f"{row.where}: the score is {value!r}, not a number ({_remedy('score')})") from error
        yield {"sentence1": _one(row, "sentence1", task), "sentence2": _one(row, "sentence2", task), "score": score}
