"""Reading rows: JSON lines, a JSON array, parquet files, tables (CSV), any data set of `datasets` (streamed), and the relevance judgements of a BEIR folder.

A row is a mapping; the `Source` says which of its columns hold text, title and id.
"""

import csv
import gzip
import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from revela_hub.data.sources.files import check_exists, source_files
from revela_hub.data.sources.report import ReadReport, counted
from revela_hub.data.sources.source import HUB_PREFIX, Source
from revela_hub.data.sources.unicode import UTF16, printable_name, without_surrogates
from revela_hub.errors import UserError, first_line
from revela_hub.files import local_path

logger = logging.getLogger(__name__)

PARQUET = ".parquet"
ROW_FILES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", PARQUET)
"""Endings of the files that `file_rows` reads wherever it finds them, in lower or upper case."""
TABLES = (".csv", ".tsv")
"""Endings of the files that `file_rows` reads if a source names them (`notes.csv`, `notes/*.csv`); in a folder, tables are text."""
JSON = ".json"
"""Ending of the files that `file_rows` reads if a source names the file and it holds an array of objects; else they are code."""
MAX_CELL = 2**31 - 1
QRELS_HEADER = ["query-id", "corpus-id", "score"]


@dataclass(frozen=True)
class Row:
    """One row and its location (`corpus.jsonl:17`), which is also the id of a row without one."""

    where: str
    columns: Mapping[str, Any]


def read_rows(source: Source) -> Iterator[Row]:
    """Stream the rows of a source, at most `max_documents`; of judgements those with a grade above 0.

    Other files in a folder are skipped with a warning.
    """
    rows = dataset_rows(source) if source.is_dataset else _file_rows(source)
    return islice(rows, source.max_documents)


def _file_rows(source: Source) -> Iterator[Row]:
    check_exists(source)
    files = list(source_files(source, ReadReport()))
    readable = [path for path in files if has_rows(path, source) or _is_judgements(path)]
    if not readable:
        forms = f"{', '.join(ROW_FILES + TABLES)}, {JSON}, a BEIR folder, or a data set ({HUB_PREFIX}owner/name)"
        raise UserError(f"{source.path}: rows are read from {forms}")
    if skipped := len(files) - len(readable):
        logger.warning(
            "%s: skipped %s without rows (not JSON lines, parquet or a table)", source.path, counted(skipped, "file")
        )
    for path in readable:
        if _is_judgements(path):
            yield from (row for row in read_judgements(path) if row.columns["score"] > 0)
        else:
            report = ReadReport()
            yield from file_rows(path, report)
            warn_of_replaced(path, report)


def has_rows(path: Path, source: Source) -> bool:
    """Whether `file_rows` reads a file of a source."""
    if path.suffix.lower() == JSON:
        return source.kind != "code" and path == local_path(source.path) and _is_array(path)
    named = source.path.lower().endswith(TABLES)
    return path.name.lower().endswith(ROW_FILES + TABLES if named else ROW_FILES)


def _is_array(path: Path) -> bool:
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return "".join(file.read(1024).split()).startswith("[{")


def warn_of_replaced(path: Path, report: ReadReport) -> None:
    """Warn if a file had invalid UTF-8."""
    if report.replaced:
        name = printable_name(path.as_posix())
        logger.warning("%s: invalid UTF-8, read as \ufffd; save the file as UTF-8 to keep these letters", name)


def _is_judgements(path: Path) -> bool:
    return path.parent.name == "qrels" and path.name.endswith((".tsv", ".tsv.gz"))


def column_value(row: Row, name: str, remedy: str) -> Any:
    """Return the value of a column; an error that a column does not exist lists those that do, and adds the remedy."""
    if name not in row.columns:
        columns = ", ".join(repr(column) for column in row.columns) or "none"
        raise UserError(f"{row.where}: no column {name!r}; the columns are {columns} ({remedy})")
    return row.columns[name]


def column_text(row: Row, name: str, remedy: str) -> str:
    """Return the text of a column; "" for null."""
    value = column_value(row, name, remedy)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{row.where}: column {name!r} holds {type(value).__name__}, not text ({remedy})")
    return value


def file_rows(path: Path, report: ReadReport) -> Iterator[Row]:
    """Read a file for which `has_rows` holds, or one of JSON lines or an array with another name."""
    name = path.name.lower()
    if name.endswith(JSON) and _is_array(path):
        return json_array_rows(path)
    if name.endswith(TABLES):
        return table_rows(path, report)
    return parquet_rows(path) if name.endswith(PARQUET) else json_lines_rows(path, report)


def table_rows(path: Path, report: ReadReport) -> Iterator[Row]:
    """Read a table of text with a header; a row's location is `file:line`, where it ends.

    Columns are separated by tabs, semicolons or commas, whichever the header has most of. Cells may contain line breaks in quotes.
    Values stay texts, unlike in `datasets`, which reads "007" as a number and "NA" as nothing.
    """
    name = printable_name(path.as_posix())
    csv.field_size_limit(MAX_CELL)
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        delimiter = max("\t;,", key=file.readline().count)
        file.seek(0)
        rows = csv.DictReader(file, delimiter=delimiter, strict=True)
        columns = list(rows.fieldnames or ())
        _refuse_repeated(name, filter(str.strip, columns))  # spreadsheets write several columns without a name
        replaced = False
        try:
            for row in rows:
                if None in row:
                    raise UserError(
                        f"{name}:{rows.line_num}: more cells than the {len(columns)} columns of the first line"
                    )
                replaced = replaced or any("\ufffd" in (cell or "") for cell in row.values())
                yield Row(f"{name}:{rows.line_num}", row)
        except csv.Error as error:
            raise UserError(f"{name}: after line {rows.line_num}: {error}") from error
        report.replaced += replaced


