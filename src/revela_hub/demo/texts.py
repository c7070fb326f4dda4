"""The texts of the page: the built-in sample, and text that a visitor pastes or uploads.

Uploads are only read as UTF-8 text. They are never executed or unpickled, and only as large as `MAX_BYTES`.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from revela_hub.data.sources.source import Document
from revela_hub.errors import UserError

MAX_BYTES = 1_000_000
"""Maximum size of a pasted or uploaded text."""
MAX_PASSAGES = 2000
"""Maximum number of passages of a pasted or uploaded text: they are encoded while the visitor waits."""
UPLOAD_TYPES = (".txt", ".md", ".jsonl")
"""Extensions of uploads."""
MAX_QUERY = 2000
"""Maximum number of characters of a query."""
_PATH = re.compile(r"(?:(?<![\w/.:])~?|[A-Za-z]:)(?:[/\\][^\s/\\:'\"<>|]+)+[/\\]([^\s/\\:'\"<>|]+)")


@cache
def sample() -> dict[str, Any]:
    """Return the built-in sample: `queries` and `passages`."""
    loaded: dict[str, Any] = yaml.safe_load(files("revela_hub.demo").joinpath("sample.yaml").read_text("utf-8"))
    return loaded


def sample_documents() -> Iterator[Document]:
    """Yield the passages of the built-in sample."""
    for passage in sample()["passages"]:
        yield Document(passage["title"], f"{passage['title']}\n\n{passage['text'].strip()}", None, "text")


def documents_of_text(text: str) -> list[Document]:
    """Return pasted text as a document."""
    if not text.strip():
        raise UserError("the text is empty: paste some text, or upload a file")
    if (size := len(text.encode(errors="replace"))) > MAX_BYTES:
        raise UserError(f"the text has {size:,} bytes, more than the {MAX_BYTES:,} allowed here: shorten it")
    return [Document("your text", text.encode(errors="replace").decode(), None, "text")]


def documents_of_upload(file: Path) -> list[Document]:
    """Return the documents of an uploaded file: text, Markdown, or JSON lines with the field `text`.

    Raises:
        UserError: Its extension is not one of `UPLOAD_TYPES`, or it is too large, not UTF-8, empty, or not valid JSON lines.
    """
    name = file.name
    if file.suffix.lower() not in UPLOAD_TYPES:
        raise UserError(f"{name}: only {', '.join(UPLOAD_TYPES)} files are read")
    with file.open("rb") as stream:
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise UserError(f"{name} has more than the {MAX_BYTES:,} bytes allowed here: upload a part of it")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text: save it as UTF-8") from error
    if "\0" in text:
        raise UserError(f"{name} is a binary file, not text")
    if file.suffix.lower() != ".jsonl":
        return [Document(name, document.text, None, "text") for document in documents_of_text(text)]
    rows = [_row(line, f"{name}:{number}") for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not any(row.text.strip() for row in rows):
        raise UserError(f"{name} is empty: each line needs a JSON object with the field text")
    return rows


def _row(line: str, place: str) -> Document:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: invalid JSON: each line needs a JSON object with the field text") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise UserError(f"{place}: no field text: each line needs a JSON object with the field text")
    title = row["title"] if isinstance(row.get("title"), str) else ""
    text = f"{title}\n\n{row['text']}" if title else row["text"]
    return Document(place, text.encode(errors="replace").decode(), None, "text")


def card_text(card: str) -> str:
    r"""Return a model card without its metadata and pictures, whose files the page does not serve.

    >>> card_text("---\ntags: [x]\n---\n# A model\n\n![A curve](curve.png)\nText")
    '# A model\n\n\nText'
    """
    body = re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL)
    return without_paths(re.sub(r"!\[[^\]]*\]\([^)]*\)", "", body))


def without_paths(message: str) -> str:
    """Return a message in which paths of this machine are shortened to file names.

    >>> without_paths("/home/me/models/retriever/config.json is damaged: run it again, see https://hf.co/a/b")
    'config.json is damaged: run it again, see https://hf.co/a/b'
    """
    return _PATH.sub(r"\1", message)
