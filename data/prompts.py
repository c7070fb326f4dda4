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
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, concatenate_datasets

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
    try:
        template: str = templates()[task].format_map(parts)
    except KeyError as error:
        tasks = ", ".join(name for name in templates() if name != "without_retrieval")
        raise UserError(f"{where}: the task {task} is not one of {tasks}, or needs the field {error}") from error
    return template


def retrieves(task: str) -> bool:
    """Return whether prompts of the task use passages."""
    return task not in templates()["without_retrieval"]


def read_prompts(sources: Sequence[str | Path], task: str = "question_answering") -> Dataset:
    """Read prompts from files of JSON lines (plain or .gz).

    Args:
        sources: The files.
        task: The task of rows that do not name one.

    Returns:
        A data set with the columns in `COLUMNS`.

    Raises:
        UserError: A line has no prompt, or its answer is missing or empty; the message has file and line.
    """
    rows = [prompt_row(row, task) for source in sources for row in file_rows(local_path(source))]
    if not rows:
        raise UserError(f"no prompts in {', '.join(map(str, sources))}")
    return Dataset.from_list(rows)


def prompt_row(row: Row, task: str) -> dict[str, Any]:
    """Convert one row to the columns in `COLUMNS`."""
    columns = row.columns
    task = str(columns.get("task") or task)
    prompt, question = columns.get("prompt"), columns.get("input", columns.get("question"))
    asked = question if prompt is None else prompt
    if not isinstance(asked, str) or not asked.strip():
        raise UserError(f"{row.where}: no text in prompt, question or input; the columns are {', '.join(columns)}")
    if prompt is None:
        parts = {"input": question, "context": columns.get("context")}
        prompt = render(task, row.where, **{name: text for name, text in parts.items() if text is not None})
    retrieve = columns.get("retrieve")
    return {
        "id": str(columns.get("id", columns.get("_id", row.where))),
        "task": task,
        "prompt": prompt,
        "input": question or prompt,
        "answers": _answers(row),
        "retrieve": retrieves(task) if retrieve is None else bool(retrieve),
        "where": row.where,
    }


def _answers(row: Row) -> list[str]:
    """Return the accepted answers from `answer`, `answers` or KILT's `output`, whose entries without an answer are provenance."""
    value = next((row.columns[name] for name in ("answer", "answers", "output") if name in row.columns), None)
    value = value.get("text", value) if isinstance(value, dict) else value
    entries = [each.get("answer") or None if isinstance(each, dict) else each for each in _list(value)]
    answers = [entry for entry in entries if entry is not None]
    if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise UserError(f"{row.where}: no answer, answers or output, or one that is empty or not text")
    return list(dict.fromkeys(answer.strip() for answer in answers))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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
        chunks = [" ".join(chunk.text.split()) for chunk in chunk_document(document, words)]
        for number, (text, following) in enumerate(zip_longest(chunks, chunks[1:])):
            if pair := _pair(kind, text, following, rng):
                rows.append(_row(kind, *pair, f"{document.id}#{number}"))
    if not rows:
        raise UserError(f"no prompts of the kind {kind.replace('_', ' ')} can be made: use longer documents")
    return Dataset.from_list(rng.sample(rows, min(count, len(rows))))


def mix(prompts: Dataset, parts: list[Dataset], seed: int = 0) -> Dataset:
    """Concatenate and shuffle data sets."""
    return concatenate_datasets([prompts, *parts]).shuffle(seed=seed)


def _pair(kind: str, text: str, following: str | None, rng: random.Random) -> tuple[str, str] | None:
    """Return the input and the answer made from a chunk and the following one, or None."""
    if kind == "plain_text":
        return "", text
    if kind == "phrase_denoising":
        phrases = [match for match in _PHRASE.finditer(text) if len(match[0]) > 3]
        if not phrases:
            return None
        match = rng.choice(phrases)
        return f"{text[: match.start()]}[BLANK]{text[match.end() :]}", match[0]
    if following is None:
        return None
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
