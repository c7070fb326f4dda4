"""Text that is asked for later, taken out of documents while they are read: see `Source.held_out`."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.rows import json_lines_rows
from revela_hub.data.sources.source import Document
from revela_hub.errors import UserError

HELD_OUT = "held_out.jsonl"


def read_held_out(path: str | Path) -> dict[str, list[str]]:
    """Document id to the texts to take out: of a file of JSON lines with `document` and `text`, or a folder with one.

    Raises:
        UserError: There is no such file, or a line is something else.
    """
    file = Path(path).expanduser()
    file = file / HELD_OUT if file.is_dir() else file
    if not file.is_file():
        raise UserError(f"no {file}: a probe's folder has one (revela-hub probe DATA --output_dir DIR)")
    held_out: dict[str, list[str]] = defaultdict(list)
    for row in json_lines_rows(file, ReadReport()):
        document, text = row.columns.get("document"), row.columns.get("text")
        if not isinstance(document, str) or not isinstance(text, str) or not text:
            raise UserError(f'{row.where}: an object with "document" and "text" is needed')
        held_out[document].append(text)
    return dict(held_out)


def without_held_out(
    documents: Iterator[Document], held_out: Mapping[str, Sequence[str]], report: ReadReport
) -> Iterator[Document]:
    """The documents without the texts; each that was found is counted in `report.held_out`."""
    for document in documents:
        text = document.text
        for removed in held_out.get(document.id, ()):
            report.held_out += removed in text
            text = text.replace(removed, _gap(removed))
        yield document if text is document.text else replace(document, text=text)


def _gap(removed: str) -> str:
    """What stands in its place: as many line ends, so that the lines below keep their numbers."""
    return re.sub(r"[^\n]", "", removed)
