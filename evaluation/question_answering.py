"""Scoring answers with exact match and F1 (the normalisation of SQuAD), and passages with answer recall (that of DPR).

SQuAD v1.1's official script compares in lower case, without punctuation and articles, with single spaces. A passage contains an answer
in DPR (arXiv 2004.04906) if the answer's tokens are consecutive tokens of it: in lower case, words of letters, digits and marks in
Unicode's form NFD, and each other character. In scripts without spaces, each character is a token.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import category, normalize

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.text.words import INVISIBLE, MARKS, UNSPACED, UNSPACED_CHARACTER
from revela_hub.evaluation.retrieval import RetrievalScores, cutoff

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_TOKEN = re.compile(rf"[{UNSPACED}]|(?:[^\W_{UNSPACED}]|[{MARKS}])+|[^\s\x00-\x1f\x7f-\x9f{INVISIBLE}]")
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
    """Return whether a passage contains an accepted answer, by the tokens of DPR.

    >>> holds_answer(["It was a Nobel-Prize."], ["nobel - prize"]), holds_answer(["Emma's"], ["Emma"]), holds_answer(["Emmas"], ["Emma"])
    (True, True, False)
    """
    wanted = [tokens for text in accepted if (tokens := _tokens(text)).strip()]
    return any(answer in text for text in map(_tokens, passages) for answer in wanted)


def _tokens(text: str) -> str:
    return f" {' '.join(_TOKEN.findall(normalize('NFD', text).lower()))} "


def answer_recall(
    passages: Iterable[Sequence[str]],
    accepted: Sequence[Sequence[str]],
    metrics: Sequence[str],
    *,
    name: str,
    documents: int,
) -> RetrievalScores:
    """Score the passages of each question, best first: whether one of the first k contains an accepted answer."""
    ranks: list[int | None] = []
    unanswered = 0
    for texts, wanted in zip(passages, accepted, strict=True):
        ranks.append(next((rank for rank, text in enumerate(texts, 1) if holds_answer([text], wanted)), None))
        unanswered += not texts
    per_query = {
        f"{kind}_at_{k}": {str(row): float(rank is not None and rank <= k) for row, rank in enumerate(ranks)}
        for kind, k in map(cutoff, metrics)
    }
    return RetrievalScores.of(name, per_query, documents, unanswered)


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
    recall = means.get("answer_recall")
    return QAScores(len(answers), means["exact_match"], means["f1"], recall, k, per_question)
