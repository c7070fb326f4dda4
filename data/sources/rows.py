"""Rows of JSON lines, JSON arrays, parquet files, tables (CSV), qrels of BEIR folders, and any data set of `datasets`, all streamed.

JSON lines and tables are not read by `datasets`, which guesses types: it makes a date of the text "2020-01-01", the number 7 of the
id "007", and nothing of "NA".
"""

import csv
import gzip
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from revela_hub.data.sources.files import check_exists, source_files
from revela_hub.data.sources.report import ReadReport, counted
from revela_hub.data.sources.source import HUB_PREFIX, Source
from revela_hub.data.sources.unicode import printable_name, without_surrogates
from revela_hub.errors import UserError, first_line
from revela_hub.files import local_path

logger = logging.getLogger(__name__)

ROW_FILES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".parquet")
"""Endings of the files that are read by row wherever they are, in lower or upper case."""
TABLES = (".csv", ".tsv")
"""Endings of the files that are read by row if a source names them (`notes.csv`, `notes/*.csv`); in a folder, tables are text."""
JSON = ".json"
"""Ending of the files that are read by row if a source names the file and it holds an array of objects; else they are code."""
QRELS_HEADER = ["query-id", "corpus-id", "score"]


@dataclass(frozen=True)
class Row:
    """One row and its location (`corpus.jsonl:17`), which is also the id of a row without one."""

    where: str
    columns: Mapping[str, Any]

    def value(self, name: str) -> Any:
        """Return the value of a column; if it does not exist, the error lists those that do."""
        if name not in self.columns:
            columns = ", ".join(map(repr, self.columns)) or "none"
            raise UserError(f"{self.where}: no column {name!r}; the columns are {columns}")
        return self.columns[name]

    def text(self, name: str) -> str:
        """Return the text of a column; "" for null."""
        return self.as_text(name, self.value(name))

    def texts(self, name: str) -> list[str]:
        """Return the texts of a column that holds one or a list of them."""
        value = self.value(name)
        return [self.as_text(name, text) for text in (value if isinstance(value, list | tuple) else [value])]

    def as_text(self, name: str, value: Any) -> str:
        """Return a value of a column as text; "" for null."""
        if not isinstance(value, str | None):
            raise UserError(f"{self.where}: column {name!r} holds {type(value).__name__}, not text")
        return value or ""


def id_text(value: object) -> str:
    """Return an id as text, without white space around it: ids of a corpus, its queries and their judgements must meet."""
    return str(value).strip()


def read_rows(source: Source) -> Iterator[Row]:
    """Stream the rows of a source, at most `max_documents`; of qrels those with a grade above 0.

    Other files in a folder are skipped with a warning.
    """
    return islice(dataset_rows(source) if source.is_dataset else _rows_of_files(source), source.max_documents)


def _rows_of_files(source: Source) -> Iterator[Row]:
    check_exists(source)
    files = list(source_files(source, ReadReport()))
    readable = [path for path in files if has_rows(path, source) or _is_qrels(path)]
    if not readable:
        forms = ", ".join((*ROW_FILES, *TABLES, JSON))
        raise UserError(f"{source.path}: rows are read from {forms}, or a data set ({HUB_PREFIX}owner/name)")
    if skipped := len(files) - len(readable):
        logger.warning("%s: skipped %s without rows", source.path, counted(skipped, "file"))
    for path in readable:
        if _is_qrels(path):
            yield from (row for row in qrels_rows(path) if row.columns["score"] > 0)
        else:
            yield from file_rows(path)


def has_rows(path: Path, source: Source) -> bool:
    """Whether a file of a source is read by row."""
    if path.suffix.lower() == JSON:
        return source.kind != "code" and path == local_path(source.path) and _is_array(path)
    named = source.path.lower().endswith(TABLES)
    return path.name.lower().endswith(ROW_FILES + TABLES if named else ROW_FILES)


def _is_array(path: Path) -> bool:
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return "".join(file.read(1024).split()).startswith("[{")


def _is_qrels(path: Path) -> bool:
    return path.parent.name == "qrels" and path.name.endswith((".tsv", ".tsv.gz"))


