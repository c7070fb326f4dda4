"""Reading the rows of one task of a mixture, as pairs, labelled texts or scored sentences.

    source --read_rows--> Row --(where, columns, ids resolved)--> Pair

A task is read into memory; its corpus and its training examples are cached on disk.
"""

import heapq
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

from revela_hub.data.mixture.pairs import Pair
from revela_hub.data.mixture.tasks import Task
from revela_hub.data.row_cache import cached_rows, rows_fingerprint
from revela_hub.data.sources.beir import beir_files, beir_splits, titled
from revela_hub.data.sources.rows import Row, id_text, read_rows
from revela_hub.data.sources.source import Source
from revela_hub.data.text.ngram_overlap import ExcludedTexts, evaluation_files
from revela_hub.errors import UserError

EXCLUDED_BY_WHERE = "excluded by where"
NO_PASSAGE = "passage is not in the corpus"
NO_QUERY = "query is not in queries"

_ID_COLUMN = re.compile(r"(^|[_-])ids?$", re.IGNORECASE)
_MIN_ID_ROWS = 8  # rows of single words with digits after which a column is taken for ids
_NUMBERED = re.compile(r"negatives?(?:_(\d+))?")


def with_beir_parts(task: Task) -> Task:
    """Return a task on a BEIR folder as a task on its three files, and one that excludes a folder with the files to exclude."""
    task = replace(task, exclude=tuple(chain.from_iterable(map(evaluation_files, task.exclude))))
    splits = [] if task.source.is_dataset else beir_splits(task.source.path)
    if not splits and task.split is None:
        return task
    if task.split not in splits or not task.has_passages or task.corpus or task.queries or task.columns:
        raise UserError(
            f"task {task.name}: split is {task.split}; a BEIR folder, such as {task.source.path} with qrels/<split>.tsv"
            f" ({', '.join(splits) or 'none'}), needs one, and is for type retrieval, without corpus and columns"
        )
    corpus, queries, qrels = (Source(str(file)) for file in beir_files(task.source.path, task.split))
    columns = {"anchor": ("query-id",), "positive": ("corpus-id",)}
    return replace(task, source=qrels, split=None, columns=columns, corpus=corpus, queries=queries)


class Corpus(Sequence[str]):
    """The texts of a corpus, memory-mapped from the cache; memory holds the ids.

    Title and text are joined by a space, as in BEIR and in the evaluation.
    """

    def __init__(self, source: Source, cache_dir: str | Path | None = None) -> None:
        name = f"corpus-{rows_fingerprint({}, [source])}"
        rows, _ = cached_rows(name, {"id": "string", "text": "string"}, lambda: _texts_of(source), cache_dir=cache_dir)
        self._texts = rows.data.column("text")  # not rows["text"], where reading a text takes 20 times as long
        ids = rows.data.column("id").to_pylist()
        self._rows = dict(zip(reversed(ids), reversed(range(len(ids))), strict=True))  # the first row of an id counts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, row: Any) -> Any:
        return self._texts[row].as_py()

    def find(self, id_: str) -> str | None:
        """Return the text with this id."""
        return self[self._rows[id_]] if id_ in self._rows else None


def _texts_of(source: Source) -> Iterator[dict[str, str]]:
    title = "title" if source.title_column is None else source.title_column
    for row in read_rows(source):
        values = [row.columns.get(title), *map(row.value, source.text_columns)]
        text = " ".join(str(value) for value in values if value)
        yield {"id": id_text(row.value(source.id_column or "_id")), "text": text}


def read_pairs(
    task: Task, corpus: Corpus | None, queries: Corpus | None, seed: int, dropped: Counter[str]
) -> Iterator[Pair]:
    """Yield a pair for each positive of a row of retrieval, pairs or triplets; with a corpus, positives and negatives are ids."""
    rows = _selected_rows(task, seed, dropped)
    first = list(islice(rows, 8 * _MIN_ID_ROWS))
    _check_no_ids(first, task)
    for row in chain(first, rows):
        anchor = _found(_one(row, "anchor", task), queries)
        if anchor is None:
            dropped[NO_QUERY] += 1
            continue
        instruction = _one(row, "instruction", task) if "instruction" in task.columns else ""
        negatives = tuple(filter(None, (_found(text, corpus) for text in _negatives(row, task))))
        for text in _texts(row, "positive", task):
            if (positive := _found(text, corpus)) is None:
                dropped[NO_PASSAGE] += 1
            else:
                yield Pair(anchor, positive, negatives, instruction)


def _found(text: str, corpus: Corpus | None) -> str | None:
    return text if corpus is None else corpus.find(id_text(text))


