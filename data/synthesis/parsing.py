r"""Reads what a language model answers: a list of tasks, or one example as a JSON object; says what is wrong with the rest.

Models wrap JSON in code fences and prose, think aloud before it, put raw line breaks into strings, answer with Python's
quotes, or number the items of a list instead. All that is understood. What is not an answer raises `Rejected` with the
reason under which it is counted.
"""

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from revela_hub.data.synthesis.prompts import FORMS, Form, Part
from revela_hub.data.text.ngram_overlap import words

TASK_MIN_WORDS, TASK_MAX_WORDS = 3, 80

_THINKING = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>|^.*?</think(?:ing)?>", re.DOTALL)
# `1. text`, `- text`, `"text",`: what opens with a quote has to end with one, or it is cut off
_LIST_ITEM = re.compile(
    r"""^\s*(?:(?:(?:[-*•]|\(?\d+[.):])\s*)?(?:"(.+)"|'(.+)')\s*,?|(?:[-*•]|\(?\d+[.):])\s*([^"'\s].*?))\s*$"""
)
_COPIED = re.compile(r"^(?:a string\b|\.\.\.|…|<[^>]*>$|\{[^}]*\}$)", re.IGNORECASE)


class Rejected(ValueError):
    """An answer that cannot be used; the message is one of a few reasons, for counting."""


def parse_tasks(reply: str) -> list[str]:
    r"""The tasks in an answer to the first step, cleaned, in order, without repetitions.

    Raises:
        Rejected: There is none.

    >>> parse_tasks('Sure!\n```json\n["Find the law that a case cites.", "Match a word with its antonym."]\n```')
    ['Find the law that a case cites.', 'Match a word with its antonym.']
    >>> parse_tasks("1. **Find** the law that a case cites.\n2) Match a word with its antonym.")
    ['Find the law that a case cites.', 'Match a word with its antonym.']
    """
    text = _THINKING.sub("", reply)
    lists = [value for value in _literals(text, "[") if isinstance(value, list)]
    lists.append([match[1] or match[2] or match[3] for line in text.split("\n") if (match := _LIST_ITEM.match(line))])
    for found in lists:
        tasks: dict[tuple[str, ...], str] = {}
        for item in found:
            if task := _task(item):
                tasks.setdefault(tuple(words(task)), task)
        if tasks:
            return list(tasks.values())
    raise Rejected("no list of tasks")


def _task(item: Any) -> str:
    """One task as a line, or nothing where the item is not one."""
    if isinstance(item, dict) and item:  # {"task": "..."}, where a string was asked for
        item = item.get("task", item.get("description", next(iter(item.values()))))
    if not isinstance(item, str):
        return ""
    task = " ".join(re.sub(r"\*\*|__", "", item).split())
    task = re.sub(r"^(?:[-*•]|\(?\d+[.):])\s+", "", task)
    return task if TASK_MIN_WORDS <= len(words(task)) <= TASK_MAX_WORDS and not _COPIED.match(task) else ""


def parse_example(form: Form, reply: str) -> dict[str, str]:
    r"""The example in an answer to the second step.

    Returns:
        `anchor`, `positive` and `negative_1`, stripped, within their bounds, and different from one another in more than
        case and punctuation.

    Raises:
        Rejected: There is no such example.

    >>> parse_example("long-short", 'Here: {"input_text": "It never came.", "label": "delivery", "misleading_label": "refund"}')
    {'anchor': 'It never came.', 'positive': 'delivery', 'negative_1': 'refund'}
    >>> parse_example("long-short", '{"input_text": "It never came.", "label": "delivery", "misleading_label": "Delivery"}')
    Traceback (most recent call last):
    ...
    revela_hub.data.synthesis.parsing.Rejected: positive equals negative
    """
    text = _THINKING.sub("", reply)
    if not text.strip():
        raise Rejected("empty")
    found = [value for value in _literals(text, "{") if isinstance(value, dict)]
    if not found:
        raise Rejected("not JSON")
    keys = {part.key for part in FORMS[form].parts}
    example = next((value for value in found if keys <= value.keys()), None)
    if example is None:
        raise Rejected("key missing")
    anchor, positive, negative = (_checked(example[part.key], part) for part in FORMS[form].parts)
    for one, other, names in (
        (anchor, positive, "query equals positive"),
        (anchor, negative, "query equals negative"),
        (positive, negative, "positive equals negative"),
    ):
        if (words(one) or [one]) == (words(other) or [other]):
            raise Rejected(names)
    return {"anchor": anchor, "positive": positive, "negative_1": negative}


def _checked(value: Any, part: Part) -> str:
    if not isinstance(value, str):
        raise Rejected("not a string")
    text = value.strip()
    if not text:
        raise Rejected("empty text")
    if _COPIED.match(text):
        raise Rejected("placeholder copied")
    # A text of symbols alone (code, a formula) is one word: it is not empty, and words() finds none.
    count = len(words(text)) or 1
    if count < part.min_words:
        raise Rejected("too short")
    if count > part.max_words:
        raise Rejected("too long")
    return text


def _literals(text: str, opening: str) -> Iterator[Any]:
    """The JSON (or Python) values that begin with `opening`, outermost first, what is inside one not again."""
    decoder = json.JSONDecoder(strict=False)  # raw line breaks in strings
    position = text.find(opening)
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (json.JSONDecodeError, RecursionError):
            value, end = _python_literal(text, position)
        if end > position:
            yield value
        position = text.find(opening, max(end, position + 1))


def _python_literal(text: str, position: int) -> tuple[Any, int]:
    """The value in Python's notation (single quotes) that begins here, and where it ends; its beginning if there is none.

    Ends are tried from the last closing bracket back, a few only: what a model writes has seldom more after the value.
    """
    closing = "]" if text[position] == "[" else "}"
    end = len(text)
    for _ in range(3):
        end = text.rfind(closing, position, end)
        if end < 0:
            break
        try:
            return ast.literal_eval(text[position : end + 1]), end + 1
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None, position