def file_rows(path: Path) -> Iterator[Row]:
    """Read a table, a parquet file, a JSON array, or else JSON lines, plain or .gz.

    A row's location is `file:line` in text, where the row ends, and `file:number` in the other files, both from 1.
    """
    ending = path.suffix.lower()
    read = _table_rows if ending in TABLES else _parquet_rows if ending == ".parquet" else _json_lines
    read = _array_rows if ending == JSON and _is_array(path) else read
    number = 0
    try:
        for number, columns in read(path):
            yield Row(location(path, number), columns)
    except (UserError, FileNotFoundError):
        raise
    except Exception as error:  # of any of the libraries
        raise UserError(f"{location(path, number)}: damaged after this row: {first_line(error)}") from error


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in text_lines(path):
        try:
            columns = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{location(path, number)}: not valid JSON: {error}") from error
        if not isinstance(columns, dict):
            raise UserError(f"{location(path, number)}: {type(columns).__name__} instead of a JSON object")
        yield number, without_surrogates(columns) if "\\u" in text else columns


def _array_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    rows = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_unique)
    yield from enumerate(map(dict, without_surrogates(rows)), start=1)


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, pre_buffer=False) as file:
        _unique([(name, None) for name in file.schema_arrow.names])
        batches = file.iter_batches(batch_size=1024)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


def _table_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a table with a header, separated by tabs, semicolons or commas, whichever the header has most of.

    Cells may contain line breaks in quotes.
    """
    csv.field_size_limit(2**31 - 1)
    with open(path, encoding="utf-8-sig", newline="") as file:
        delimiter = max("\t;,", key=file.readline().count)
        file.seek(0)
        rows = csv.DictReader(file, delimiter=delimiter, strict=True)
        # Spreadsheets write several columns without a name.
        _unique([(name, None) for name in rows.fieldnames or () if name.strip()])
        for row in rows:
            if None in row:
                raise UserError(f"{location(path, rows.line_num)}: more cells than columns in the first line")
            yield rows.line_num, row


def _unique(columns: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return columns as a dictionary; of two with the same name, only one would be read."""
    found = dict(columns)
    if len(found) < len(columns):
        raise ValueError(f"two columns have the same name: {', '.join(name for name, _ in columns)}")
    return found


def location(path: Path, number: int) -> str:
    """Return the location of a line or row, for messages and as an id: `folder/file.jsonl:17`."""
    return f"{printable_name(path.as_posix())}:{number}"


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines of a file with their numbers from 1; gzipped if the name ends in `.gz`."""
    opened: Any = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", newline="\n") as file:
        try:
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text: {error}") from error


def qrels_rows(path: Path) -> Iterator[Row]:
    """Read relevance judgements: tab-separated columns with the header `QRELS_HEADER`, and a whole number as the score."""
    for number, line in text_lines(path):
        where, cells = location(path, number), [cell.strip() for cell in line.split("\t")]
        if number == 1 and cells == QRELS_HEADER:
            continue
        if number == 1 or len(cells) != 3 or not all(cells) or not re.fullmatch(r"[+-]?\d{1,9}", cells[2]):
            raise UserError(
                f"{where}: expected {'<tab>'.join(QRELS_HEADER)} in the first line, then two ids and a whole number"
            )
        yield Row(where, dict(zip(QRELS_HEADER, (*cells[:2], int(cells[2])), strict=True)))


def dataset_rows(source: Source) -> Iterator[Row]:
    """Stream the rows of a data set: from the Hub, a folder that `load_dataset` reads, or one saved by `save_to_disk`."""
    import datasets

    name, split = source.path.removeprefix(HUB_PREFIX), source.split or "train"
    files = list(source.data_files) if isinstance(source.data_files, tuple) else source.data_files
    if source.rows is not None:
        splits: Any = {split: source.rows}
    elif (Path(name) / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(name)
    elif (Path(name) / "state.json").is_file():
        splits = {"train": datasets.load_from_disk(name)}
    else:
        splits = datasets.load_dataset(name, source.name, data_files=files, revision=source.revision, streaming=True)
    if split not in splits:
        raise UserError(f"data set {name}: no split {split!r}; the splits are {', '.join(splits)}")
    # Rows of two splits, or of two files, have different ids.
    file = Path(files).name if isinstance(files, str) else None
    place = ":".join(filter(None, (name, source.name, source.split, file)))
    for number, columns in enumerate(splits[split]):
        yield Row(f"{place}:{number}", columns)
