"""Reading columns of Arrow files, and splitting a BEIR folder into the sources of a task."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from revela_hub.data.mixture.tasks import Task
from revela_hub.data.sources.beir import beir_files, beir_splits
from revela_hub.data.sources.source import Source
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")


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


def with_beir_parts(task: Task) -> Task:
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
