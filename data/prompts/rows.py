r"""Rows of prompts and answers from JSON lines, in the forms in which such data comes.

    {"prompt": "Who wrote Emma?\n", "answer": "Jane Austen"}                      as it is, no template
    {"task": "fact_checking", "input": "Emma is a novel.", "answer": "SUPPORTS"}  through a template of templates.yaml
    {"question": "Who wrote Emma?", "answers": ["Jane Austen", "Austen"]}         question answering: SQuAD, NQ open
    {"question": "Who wrote Emma?", "answers": {"text": ["Jane Austen"]}}         SQuAD as a data set of the Hub
    {"input": "Who wrote Emma?", "output": [{"answer": "Jane Austen"}]}           KILT

Optional in all of them: `id` or `_id`; `task`; `context`; `retrieve`, false for a row that should read no passages.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.rows import Row, json_lines_rows
from revela_hub.errors import UserError

COLUMNS = ("id", "task", "prompt", "input", "answers", "retrieve", "where")
"""What a data set of prompts has: `input` is what a written query would be, the prompt without its template; `answers` are
the accepted ones, the first is learnt; `where` is file and line."""


@cache
def templates() -> dict[str, Any]:
    """Task to template, and under `without_retrieval` the tasks that read no passages."""
    text = files("revela_hub.data").joinpath("prompts/templates.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def render(task: str, where: str = "", **parts: str) -> str:
    """The prompt of a task.

    Raises:
        UserError: There is no such task, or a part that its template needs is missing.
    """
    known = {name: text for name, text in templates().items() if isinstance(text, str)}
    if task not in known:
        raise UserError(f"{where}: no task {task!r}; there are {', '.join(known)}")
    try:
        return known[task].format_map(parts)
    except KeyError as error:
        raise UserError(f"{where}: task {task} needs the field {error}") from error


def retrieves(task: str) -> bool:
    """Whether prompts of the task read passages."""
    return task not in templates()["without_retrieval"]


def read_prompts(sources: Iterable[str | Path], task: str = "question_answering") -> Dataset:
    """Reads files of JSON lines (plain or .gz).

    Args:
        sources: the files.
        task: of rows that do not say theirs.

    Returns:
        A data set with the columns of `COLUMNS`.

    Raises:
        UserError: with file and line: a line without a prompt, or whose answer is missing or has no text.
    """
    paths = [Path(source) for source in sources]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise UserError(f"{missing[0]}: there is no such file (prompts are read from JSON lines)")
    rows = [prompt_row(row, task) for path in paths for row in json_lines_rows(path, ReadReport())]
    if not rows:
        raise UserError(f"no prompts in {', '.join(map(str, paths))}")
    return Dataset.from_list(rows)


def prompt_row(row: Row, task: str) -> dict[str, Any]:
    """One row as `read_prompts` gives it."""
    columns = row.columns
    task = str(columns.get("task") or task)
    text = columns.get("prompt")
    given = columns.get("input", columns.get("question"))
    if text is None and given is None:
        there = ", ".join(map(repr, columns)) or "none"
        raise UserError(f"{row.where}: no prompt; give it as prompt, question or input (the fields are {there})")
    if text is None:
        parts = {"input": given, "context": columns.get("context")}
        text = render(task, row.where, **{name: str(part) for name, part in parts.items() if part is not None})
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{row.where}: the prompt has no text")
    answers = [answer.strip() for answer in _answers(row)]
    if not answers or not all(answers):
        raise UserError(f"{row.where}: an answer has no text: give one, or leave the line out")
    retrieve = columns.get("retrieve")
    return {
        "id": str(columns.get("id", columns.get("_id", row.where))),
        "task": task,
        "prompt": text,
        "input": text if given is None else str(given),
        "answers": list(dict.fromkeys(answers)),
        "retrieve": retrieves(task) if retrieve is None else bool(retrieve),
        "where": row.where,
    }


def _answers(row: Row) -> Iterator[str]:
    """The accepted answers, from `answer`, `answers` or KILT's `output`, whose entries without answer are provenance."""
    names = [name for name in ("answer", "answers", "output") if name in row.columns]
    if not names:
        raise UserError(f"{row.where}: no answer; give it as answer, answers or output")
    value = row.columns[names[0]]
    value = value.get("text", value) if isinstance(value, dict) else value
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, dict):
            if entry.get("answer") is None:
                continue
            entry = entry["answer"]
        if not isinstance(entry, str):
            raise UserError(f"{row.where}: {names[0]} holds {type(entry).__name__} where a text is needed")
        yield entry
