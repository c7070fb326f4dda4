r"""Prompts with answers: read from files and data sets in several common formats, or made from raw text.

    {"prompt": "Who wrote Emma?\n", "answer": "Jane Austen"}                      used unchanged, without a template
    {"task": "fact_checking", "input": "Emma is a novel.", "answer": "True"}      through a template of prompts.yaml
    {"question": "Who wrote Emma?", "answers": ["Jane Austen", "Austen"]}         question answering: SQuAD, NQ open
    {"question": "Who wrote Emma?", "answers": {"text": ["Jane Austen"]}}         SQuAD on the Hub
    {"input": "Who wrote Emma?", "output": [{"answer": "Jane Austen"}]}           KILT

Optional in all formats: `id` or `_id`; `task`; `context`; `retrieve`, false for a row that does not use passages. Rows of other data
sets are described by the columns of a `PromptSource`; the marks and verdicts of KILT become those of the templates.

Prompts from raw text (a phrase to recover, the next or the previous sentence, plain text) preserve the reader's language modelling, and teach
it to follow the marks of the templates.
"""

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, reduce
from importlib.resources import files
from operator import getitem
from typing import Any, TypeVar

import yaml
from datasets import Dataset

from revela_hub.data.row_cache import cached_rows, features, rows_fingerprint
from revela_hub.data.sources.rows import Row, read_rows
from revela_hub.data.sources.source import Document, Source, SourceLike, parse_source
from revela_hub.data.text.chunks import chunk_document
from revela_hub.data.text.words import LETTER
from revela_hub.errors import UserError

T = TypeVar("T")

COLUMNS = ("id", "task", "prompt", "input", "answers", "retrieve", "where")
"""The columns of a data set of prompts: `input` is the prompt without its template, for use as a query; `answers` are the
accepted ones, of which the first is used for training; `where` is file and line."""
TYPES: dict[str, str | list[str]] = {**dict.fromkeys(COLUMNS, "string"), "answers": ["string"], "retrieve": "bool"}
ROLES = ("id", "task", "prompt", "input", "context", "answers", "retrieve", "choice", "parent")
KINDS = ("phrase_denoising", "next_sentence", "previous_sentence", "plain_text")
# KILT's verdicts on a claim, as they are in the templates.
_VERDICTS = {"SUPPORTS": "True", "REFUTES": "False"}
# A phrase to replace: consecutive words that begin with capitals or digits, not at the start of the sentence.
_PHRASE = re.compile(rf"(?<={LETTER} )(?:[A-Z0-9](?:{LETTER}|['’.-])*)(?: (?:[A-Z0-9](?:{LETTER}|['’-])*)){{0,4}}")
_SENTENCE_END = re.compile("(?<=[.!?\u061f\u06d4\u0964\u17d4\u104b])\\s|(?<=[\u3002\uff01\uff1f])(?=.)")


