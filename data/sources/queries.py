"""Reading queries without judgements: lines of text, JSON lines, or the queries of a BEIR folder."""

from collections.abc import Iterator
from pathlib import Path

from revela_hub.data.sources.beir import find_file
from revela_hub.data.sources.rows import file_rows, has_rows, id_text, location, text_lines
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
    found: dict[str, tuple[str, str]] = {}
    for id_, text in _queries(find_file(place, "queries.jsonl") if place.is_dir() else place):
        if query := " ".join(text.split()):
            found.setdefault(text_key(query), (id_, query))
    if not found:
        raise UserError(f"{path} has no queries: give a file with one query per line, JSON lines, or a BEIR folder")
    return dict(found.values())


def _queries(path: Path) -> Iterator[tuple[str, str]]:
    if not has_rows(path, Source(str(path))):
        yield from ((location(path, number), line) for number, line in text_lines(path))
        return
    for row in file_rows(path):
        column = next((name for name in COLUMNS if name in row.columns), " or ".join(COLUMNS))
        yield id_text(row.columns.get("_id") or row.where), row.text(column)
