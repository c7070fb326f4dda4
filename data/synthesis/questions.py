"""Questions that a language model writes about passages, and a filter for them.

Small models often ask about the prompt ("What is your question?"), repeat a part of it, or make statements. Such a reply has
no word in common with its passage, apart from function words and words of the prompt, or is not a single question.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from revela_hub.data.sources.report import counted, skips
from revela_hub.data.text.words import LETTER, count_words, words

if TYPE_CHECKING:
    from revela_hub.data.synthesis.backends import Backend

MIN_WORDS, MAX_WORDS = 3, 60
FREQUENT, MIN_FREQUENT = 0.1, 3
"""Fraction and number of the passages from which a word counts as a function word."""
STEM = 4
"""Longer words are compared by this number of first characters, so that "rivers" and "river" are equal."""
_LABEL = re.compile(r"(?:the )?question(?: is)?\s*:\s*[\"\u201c]?", re.IGNORECASE)
# A statement, or a sentence before the question; a shorter word before the full stop may be an abbreviation.
_STATEMENT = re.compile(rf"{LETTER}{{4}}[.!]\s|[。！।۔].|[.!:。！：।۔]$")


MAX_QUESTION_TEXT = 3000
"""Characters of a passage that a language model sees: a long function must not exceed its context of 2,048 tokens."""


def question_prompt(text: str) -> str:
    """Return the prompt for a question that a passage answers."""
    return (
        "Write one question that a person might type into a search box and that the text below answers. Do not name the text, "
        f"and use other words than it does where you can. Answer with the question alone.\n\nText:\n{text[:MAX_QUESTION_TEXT]}"
    )


def without_label(question: str) -> str:
    """Return a question without the label that models put before it.

    >>> without_label('Question: "What do rivers carry?'), without_label("The question is: What do rivers carry?")
    ('What do rivers carry?', 'What do rivers carry?')
    """
    return question[match.end() :] if (match := _LABEL.match(question)) else question


class QuestionFilter:
    """Keeps the questions that are about their passage, and counts the others.

    Args:
        prompt: The prompt without a passage, whose words do not count.
        passages: All passages.

    >>> kept = QuestionFilter("Write one question that the text answers.", ["Rivers carry sediment.", "Tides follow the moon."])
    >>> kept("what does a river move", "Rivers carry sediment."), kept("What is your question?", "Tides follow the moon.")
    (True, False)
    >>> str(kept)
    '1 of 2 questions dropped (1 without a word of the passage)'
    """

    def __init__(self, prompt: str, passages: Iterable[str]) -> None:
        found = [set(words(passage)) for passage in passages]
        counts = Counter(word for each in found for word in each)
        most = max(MIN_FREQUENT, FREQUENT * len(found))
        self._ignored = set(words(prompt)) | {word for word, number in counts.items() if number >= most}
        self.asked = 0
        self.dropped: Counter[str] = Counter()

    def __call__(self, question: str, passage: str) -> bool:
        """Return whether a question is about a passage."""
        self.asked += 1
        if reason := self._reason(question, passage):
            self.dropped[reason] += 1
        return not reason

    def _reason(self, question: str, passage: str) -> str:
        if not question:
            return "empty, refused or cut off"
        if question in passage:
            return "copied from the passage"
        if not MIN_WORDS <= count_words(question) <= MAX_WORDS or _STATEMENT.search(question):
            return "not a single question"
        return "" if self._stems(question) & self._stems(passage) else "without a word of the passage"

    def _stems(self, text: str) -> set[str]:
        lengths = ((word, 2 if "가" <= word[0] <= "힣" else STEM) for word in words(text) if word not in self._ignored)
        return {word[:length] for word, length in lengths}  # Korean words end in particles

    def __str__(self) -> str:
        """For example `28 of 40 questions dropped (20 without a word of the passage, 8 not a single question)`."""
        dropped = f"{self.dropped.total():,} of {counted(self.asked, 'question')} dropped"
        return f"{dropped} ({skips(self.dropped)})" if self.dropped else dropped


def question_filter(passages: Iterable[str]) -> QuestionFilter:
    """Return a filter for the replies to `question_prompt`."""
    return QuestionFilter(question_prompt(""), passages)


def write_questions(
    backend: "Backend",
    passages: Sequence[tuple[int, str]],
    seed: int,
    end: float = math.inf,
    keep: QuestionFilter | None = None,
) -> Iterator[tuple[int, str]]:
    """Yield the number of each passage for which a language model writes a usable question, and the question.

    From the time `end` (`time.monotonic`) on, no question is requested. `keep` decides and counts which questions are usable.
    """
    from revela_hub.data.synthesis.backends import Request
    from revela_hub.data.synthesis.parsing import first_line_of

    keep = keep or question_filter(text for _, text in passages)
    requests = (Request(question_prompt(text), seed + number) for number, text in passages)
    in_time = takewhile(lambda _: time.monotonic() < end, requests)
    for (number, passage), (_, reply) in zip(passages, backend.replies(in_time), strict=False):
        text = without_label(first_line_of(reply))
        if keep(text, passage):
            yield number, text