def read_labelled(task: Task, seed: int, dropped: Counter[str]) -> Iterator[Pair]:
    """Yield the texts of classification and clustering with their labels, or clusters, as the positives."""
    [name] = task.columns.get("label", ("label",))
    for row in _selected_rows(task, seed, dropped):
        texts, labels = _texts(row, "text", task), row.value(name)
        labels = [task.labels.get(each, each) for each in (labels if isinstance(labels, list | tuple) else [labels])]
        if task.mode == "label" and any(isinstance(label, int | float) for label in labels):
            raise UserError(
                f"{row.where}: the label is {labels[0]!r}, but with mode: label it is the text of the positive; choose a column"
                " with the names of the labels, or mode: example"
            )
        for text, label in zip(texts, labels, strict=True):
            yield Pair(text, "" if label is None else str(label))


def read_scored(task: Task, seed: int, dropped: Counter[str]) -> Iterator[tuple[str, str, float]]:
    """Yield the pairs of sentences of sts with their scores."""
    [name] = task.columns.get("score", ("score",))
    for row in _selected_rows(task, seed, dropped):
        yield _one(row, "sentence1", task), _one(row, "sentence2", task), float(row.value(name))


def _selected_rows(task: Task, seed: int, dropped: Counter[str]) -> Iterator[Row]:
    """Return the rows selected by `where`, or a sample of `max_rows` of them."""
    rows = _rows_where(task, dropped)
    if task.max_rows is None:
        return rows
    draw = Random(seed).random
    return iter(heapq.nsmallest(task.max_rows, rows, key=lambda row: draw()))


def _rows_where(task: Task, dropped: Counter[str]) -> Iterator[Row]:
    for row in read_rows(task.source):
        row = Row(f"{row.where}: task {task.name}", row.columns)  # for messages
        values = ((row.value(name), allowed) for name, allowed in task.where.items())
        if all(value in allowed or str(value) in map(str, allowed) for value, allowed in values):  # 1 is 1.0 and "1"
            yield row
        else:
            dropped[EXCLUDED_BY_WHERE] += 1


def excluded_texts(task: Task) -> ExcludedTexts | None:
    """Return the texts of the task's evaluation sets; None without such sets."""
    excluded = ExcludedTexts()
    for source in task.exclude:
        rows = read_rows(source)
        excluded.add(source.path, (text for row in rows for name in source.text_columns for text in row.texts(name)))
    return excluded if task.exclude else None


# --- columns


def _texts(row: Row, role: str, task: Task, names: Sequence[str] = ()) -> list[str]:
    """Return the texts or ids of a role, one or those of a list; several columns are joined by a space."""
    found = []
    for name in names or task.columns.get(role, (role,)):
        value = row.value(name)
        found.append([_text(row, name, item) for item in (value if isinstance(value, list | tuple) else [value])])
    return found[0] if len(found) == 1 else [" ".join(text for texts in found for text in texts if text)]


def _text(row: Row, name: str, value: Any) -> str:
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):  # passages written as {title, text}
        return titled(value.get("title"), value["text"])
    return str(value) if type(value) is int else row.as_text(name, value)


def _one(row: Row, role: str, task: Task) -> str:
    texts = _texts(row, role, task)
    if len(texts) != 1:
        raise UserError(f"{row.where}: {role} is a list of {len(texts)}; one text is needed")
    return texts[0]


def _negatives(row: Row, task: Task) -> list[str]:
    """Return the row's negatives, from the task's columns or by default from those with such names, in order."""
    if task.type == "pairs":
        return []
    if task.type == "triplets":
        return _texts(row, "negative", task)
    names = list(task.columns.get("negatives", ()))
    if not names:
        numbers = {name: int(match[1] or 0) for name in row.columns if (match := _NUMBERED.fullmatch(name))}
        names = sorted(numbers, key=numbers.__getitem__)
    return [text for name in names for text in _texts(row, "negatives", task, (name,)) if text]


def _check_no_ids(rows: Sequence[Row], task: Task) -> None:
    """Raise an error if the first rows have ids instead of text: without its `corpus`, a task would train on the ids of passages."""
    for role, file, source in (("positive", "corpus", task.corpus), ("anchor", "queries", task.queries)):
        texts = [text for row in rows for text in _texts(row, role, task)] if source is None else []
        are_ids = bool(texts) and all(len(text.split()) < 2 and any(map(str.isdigit, text)) for text in texts)
        names = task.columns.get(role, (role,))
        if are_ids and (len(rows) >= _MIN_ID_ROWS or any(map(_ID_COLUMN.search, names))):
            raise UserError(
                f"{rows[0].where}: {role} is the column {' and '.join(names)}, which contains ids instead of text: name the"
                f" file with the texts ({file}: FILE), or choose another column"
            )
