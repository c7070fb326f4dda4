"""Groups that were made before: rows whose column holds the list of a group's texts, such as the corpora of Revela's authors."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela_hub.data.sources.source import HUB_PREFIX, Source
from revela_hub.errors import UserError
from revela_hub.files import local_path

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


def stored_groups(
    sources: Sequence[Source], column: str, group_size: int, *, streaming: bool = False
) -> "Dataset | IterableDataset":
    """Read groups of texts as they are.

    Args:
        sources: data sets of the Hub (`hf:owner/name`), or files of JSON lines or parquet.
        column: the column with the list of a group's texts.
        group_size: longer groups are cut, shorter ones get absent chunks.
        streaming: return an `IterableDataset`, whose rows are read during training.

    Returns:
        The columns of `build_groups`. All chunks of a group have the group's number as their document, because the rows do not
        name their documents.
    """
    import datasets

    texts = datasets.List(datasets.Value("string"))
    features = datasets.Features({"group": datasets.Value("int64"), "document": texts, "text": texts})
    parts = []
    for source in sources:
        rows: Any = _opened(source, streaming)
        if column not in (columns := rows.column_names or list(next(iter(rows), {}))):
            raise UserError(f"{source.path}: no column {column!r}; the columns are {', '.join(columns)}")
        if source.max_documents is not None:
            rows = rows.take(source.max_documents)
        convert = partial(_group, column, group_size, source.path)
        parts.append(rows.map(convert, with_indices=True, remove_columns=columns, features=features))
    joined: Dataset | IterableDataset = datasets.concatenate_datasets(parts)
    return joined


def _opened(source: Source, streaming: bool) -> Any:
    import datasets

    split = source.split or "train"
    if source.is_dataset:
        name = source.path.removeprefix(HUB_PREFIX)
        if (Path(name) / "state.json").is_file():  # of `save_to_disk`
            return datasets.load_from_disk(name)
        files: Any = source.data_files
        given = {"data_files": files, "revision": source.revision, "split": split, "streaming": streaming}
        return datasets.load_dataset(name, source.name, **given)
    path = local_path(source.path)
    form = "parquet" if path.suffix == ".parquet" else "json"
    return datasets.load_dataset(form, data_files=str(path), split="train", streaming=streaming)


def _group(column: str, size: int, place: str, row: dict[str, Any], number: int) -> dict[str, Any]:
    texts = row[column]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{place}, row {number + 1}: the column {column!r} is not a list of texts")
    texts = texts[:size]
    absent = [""] * (size - len(texts))
    return {"group": number, "document": [f"{place}:{number}"] * len(texts) + absent, "text": texts + absent}