@cache
def templates() -> dict[str, Any]:
    """Return the templates by task, and under `without_retrieval` the tasks that do not use passages."""
    text = files("revela_hub.data").joinpath("prompts.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


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


@dataclass(frozen=True)
class PromptSource:
    """A file or data set of prompts, and how its rows become prompts.

    Attributes:
        source: Where the rows are.
        task: The task of rows that do not name one.
        columns: The columns by role (`ROLES`), if they have other names: `{input: question, answers: answers.text}`; a dot leads into a
            nested column. A list in `context` is joined; a list in `input` is a conversation with one answer per question. `choice` is
            the number of the right one of the answers. With `id` and `parent`, rows are messages that name the one before.
        where: Use only rows with these values, or one of several: `{role: assistant, lang: [de, en]}`.
        max_samples: Maximum number of prompts, sampled at random.
    """

    source: Source
    task: str = "question_answering"
    columns: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    max_samples: int | None = None

    @property
    def name(self) -> str:
        """The path, with the configuration and the split of a data set."""
        return ":".join(filter(None, (self.source.path, self.source.name, self.source.split)))

    def rows(self, seed: int = 0) -> list[dict[str, Any]]:
        """Read the rows and return prompts with the columns in `COLUMNS`."""
        rows: Iterable[Row] = (Row(row.where, {**row.columns, **self._roles(row)}) for row in read_rows(self.source))
        rows = _replies(rows) if "parent" in self.columns else rows
        prompts = (prompt_row(turn, self.task) for row in rows if self._selects(row) for turn in _turns(row))
        found = sampled(prompts, self.max_samples, random.Random(f"{seed} {self.source.path}"))
        if not found:
            raise UserError(f"no prompts in {self.source.path}")
        return found

    def _roles(self, row: Row) -> dict[str, Any]:
        paths = {role: path.split(".") for role, path in self.columns.items()}
        return {role: reduce(getitem, inner, row.value(first)) for role, (first, *inner) in paths.items()}

    def _selects(self, row: Row) -> bool:
        allowed = {name: value if isinstance(value, list) else [value] for name, value in self.where.items()}
        return all(row.value(name) in values for name, values in allowed.items())


def parse_prompts(given: SourceLike, task: str = "question_answering") -> PromptSource:
    """Parse a source of prompts: a path or `hf:` data set, or a mapping with the fields of `Source` and `PromptSource`."""
    given = given if isinstance(given, Mapping) else {"path": str(given)}
    own = {key: given[key] for key in ("task", "columns", "where", "max_samples") if key in given}
    if wrong := {*own.get("columns", ())} - {*ROLES}:
        raise UserError(f"source {given['path']}: no column role {', '.join(wrong)}; the roles are {', '.join(ROLES)}")
    return PromptSource(parse_source({key: given[key] for key in given if key not in own}), **({"task": task} | own))


def read_prompts(sources: Sequence[SourceLike], task: str = "question_answering", *, seed: int = 0) -> Dataset:
    """Read prompts from files and data sets, or from the cache.

    Args:
        sources: Paths, `hf:` data sets, or mappings with the fields of `Source` and `PromptSource`.
        task: The task of rows that do not name one.
        seed: The seed for sources with `max_samples`.

    Returns:
        A data set with the columns in `COLUMNS`.

    Raises:
        UserError: A row has no prompt, or its answer is missing or empty; the message has file and line.
    """
    parsed = [parse_prompts(source, task) for source in sources]
    made_with = [seed, templates(), *(asdict(replace(each, source=Source(""))) for each in parsed)]
    name = f"prompts-{rows_fingerprint({'prompts': made_with}, [each.source for each in parsed])}"
    rows, _ = cached_rows(name, TYPES, lambda: (row for each in parsed for row in each.rows(seed)))
    return rows


def sampled(items: Iterable[T], count: int | None, rng: random.Random) -> list[T]:
    """Return `count` items, drawn at random in one pass (reservoir sampling), or all of them if there are not more."""
    kept: list[T] = []
    for number, item in enumerate(items):
        if count is None or number < count:
            kept.append(item)
        elif (place := rng.randrange(number + 1)) < count:
            kept[place] = item
    return kept


def _replies(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield each message but the first ones, as the answer to the turns before it."""
    turns: dict[Any, str] = {}
    for row in rows:
        text, before = row.text("input"), turns.get(row.value("parent"), "")
        turns[row.value("id")] = f"{before} {text}".strip()
        if before:
            yield Row(row.where, {**row.columns, "input": before, "answers": [text]})


def _turns(row: Row) -> Iterator[Row]:
    """Yield the row, or of a conversation each question, with the earlier ones and their answers as a part of the context."""
    columns = dict(row.columns)
    if isinstance(columns.get("context"), list):
        columns["context"] = " ".join(row.as_text("context", text) for text in columns["context"])
    if not isinstance(questions := columns.get("input"), list):
        yield Row(row.where, columns)
        return
    for question, answer in zip(questions, columns["answers"], strict=True):
        yield Row(row.where, columns | {"input": question, "answers": [answer]})
        columns["context"] = f"{columns.get('context', '')} Q: {question} A: {answer}".strip()


def prompt_row(row: Row, task: str) -> dict[str, Any]:
    """Convert one row to the columns in `COLUMNS`."""
    columns = row.columns
    task = str(columns.get("task") or task)
    prompt, question = columns.get("prompt"), columns.get("input", columns.get("question"))
    asked = question if prompt is None else prompt
    if not isinstance(asked, str) or not asked.strip():
        raise UserError(f"{row.where}: no text in prompt, question or input; the columns are {', '.join(columns)}")
    answers = _answers(row)
    if prompt is None:
        asked = asked.replace("_ENT]", "]") if task == "entity_linking" else asked  # KILT's [START_ENT] and [END_ENT]
        answers = [_VERDICTS.get(answer, answer) for answer in answers] if task == "fact_checking" else answers
        parts = {"input": asked, "context": columns.get("context")}
        prompt = render(task, row.where, **{name: text for name, text in parts.items() if text is not None})
    retrieve = columns.get("retrieve")
    return {
        "id": str(columns.get("id", columns.get("_id", row.where))),
        "task": task,
        "prompt": prompt,
        "input": question or prompt,
        "answers": answers,
        "retrieve": retrieves(task) if retrieve is None else bool(retrieve),
        "where": row.where,
    }


def _answers(row: Row) -> list[str]:
    """Return the accepted answers from `answer`, `answers` or KILT's `output`, whose entries without an answer are provenance."""
    value = next((row.columns[name] for name in ("answers", "answer", "output") if name in row.columns), None)
    value = value.get("text", value) if isinstance(value, dict) else value
    if "choice" in row.columns:
        value = [_list(value)[int(row.columns["choice"])]]
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

    def rows() -> Iterator[dict[str, Any]]:
        before = ""
        for document in documents:
            for number, chunk in enumerate(chunk_document(document, words)):
                text = " ".join(chunk.text.split())
                if pair := _pair(kind, before, text, rng):
                    where = f"{document.id}#{number}"
                    columns = {"id": f"{kind} {where}", "input": pair[0], "answers": [pair[1]], "retrieve": False}
                    yield columns | {"task": kind, "prompt": render(kind, where, input=pair[0]), "where": where}
                before = text

    if not (found := sampled(rows(), count, random.Random(f"{seed} {kind}"))):
        raise UserError(f"no prompts of the kind {kind.replace('_', ' ')} can be made: use longer documents")
    return Dataset.from_list(found, features=features(TYPES))


def _phrases(text: str) -> list[re.Match[str]]:
    return [match for match in _PHRASE.finditer(text) if len(match[0]) > 3]


def _pair(kind: str, before: str, text: str, rng: random.Random) -> tuple[str, str] | None:
    """Return the input and the answer made from a chunk, and for a phrase from the chunk before; or None."""
    if kind == "plain_text":
        return "", text
    if kind == "phrase_denoising":
        # The paper's phrases are changed by a language model (Llama 3.1 70B); ours are replaced by others.
        if not (phrases := _phrases(text)):
            return None
        match = rng.choice(phrases)
        if not (others := sorted({other[0] for other in (*phrases, *_phrases(before))} - {match[0]})):
            return None
        return f"{text[: match.start()]}[START] {rng.choice(others)} [END]{text[match.end() :]}", match[0]
    ends = list(_SENTENCE_END.finditer(text))
    if not ends:
        return None
    end = ends[-1 if kind == "next_sentence" else 0]
    parts = text[: end.start()], text[end.end() :]
    return parts if kind == "next_sentence" else parts[::-1]
