"""Filter for questions that a language model writes about passages.

Small models often ask about the prompt ("What is your question?"), repeat a part of it, or make statements. Such a reply has
no word in common with its passage, apart from function words and words of the prompt, or is not a single question.
"""

import re
from collections import Counter
from collections.abc import Iterable

from revela_hub.data.sources.report import counted, skips
from revela_hub.data.text.words import LETTER, count_words, words

MIN_WORDS, MAX_WORDS = 3, 60
FREQUENT, MIN_FREQUENT = 0.1, 3
"""Fraction and number of the passages from which a word counts as a function word."""
STEM = 4
"""Longer words are compared by this number of first characters, so that "rivers" and "river" are equal."""
_LABEL = re.compile(r"(?:the )?question(?: is)?\s*:\s*[\"\u201c]?", re.IGNORECASE)
# A statement, or a sentence before the question; a shorter word before the full stop may be an abbreviation.
_STATEMENT = re.compile(rf"{LETTER}{{4}}[.!]\s|[。！।۔].|[.!:。！：।۔]$")


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
        return {word[:STEM] for word in words(text) if word not in self._ignored}

    def __str__(self) -> str:
        """For example `28 of 40 questions dropped (20 without a word of the passage, 8 not a single question)`."""
        dropped = f"{self.dropped.total():,} of {counted(self.asked, 'question')} dropped"
        return f"{dropped} ({skips(self.dropped)})" if self.dropped else dropped
