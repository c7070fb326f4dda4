"""Scoring answers with exact match, F1 and answer recall, using the normalisation of SQuAD.

The normalisation of the official SQuAD v1.1 script: lower case, no punctuation, no articles, single spaces.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import category

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.text.words import UNSPACED_CHARACTER

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class QAScores:
    """Mean scores over all questions, between 0 and 1.

    Attributes:
        questions: The number of questions.
        exact_match: The fraction of answers that equal an accepted answer.
        f1: The mean of the best token F1 over the accepted answers.
        answer_recall: The fraction of questions with an accepted answer in a passage, among those that have passages; None
            without passages.
        k: Passages per question.
        per_question: Each score's value for every question (answer recall: with passages), for a paired test.
    """

    questions: int
    exact_match: float
    f1: float
    answer_recall: float | None
    k: int
    per_question: dict[str, NDArray[np.float64]]

    def to_dict(self) -> dict[str, Any]:
        """Return the means, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "per_question"}


def normalized(text: str) -> str:
    """Normalise a text as SQuAD does; in scripts without spaces, each character is a word, as in CMRC and MLQA.

    >>> normalized("The  Nobel Prize, (a prize)."), normalized("北京。")
    ('nobel prize prize', '北 京')
    """
    text = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    if not text.isascii() and UNSPACED_CHARACTER.search(text):
        text = "".join(f" {c} " if UNSPACED_CHARACTER.match(c) else c for c in text if category(c)[0] != "P")
    return " ".join(text.split())


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the answer equals an accepted one, otherwise 0."""
    return float(normalized(answer) in {normalized(text) for text in accepted})


def f1(answer: str, accepted: Sequence[str]) -> float:
    """Return the token F1, the maximum over the accepted answers."""
    return max((_f1(normalized(answer).split(), normalized(text).split()) for text in accepted), default=0.0)


def _f1(got: list[str], wanted: list[str]) -> float:
    if not got or not wanted:
        return float(got == wanted)
    common = sum((Counter(got) & Counter(wanted)).values())
    return 2 * common / (len(got) + len(wanted))


def holds_answer(passages: Sequence[str], accepted: Sequence[str]) -> bool:
    """Return whether a passage contains an accepted answer, as whole words after normalisation."""
    texts = [f" {normalized(passage)} " for passage in passages]
    wanted = [f" {words} " for text in accepted if (words := normalized(text))]
    return any(words in text for text in texts for words in wanted)


def score_answers(
    answers: Sequence[str], accepted: Sequence[Sequence[str]], passages: Sequence[Sequence[str]] | None = None
) -> QAScores:
    """Score one answer per question.

    Args:
        answers: The generated answers.
        accepted: The accepted answers of each question.
        passages: The passages of each question, if any; some questions may have none.
    """
    pairs = list(zip(answers, accepted, strict=True))
    per_question = {
        "exact_match": np.array([exact_match(answer, wanted) for answer, wanted in pairs], float),
        "f1": np.array([f1(answer, wanted) for answer, wanted in pairs], float),
    }
    read = passages or [()] * len(answers)
    if any(read):
        held = [holds_answer(texts, wanted) for texts, wanted in zip(read, accepted, strict=True) if texts]
        per_question["answer_recall"] = np.array(held, float)
    means = {name: float(values.mean()) for name, values in per_question.items()}
    k = max(map(len, read), default=0)
    return QAScores(
        len(answers), means["exact_match"], means["f1"], means.get("answer_recall"), k, per_question=per_question
    )
