r"""Parsing the replies of a language model: a list of tasks, or one example as a JSON object.

Models wrap JSON in code fences and prose, think before it, put raw line breaks into strings, or write a numbered list instead. All
of that is accepted. A library that repairs JSON is not used, because it also completes JSON that was cut off, so that half a
document would be accepted as a whole one.
"""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from revela_hub.data.synthesis.backends import CUT_OFF, Reply
from revela_hub.data.synthesis.prompts import FORMS, Form
from revela_hub.data.text.words import words

TASK_MIN_WORDS, TASK_MAX_WORDS = 3, 80
_PLACEHOLDER = re.compile(r"^\s*(?:a string\b|\.\.\.|…|<[^>]*>$|\{[^}]*\}$)", re.IGNORECASE)  # copied from a prompt
_BROKEN = re.compile("[\ud800-\udfff]")  # half of a surrogate pair: possible in JSON, not in UTF-8
_THINKING = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)|^.*?</think(?:ing)?>", re.DOTALL)
_BULLET = r"(?:[-*•]|\(?\d+[.):])\s*"
# `1. text`, `- text`, `"text",`: an item that begins with a quote must end with one, or it was cut off
_LIST_ITEM = re.compile(rf"""^\s*(?:(?:{_BULLET})?(?:"(.+)"|'(.+)')\s*,?|{_BULLET}([^"'\s].*?))\s*$""")


class Rejected(ValueError):
    """An unusable reply; the message is one of a few reasons, which are counted."""


def parse_tasks(reply: str) -> list[str]:
    r"""Return the tasks in a reply to the first step, cleaned, in order, without duplicates.

    >>> parse_tasks('Sure!\n```json\n["Find the law that a case cites.", "Match a word with its antonym."]\n```')
    ['Find the law that a case cites.', 'Match a word with its antonym.']
    >>> parse_tasks("1. **Find** the law that a case cites.\n2) Match a word with its antonym.")
    ['Find the law that a case cites.', 'Match a word with its antonym.']
    """
    text = without_thoughts(reply)
    items = [match[1] or match[2] or match[3] for line in text.split("\n") if (match := _LIST_ITEM.match(line))]
    for found in [*_values(text, "["), items]:
        tasks: dict[tuple[str, ...], str] = {}
        for task in filter(None, map(_task, found)):
            tasks.setdefault(tuple(words(task)), task)
        if tasks:
            return list(tasks.values())
    raise Rejected("no list of tasks")


def _task(item: Any) -> str:
    """Return a task in one line, or "" if the item is not one."""
    if isinstance(item, dict) and item:  # {"task": "..."} instead of a string
        item = item.get("task", next(iter(item.values())))
    if not isinstance(item, str) or _BROKEN.search(item):
        return ""
    task = re.sub(rf"^{_BULLET}", "", " ".join(re.sub(r"\*\*|__", "", item).split()))
    return task if TASK_MIN_WORDS <= len(words(task)) <= TASK_MAX_WORDS and not _PLACEHOLDER.match(task) else ""


def without_thoughts(reply: str) -> str:
    """Return a reply without what the model thought before it.

    >>> without_thoughts("<think>Rivers?</think> what do rivers carry")
    'what do rivers carry'
    """
    return _THINKING.sub("", reply).strip()


def first_line_of(reply: Reply) -> str:
    r"""Return the first line of a reply, without thoughts and quotation marks; "" if it was cut off before the line ends.

    >>> first_line_of(Reply('"what do rivers carry"\nBecause ...', CUT_OFF)), first_line_of(Reply("what do", CUT_OFF))
    ('what do rivers carry', '')
    """
    if reply.problem not in (None, CUT_OFF):
        return ""
    lines = [line.strip(" \t\"'*\u201c\u201d") for line in without_thoughts(reply.text).split("\n")]
    return next(filter(None, lines[:-1] if reply.problem else lines), "")


def parse_example(form: Form, reply: str) -> dict[str, str]:
    r"""Return the example in a reply to the second step: texts of valid length that differ in more than case and punctuation.

    >>> parse_example("long-short", 'Here: {"input_text": "It never came.", "label": "delivery", "misleading_label": "refund"}')
    {'anchor': 'It never came.', 'positive': 'delivery', 'negative_1': 'refund'}
    >>> parse_example("long-short", '{"input_text": "It never came.", "label": "delivery", "misleading_label": "Delivery"}')
    Traceback (most recent call last):
    ...
    revela_hub.data.synthesis.parsing.Rejected: positive equals negative
    """
    text = without_thoughts(reply)
    found = list(_values(text, "{"))
    if not found:
        raise Rejected("not JSON" if text else "empty")
    expected = FORMS[form]["parts"]
    values: dict[str, Any] = next((value for value in found if {part["key"] for part in expected} <= value.keys()), {})
    parts = {}
    for name, part in zip(("query", "positive", "negative"), expected, strict=True):
        text = values.get(part["key"])  # type: ignore[assignment]
        if not isinstance(text, str) or _BROKEN.search(text) or _PLACEHOLDER.match(text):
            raise Rejected("not a text")
        count = len(words(text)) or bool(text.strip())  # symbols only (code, a formula) count as one word
        if not part["min_words"] <= count <= part["max_words"]:
            raise Rejected("too short or too long")
        parts[name] = text.strip()
    for (name, one), (other_name, other) in combinations(parts.items(), 2):
        if (words(one) or [one]) == (words(other) or [other]):
            raise Rejected(f"{name} equals {other_name}")
    return dict(zip(("anchor", "positive", "negative_1"), parts.values(), strict=True))


def _values(text: str, opening: str) -> Iterator[Any]:
    """Yield the outermost JSON lists ("[") or objects ("{") in a text."""
    decoder = json.JSONDecoder(strict=False)  # raw line breaks in strings
    position = text.find(opening)
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
            yield value
        except (ValueError, RecursionError):
            end = position + 1
        position = text.find(opening, end)
