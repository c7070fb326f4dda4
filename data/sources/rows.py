"""Rows to documents: JSON lines, and any data set that `datasets` reads, streamed.

A row is a mapping; which of its columns hold text, title and id is said by the `Source`.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import HUB_PREFIX, Document, Source
from revela_hub.data.sources.unicode import printable_name, without_surrogates
from revela_hub.errors import UserError, first_line

JSON_LINES = (".jsonl", ".jsonl.gz")

_REMEDY = "each line must be one JSON object (exclude leaves a file out)"


@dataclass(frozen=True)
class Row:
    """One row and where it was found (`corpus.jsonl:17`), which is also the id of a row that has none."""

    where: str
    columns: Mapping[str, Any]


def row_documents(rows: Iterable[Row], source: Source) -> Iterator[Document]:
    """Makes a document of each row, or of each succession of rows that agree in `merge_column`.

    Raises:
        UserError: A column that the source names is not there, or does not hold text.
    """
    if source.merge_column is None:
        for row in rows:
            yield _document(row, _text(row, source), source)
        return
    column = source.merge_column
    for _, parts in groupby(rows, key=lambda row: column_value(row, column, "choose with merge_column")):
        merged = list(parts)
        text = " ".join(text for row in merged if (text := _text(row, source)))
        yield _document(merged[0], text, source)


def column_value(row: Row, name: str, remedy: str) -> Any:
    """What a row has in a column.

    Raises:
        UserError: There is no such column; the message names those that there are, and the remedy.
    """
    if name not in row.columns:
        columns = ", ".join(repr(column) for column in row.columns) or "none"
        raise UserError(f"{row.where}: no column {name!r}; the columns are {columns} ({remedy})")
    return row.columns[name]


def column_text(row: Row, name: str, remedy: str) -> str:
    """The text that a row has in a column; none for a null.

    Raises:
        UserError: There is no such column, or it holds something else.
    """
    value = column_value(row, name, remedy)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{row.where}: column {name!r} holds {type(value).__name__}, not text ({remedy})")
    return value


def _text(row: Row, source: Source) -> str:
    columns = source.text_columns
    if len(columns) == 1:
        return column_text(row, columns[0], "choose with text_column")
    return "\n\n".join(text for name in columns if (text := column_text(row, name, "choose with text_column")))


def _document(row: Row, text: str, source: Source) -> Document:
    if source.title_column is None:
        title = row.columns.get("title")
        title = title if isinstance(title, str) else ""
    else:
        title = column_text(row, source.title_column, "choose with title_column") if source.title_column else ""
    if source.id_column is None:
        name = row.columns.get("_id")
    else:
        name = column_value(row, source.id_column, "choose with id_column") if source.id_column else None
    # An empty line, so that the title is not taken for the beginning of the first sentence.
    text = f"{title}\n\n{text}" if title and text and not text.startswith(title) else text
    return Document(row.where if name is None else str(name), text, None, source.kind or "text")


def json_lines_rows(path: Path, report: ReadReport) -> Iterator[Row]:
    """Reads a file of JSON objects, one to a line, gzip'd where its name ends in `.gz`; empty lines are passed over.

    Raises:
        UserError: A line is not a JSON object, or the gzip'd data are damaged.
    """
    for where, text in text_lines(path, report):
        try:
            row = json.loads(text)
            if "\\u" in text:
                row = without_surrogates(row)
        except (ValueError, RecursionError) as error:  # a ValueError: a number of thousands of digits
            problem = (
                "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", "a number too long")
            )
            raise UserError(f"{where}: not valid JSON ({problem}); {_REMEDY}") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: {type(row).__name__} instead of an object; {_REMEDY}")
        yield Row(where, row)


def text_lines(path: Path, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
    """The lines of a file that are not empty, each with where it stands (`file:3`); gzip'd where the name ends in `.gz`.

    Raises:
        UserError: The file cannot be read, or the gzip'd data are damaged.
    """
    replaced, name = False, printable_name(path.as_posix())
    try:
        with cast("IO[bytes]", gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    text = line.decode()
                except UnicodeDecodeError:
                    text, replaced = line.decode(errors="replace"), True
                yield f"{name}:{number}", text.removeprefix("\ufeff")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{name}: damaged or not gzip'd ({error}); fetch or write it again") from error
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or error}") from error
    if report is not None:
        report.replaced += replaced


def dataset_rows(source: Source) -> Iterator[Row]:
    """Streams the rows of a data set: of the Hub, of a folder that `load_dataset` knows, or saved by `save_to_disk`.

    Raises:
        UserError: There is no such data set, configuration or split, or it cannot be read.
    """
    name = source.path.removeprefix(HUB_PREFIX)
    rows = enumerate(_open_dataset(source, name))
    while True:
        try:
            number, columns = next(rows)
        except StopIteration:
            return
        except Exception as error:  # any library below may fail here: network, parquet, gzip, JSON
            raise _unreadable(name, error) from error
        yield Row(f"{name}:{number}", columns)


def _open_dataset(source: Source, name: str) -> Iterable[Mapping[str, Any]]:
    if source.rows is not None:
        return cast("Iterable[Mapping[str, Any]]", source.rows)
    import datasets

    saved = [file for file in ("dataset_dict.json", "state.json") if Path(name, file).is_file()]
    try:
        if saved:
            opened = datasets.load_from_disk(name)
            splits = opened if isinstance(opened, datasets.DatasetDict) else {"train": opened}
        else:
            data_files = list(source.data_files) if isinstance(source.data_files, tuple) else source.data_files
            splits = datasets.load_dataset(
                name, source.name, data_files=data_files, revision=source.revision, streaming=True
            )
    except Exception as error:  # as above: what load_dataset raises depends on where the data are
        raise _unreadable(name, error) from error
    split = source.split or "train"
    if split not in splits:
        raise UserError(f"data set {name}: no split {split!r}; the splits are {', '.join(splits)}")
    return cast("Iterable[Mapping[str, Any]]", splits[split])


def _unreadable(name: str, error: Exception) -> UserError:
    return UserError(f"data set {name}: cannot be read: {first_line(error)}")