def parquet_rows(path: Path) -> Iterator[Row]:
    """Read a parquet file in batches; a row's location is `file:number`, from 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    name, number = printable_name(path.as_posix()), 0
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            _refuse_repeated(name, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield Row(f"{name}:{number}", row)
    except pa.ArrowException as error:
        raise UserError(f"{name}: damaged or not a parquet file ({first_line(error)})") from error


def json_lines_rows(path: Path, report: ReadReport) -> Iterator[Row]:
    """Read a file with one JSON object per line, gzipped if its name ends in `.gz`; empty lines are skipped."""
    for where, text in text_lines(path, report):
        yield Row(where, _json_object(where, text))


def json_array_rows(path: Path) -> Iterator[Row]:
    """Read a JSON array of objects, whole; a row's location is `file:number`, from 1."""
    name = printable_name(path.as_posix())
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=partial(_once, name))
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{name}:{number}: {type(row).__name__} instead of a JSON object")
        yield Row(f"{name}:{number}", without_surrogates(row))


def _once(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        _refuse_repeated(where, (name for name, _ in pairs))
    return found


def _refuse_repeated(where: str, names: Iterable[str]) -> None:
    """Raise a `UserError` for two columns with the same name, of which only one would be read."""
    if repeated := [name for name, number in Counter(names).items() if number > 1]:
        raise UserError(f"{where}: there are two columns {repeated[0]!r}: rename or remove one of them")


def id_text(value: object) -> str:
    """Return an id as text, without white space around it: ids of a corpus, its queries and their judgements must meet."""
    return str(value).strip()


def _json_object(where: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=partial(_once, where))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: {type(value).__name__} instead of a JSON object")
    return without_surrogates(value) if "\\u" in text else value


def text_lines(path: Path, report: ReadReport) -> Iterator[tuple[str, str]]:
    """Yield the non-empty lines of a file with their locations (`file:3`); gzipped if the name ends in `.gz`."""
    replaced, name = False, printable_name(path.as_posix())
    try:
        with cast("IO[bytes]", gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")) as file:
            for number, line in enumerate(file, start=1):
                if number == 1 and line.startswith(UTF16):
                    raise UserError(f"{name}: UTF-16 text; save it as UTF-8")
                if not line.strip():
                    continue
                try:
                    text = line.decode()
                except UnicodeDecodeError:
                    text, replaced = line.decode(errors="replace"), True
                yield f"{name}:{number}", text.removeprefix("\ufeff")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{name}: damaged or not gzipped ({error})") from error
    report.replaced += replaced


def dataset_rows(source: Source) -> Iterator[Row]:
    """Stream the rows of a data set: from the Hub, a folder that `load_dataset` reads, or one saved by `save_to_disk`."""
    name, split = source.path.removeprefix(HUB_PREFIX), source.split or "train"
    # Rows of two splits, or of two files, have different ids.
    files = Path(source.data_files).name if isinstance(source.data_files, str) else None
    place = ":".join(filter(None, (name, source.name, source.split, files)))
    try:
        splits = _splits(source, name) if source.rows is None else {split: source.rows}
        for number, columns in enumerate(splits.get(split, ())):
            yield Row(f"{place}:{number}", columns)
    except Exception as error:  # from any library below: network, parquet, gzip, JSON
        raise UserError(f"data set {name}: cannot be read: {first_line(error)}") from error
    if split not in splits:
        raise UserError(f"data set {name}: no split {split!r}; the splits are {', '.join(splits)}")


def _splits(source: Source, name: str) -> Mapping[str, Any]:
    import datasets

    if any(Path(name, file).is_file() for file in ("dataset_dict.json", "state.json")):
        opened = datasets.load_from_disk(name)
        return opened if isinstance(opened, datasets.DatasetDict) else {"train": opened}
    data_files = list(source.data_files) if isinstance(source.data_files, tuple) else source.data_files
    splits: Mapping[str, Any] = datasets.load_dataset(
        name, source.name, data_files=data_files, revision=source.revision, streaming=True
    )
    return splits


def read_judgements(path: Path) -> Iterator[Row]:
    """Yield the lines of a file of judgements (qrels); the columns are those of the header, with the grade as a number."""
    report = ReadReport()
    for number, (where, line) in enumerate(text_lines(path, report)):
        fields = [field.strip() for field in line.rstrip("\r\n").split("\t")]
        if number == 0:
            if fields != QRELS_HEADER:
                raise UserError(f"{where}: the first line must be the header {'<tab>'.join(QRELS_HEADER)}")
            continue
        if len(fields) != 3 or not all(fields) or not fields[2].lstrip("+-").isdecimal() or len(fields[2]) > 9:
            raise UserError(f"{where}: expected the ids of a query and a document, and a whole number, between tabs")
        yield Row(where, dict(zip(QRELS_HEADER, (*fields[:2], int(fields[2])), strict=True)))
    if report.replaced:
        raise UserError(f"{path}: not UTF-8 text, so ids may not match those of the other files")
