r"""Reading prompts and answers from JSON lines, in several common formats.

    {"prompt": "Who wrote Emma?\n", "answer": "Jane Austen"}                      used unchanged, without a template
    {"task": "fact_checking", "input": "Emma is a novel.", "answer": "SUPPORTS"}  through a template of templates.yaml
    {"question": "Who wrote Emma?", "answers": ["Jane Austen", "Austen"]}         question answering: SQuAD, NQ open
    {"question": "Who wrote Emma?", "answers": {"text": ["Jane Austen"]}}         SQuAD on the Hub
    {"input": "Who wrote Emma?", "output": [{"answer": "Jane Austen"}]}           KILT

Optional in all formats: `id` or `_id`; `task`; `context`; `retrieve`, false for a row that does not use passages.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.rows import Row, file_rows
from revela_hub.errors import UserError
from revela_hub.files import local_path

COLUMNS = ("id", "task", "prompt", "input", "answers", "retrieve", "where")
"""The columns of a data set of prompts: `input` is the prompt without its template, for use as a query; `answers` are the
accepted ones, of which the first is used for training; `where` is file and line."""


@cache
def templates() -> dict[str, Any]:
    """Return the templates by task, and under `without_retrieval` the tasks that do not use passages."""
    text = files("revela_hub.data").joinpath("prompts/templates.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def render(task: str, where: str = "", **parts: str) -> str:
    """Fill in the template of a task."""
    known = {name: text for name, text in templates().items() if isinstance(text, str)}
    if task not in known:
        raise UserError(f"{where}: unknown task {task!r}; the tasks are {', '.join(known)}")
    try:
        return known[task].format_map(parts)
    except KeyError as error:
        raise UserError(f"{where}: task {task} needs the field {error}") from error


def retrieves(task: str) -> bool:
    """Return whether prompts of the task use passages."""
    return task not in templates()["without_retrieval"]


def read_prompts(sources: Iterable[str | Path], task: str = "question_answering") -> Dataset:
    """Read prompts from files of JSON lines (plain or .gz).

    Args:
        sources: The files.
        task: The task of rows that do not name one.

    Returns:
        A data set with the columns in `COLUMNS`.

    Raises:
        UserError: A line has no prompt, or its answer is missing or empty; the message has file and line.
    """
    paths = [local_path(source) for source in sources]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise UserError(f"{missing[0]}: no such file (prompts are read from JSON lines or parquet files)")
    rows = [prompt_row(row, task) for path in paths for row in file_rows(path, ReadReport())]
    if not rows:
        raise UserError(f"no prompts in {', '.join(map(str, paths))}")
    return Dataset.from_list(rows)


def prompt_row(row: Row, task: str) -> dict[str, Any]:
    """Convert one row to the columns in `COLUMNS`."""
    columns = row.columns
    task = str(columns.get("task") or task)
    text = columns.get("prompt")
    given = columns.get("input", columns.get("question"))
    if text is None and given is None:
        names = ", ".join(map(repr, columns)) or "none"
        raise UserError(f"{row.where}: no prompt; it must be in prompt, question or input (the fields are {names})")
    if given is not None and not isinstance(given, str):
        raise UserError(f"{row.where}: the question is of type {type(given).__name__} instead of text")
    if text is None:
        if not (given or "").strip():
            raise UserError(f"{row.where}: the question is empty")
        parts = {"input": given, "context": columns.get("context")}
        text = render(task, row.where, **{name: str(part) for name, part in parts.items() if part is not None})
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{row.where}: the prompt is empty")
    answers = [answer.strip() for answer in _answers(row)]
    if not answers or not all(answers):
        raise UserError(f"{row.where}: an answer is empty: add one, or remove the line")
    retrieve = columns.get("retrieve")
    return {
        "id": str(columns.get("id", columns.get("_id", row.where))),
        "task": task,
        "prompt": text,
        "input": given if given and given.strip() else text,
        "answers": list(dict.fromkeys(answers)),
        "retrieve": retrieves(task) if retrieve is None else bool(retrieve),
        "where": row.where,
    }


def _answers(row: Row) -> Iterator[str]:
    """Yield the accepted answers from `answer`, `answers` or KILT's `output` (entries without an answer are provenance)."""
    names = [name for name in ("answer", "answers", "output") if name in row.columns]
    if not names:
        raise UserError(f"{row.where}: no answer; it must be in answer, answers or output")
    value = row.columns[names[0]]
    value = value.get("text", value) if isinstance(value, dict) else value
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, dict):
            if entry.get("answer") in (None, ""):
                continue
            entry = entry["answer"]
        if not isinstance(entry, str):
            raise UserError(f"{row.where}: {names[0]} contains {type(entry).__name__} instead of text")
        yield entry
