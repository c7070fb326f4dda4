"""Reading queries without judgements: lines of text, JSON lines, or the queries of a BEIR folder."""

from collections.abc import Iterator
from pathlib import Path

from revela_hub.data.sources.beir import find_file, is_beir
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.rows import file_rows, has_rows, id_text, text_lines, warn_of_replaced
from revela_hub.data.sources.source import Source
from revela_hub.data.text.same_text import text_key
from revela_hub.errors import UserError
from revela_hub.files import local_path

COLUMNS = ("text", "query", "question", "anchor")
"""Columns of JSON lines and tables that may hold the query, the first one present."""


def read_queries(path: str | Path) -> dict[str, str]:
    """Read queries: id (in JSON lines the `_id`, elsewhere `file:line`) to text, without empty and repeated ones.

    Args:
        path: A text file with one query per line, JSON lines or a table with a column of `COLUMNS`, or a BEIR folder.
    """
    place = local_path(path)
    if place.is_dir():
        if not is_beir(place):
            raise UserError(
                f"{path} is a folder without queries.jsonl: give a BEIR folder, or a file with one query per line"
            )
        place = find_file(place, "queries.jsonl")
    if not place.is_file():
        raise UserError(f"no file {path}: give a file with one query per line, JSON lines, or a BEIR folder")
    found: dict[str, str] = {}
    seen: set[str] = set()
    report = ReadReport()
    for id_, text in _rows(place, report) if has_rows(place, Source(str(place))) else text_lines(place, report):
        query = " ".join(text.split())
        if query and (key := text_key(query)) not in seen:
            seen.add(key)
            found[id_] = query
    warn_of_replaced(place, report)
    if not found:
        raise UserError(f"{path} has no queries: give a file with one query per line, JSON lines, or a BEIR folder")
    return found


def _rows(path: Path, report: ReadReport) -> Iterator[tuple[str, str]]:
    for row in file_rows(path, report):
        text = next((row.columns[name] for name in COLUMNS if name in row.columns), None)
        if not isinstance(text, str):
            raise UserError(f"{row.where}: no text in one of the columns {', '.join(COLUMNS)}; it has: {row.columns}")
        name = row.columns.get("_id")
        yield (row.where if name is None else id_text(name)), text
