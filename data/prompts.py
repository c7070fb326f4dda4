r"""Prompts with answers: read from JSON lines in several common formats, or made from raw text.

    {"prompt": "Who wrote Emma?\n", "answer": "Jane Austen"}                      used unchanged, without a template
    {"task": "fact_checking", "input": "Emma is a novel.", "answer": "SUPPORTS"}  through a template of prompts.yaml
    {"question": "Who wrote Emma?", "answers": ["Jane Austen", "Austen"]}         question answering: SQuAD, NQ open
    {"question": "Who wrote Emma?", "answers": {"text": ["Jane Austen"]}}         SQuAD on the Hub
    {"input": "Who wrote Emma?", "output": [{"answer": "Jane Austen"}]}           KILT

Optional in all formats: `id` or `_id`; `task`; `context`; `retrieve`, false for a row that does not use passages.

Prompts from raw text (a phrase to fill in, the next or the previous sentence, plain text) preserve the reader's language modelling, and train
retrieval when no questions are available.
"""

import random
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, concatenate_datasets

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.rows import Row, file_rows
from revela_hub.data.sources.source import Document
from revela_hub.data.text.chunks import chunk_document
from revela_hub.data.text.words import LETTER
from revela_hub.errors import UserError
from revela_hub.files import local_path

COLUMNS = ("id", "task", "prompt", "input", "answers", "retrieve", "where")
"""The columns of a data set of prompts: `input` is the prompt without its template, for use as a query; `answers` are the
accepted ones, of which the first is used for training; `where` is file and line."""
KINDS = ("phrase_denoising", "next_sentence", "previous_sentence", "plain_text")
# A phrase to hide: consecutive words that begin with capitals or digits, not at the start of the sentence.
_PHRASE = re.compile(rf"(?<={LETTER} )(?:[A-Z0-9](?:{LETTER}|['’.-])*)(?: (?:[A-Z0-9](?:{LETTER}|['’-])*)){{0,4}}")
_SENTENCE_END = re.compile("(?<=[.!?\u061f\u06d4\u0964\u17d4\u104b])\\s|(?<=[\u3002\uff01\uff1f])(?=.)")


@cache
def templates() -> dict[str, Any]:
    """Return the templates by task, and under `without_retrieval` the tasks that do not use passages."""
    text = files("revela_hub.data").joinpath("prompts.yaml").read_text(encoding="utf-8")
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


# --- from raw text


def text_prompts(documents: Iterable[Document], kind: str, count: int, *, words: int = 60, seed: int = 0) -> Dataset:
    """Make `count` prompts of a kind, or fewer if the text is too short.

    Args:
        documents: Raw text.
        kind: One of `KINDS`.
        count: The number of rows.
        words: Maximum number of words in the text of a prompt.
        seed: The seed for the choice of chunks and phrases.

    Returns:
        A data set with the columns of `read_prompts`.
    """
    rng = random.Random(f"{seed} {kind}")
    rows = []
    for document in documents:
        sentences = [chunk.text for chunk in chunk_document(document, words)]
        for number in range(len(sentences)):
            pair = _pair(kind, sentences, number, rng)
            if pair is not None:
                rows.append(_row(kind, *pair, f"{document.id}#{number}"))
    if not rows:
        raise UserError(f"no prompts of the kind {kind.replace('_', ' ')} can be made: use longer documents")
    chosen = rng.sample(rows, min(count, len(rows)))
    return Dataset.from_list(chosen)


def mix(prompts: Dataset, parts: list[Dataset], seed: int = 0) -> Dataset:
    """Concatenate and shuffle data sets."""
    return concatenate_datasets([prompts, *parts]).shuffle(seed=seed)


def _pair(kind: str, chunks: list[str], number: int, rng: random.Random) -> tuple[str, str] | None:
    """Return the input and the answer made from a chunk, or None."""
    text = " ".join(chunks[number].split())
    if kind == "plain_text":
        return "", text
    if kind == "phrase_denoising":
        phrases = [match for match in _PHRASE.finditer(text) if len(match[0]) > 3]
        if not phrases:
            return None
        match = rng.choice(phrases)
        return f"{text[: match.start()]}[BLANK]{text[match.end() :]}", match[0]
    if number + 1 == len(chunks):
        return None
    following = " ".join(chunks[number + 1].split())
    if kind == "next_sentence":
        return text, _SENTENCE_END.split(following, maxsplit=1)[0]
    return following, _SENTENCE_END.split(text)[-1]


def _row(kind: str, text: str, answer: str, where: str) -> dict[str, Any]:
    return {
        "id": f"{kind} {where}",
        "task": kind,
        "prompt": render(kind, where, input=text),
        "input": text,
        "answers": [answer],
        "retrieve": retrieves(kind),
        "where": where,
    }
