"""Rows of the sources of a mixture, and columns of Arrow files on disk.

A source is a file, folder or pattern of JSON lines, a data set (`hf:...`), or a BEIR folder: corpus, queries, judgements.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, TypeVar, cast, overload

from revela_hub.data.mixture.tasks import Task
from revela_hub.data.sources.beir import beir_files, beir_splits, read_judgements
from revela_hub.data.sources.documents import source_files
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.rows import JSON_LINES, Row, dataset_rows, json_lines_rows
from revela_hub.data.sources.source import HUB_PREFIX, Source
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")


class Column(Sequence[T]):
    """A column of a data set, read from disk one value at a time."""

    def __init__(self, dataset: "Dataset", name: str) -> None:
        self._column = dataset.data.column(name)  # not dataset[name][i], which takes 20 times as long

    def __len__(self) -> int:
        return len(self._column)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """The value at `index`, or the list of values in a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return cast("T", self._column[index].as_py())

    def __iter__(self) -> Iterator[T]:
        for chunk in self._column.iterchunks():
            yield from chunk.to_pylist()


def with_beir_parts(task: Task) -> Task:
    """A task on a BEIR folder as a task on its three files; its judgements are read by `read_rows`."""
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
        raise UserError(f"task {task.name}: which split of the BEIR folder {folder}? There is: {', '.join(splits)}")
    try:
        files = beir_files(folder, task.split)
    except UserError as error:
        raise UserError(f"task {task.name}: {error}") from error
    return replace(
        task,
        source=Source(str(files.qrels)),
        columns={"anchor": ("query-id",), "positive": ("corpus-id",)},
        corpus=Source(str(files.corpus)),
        queries=Source(str(files.queries)),
    )


def read_rows(source: Source) -> Iterator[Row]:
    """Streams the rows of JSON lines, of a data set, or of a BEIR folder's judgements (those above 0).

    Raises:
        UserError: There is nothing to read, or it cannot be read.
    """
    rows = dataset_rows(source) if source.is_dataset else _file_rows(source)
    return islice(rows, source.max_documents)


def _file_rows(source: Source) -> Iterator[Row]:
    report, found = ReadReport(), False
    for path in source_files(source, report):
        found = True
        if path.name.endswith((".tsv", ".tsv.gz")):
            for where, query, document, grade in read_judgements(path):
                if grade > 0:
                    yield Row(where, {"query-id": query, "corpus-id": document, "score": grade})
        elif path.name.endswith(JSON_LINES):
            yield from json_lines_rows(path, report)
        else:
            forms = f"{', '.join(JSON_LINES)}, a BEIR folder, or a data set ({HUB_PREFIX}csv with data_files, ...)"
            raise UserError(f"{path}: rows are read from {forms}")
    if not found:
        raise UserError(f"no such file or folder: {source.path}, or nothing in it")
