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

from revela_hub.data.sources.report import counted, skips
from revela_hub.data.synthesis.backends import Backend, Request
from revela_hub.data.synthesis.parsing import first_line_of
from revela_hub.data.text.words import LETTER, count_words, words

MIN_WORDS, MAX_WORDS = 3, 60
FREQUENT, MIN_FREQUENT = 0.1, 3
"""Fraction and number of the passages from which a word counts as a function word."""
STEM = 4
"""Longer words are compared by this number of first characters, so that "rivers" and "river" are equal."""
MAX_QUESTION_TEXT = 3000
"""Characters of a passage that a language model sees: a long function must not exceed its context of 2,048 tokens."""
# What models put before a question.
_LABEL = re.compile(r"^(?:the )?question(?: is)?\s*:\s*[\"\u201c]?", re.IGNORECASE)
# A statement, or a sentence before the question; a shorter word before the full stop may be an abbreviation.
_STATEMENT = re.compile(rf"{LETTER}{{4}}[.!]\s|[。！।۔].|[.!:。！：।۔]$")


def question_prompt(text: str) -> str:
    """Return the prompt for a question that a passage answers."""
    return (
        "Write one question that a person might type into a search box and that the text below answers. Do not name the text, "
        f"and use other words than it does where you can. Answer with the question alone.\n\nText:\n{text[:MAX_QUESTION_TEXT]}"
    )


class QuestionFilter:
    """Keeps the questions that are about their passage, and counts the others; frequent words and those of the prompt do not count.

    >>> kept = QuestionFilter(["Rivers carry sediment.", "Tides follow the moon."])
    >>> kept("what does a river move", "Rivers carry sediment."), kept("What is your question?", "Tides follow the moon.")
    (True, False)
    >>> str(kept)
    '1 of 2 questions dropped (1 without a word of the passage)'
    """

    def __init__(self, passages: Iterable[str]) -> None:
        found = [set(words(passage)) for passage in passages]
        counts = Counter(word for each in found for word in each)
        most = max(MIN_FREQUENT, FREQUENT * len(found))
        self._ignored = {word for word, number in counts.items() if number >= most}.union(words(question_prompt("")))
        self.asked = 0
        self.dropped: Counter[str] = Counter()

    def __call__(self, question: str, passage: str) -> bool:
        """Return whether a question is about a passage."""
        self.asked += 1
        reasons = {
            "empty, refused or cut off": not question,
            "copied from the passage": question in passage,
            "not a single question": not MIN_WORDS <= count_words(question) <= MAX_WORDS or _STATEMENT.search(question),
            "without a word of the passage": not self._stems(question) & self._stems(passage),
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason:
            self.dropped[reason] += 1
        return not reason

    def _stems(self, text: str) -> set[str]:
        lengths = ((word, 2 if "가" <= word[0] <= "힣" else STEM) for word in words(text) if word not in self._ignored)
        return {word[:length] for word, length in lengths}  # Korean words end in particles

    def __str__(self) -> str:
        """For example `28 of 40 questions dropped (20 without a word of the passage, 8 not a single question)`."""
        dropped = f"{self.dropped.total():,} of {counted(self.asked, 'question')} dropped"
        return f"{dropped} ({skips(self.dropped)})" if self.dropped else dropped


def write_questions(
    backend: Backend,
    passages: Sequence[tuple[int, str]],
    seed: int,
    end: float = math.inf,
    keep: QuestionFilter | None = None,
) -> Iterator[tuple[int, str]]:
    """Yield the number of each passage for which a language model writes a usable question, and the question.

    From the time `end` (`time.monotonic`) on, no question is requested. `keep` decides and counts which questions are usable.
    """
    keep = keep or QuestionFilter(text for _, text in passages)
    requests = (Request(question_prompt(text), seed + number) for number, text in passages)
    in_time = takewhile(lambda _: time.monotonic() < end, requests)
    for (number, passage), (_, reply) in zip(passages, backend.replies(in_time), strict=False):
        text = _LABEL.sub("", first_line_of(reply))
        if keep(text, passage):
            yield number, text
