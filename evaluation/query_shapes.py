"""Shorter queries made from sentences and docstrings, and queries chosen to resemble those that users type.

    whole     the sentence or docstring itself
    short     its eight consecutive words with the highest sum of inverse document frequencies
    keywords  its four rarest words, in the order of the text
    dropout   half of its words, in random order

`resembling` picks for each query one of these shapes, so that all queries together resemble a few real ones in length, function words,
rare words and lexical overlap. No labels are needed: overlap is measured with the passage that BM25 ranks first.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.text.words import UNSPACED, word_places, words, words_at
from revela_hub.retrieval.bm25 import BM25

QueryShape: TypeAlias = Literal["whole", "short", "keywords", "dropout"]
SHAPES: tuple[QueryShape, ...] = get_args(QueryShape)
MAX_KEYWORDS = 4
SHORT_WORDS = 8
FREQUENT_FRACTION = 0.1
"""Fraction of the passages from which a word counts as a function word."""
_IN_CLAUSE = re.compile(f"[{UNSPACED}]{{2}}")


@dataclass(frozen=True)
class WordCounts:
    """Document frequencies: the number of passages by word, and of all passages."""

    counts: Mapping[str, int]
    passages: int

    @classmethod
    def of(cls, passages: Sequence[str]) -> "WordCounts":
        """Count the words of passages."""
        return cls(Counter(word for passage in passages for word in set(words(passage))), len(passages))

    def idf(self, word: str) -> float:
        """Return the inverse document frequency of a word; a word in no passage is as rare as one in half a passage."""
        return math.log((self.passages + 1) / max(0.5, self.counts.get(word, 0)))


def keywords(text: str, vocabulary: WordCounts, number: int = MAX_KEYWORDS) -> str:
    """Return the rarest words of a text that occur in a passage, in the order of the text.

    >>> vocabulary = WordCounts.of(["the river bends", "the sea", "the bank of the river", "rivers erode"])
    >>> keywords("The river and the sea erode the bank", vocabulary, number=3)
    'sea erode bank'
    """
    known = [word for word in dict.fromkeys(words(text)) if word in vocabulary.counts]
    rarest = set(sorted(known, key=lambda word: (-vocabulary.idf(word), known.index(word)))[:number])
    return " ".join(word for word in known if word in rarest)


def shorten(text: str, vocabulary: WordCounts, number: int = SHORT_WORDS) -> str:
    """Return the consecutive words of a text with the highest sum of inverse document frequencies.

    Where words have no spaces between them, the text begins and, if there is an end nearby, ends with a clause.

    >>> vocabulary = WordCounts.of(["the river bends", "the sea", "the bank of the river", "rivers erode"])
    >>> shorten("The sea, the river and rain erode a bank.", vocabulary, number=4)
    'and rain erode a'
    >>> shorten("如果需要重新分区，请先备份，再创建文件系统。", vocabulary, number=6)
    '请先备份，再创建文件系统。'
    """
    places = word_places(text)
    weights = [sum(min(vocabulary.idf(word), 8.0) for word in at) for at in words_at(text, places)]
    bounds = [n for n, (start, _) in enumerate(places) if not (start and _IN_CLAUSE.match(text, start - 1))]
    windows = []
    for start in bounds:
        aim = min(start + number, len(places))
        near = [end for end in (*bounds, len(places)) if end > start and 2 * abs(end - aim) <= number]
        windows.append((start, min(near, key=lambda end: abs(end - aim), default=aim)))
    start, stop = max(windows, key=lambda window: (sum(weights[slice(*window)]), -window[0]), default=(0, 0))
    return text[places[start][0] : places[stop - 1][1]] if stop else ""


def drop_words(text: str, seed: str) -> str:
    """Return half of the words of a text, at least three of them, in random order.

    >>> drop_words("Rivers carry sediment from the mountains to the sea.", "0")
    'mountains carry sediment to'
    """
    found = [text[start:end] for start, end in word_places(text)]
    return " ".join(random.Random(seed).sample(found, min(len(found), max(3, len(found) // 2))))


def in_shape(shape: QueryShape, queries: Mapping[str, str], passages: Sequence[str]) -> dict[str, str]:
    """Return sentences or docstrings, by id, in another shape; passages do not contain them. The id is the seed of `dropout`."""
    vocabulary = WordCounts.of(passages)
    make: dict[QueryShape, Callable[[str, str], str]] = {
        "whole": lambda id_, text: text,
        "short": lambda id_, text: shorten(text, vocabulary) or text,
        "keywords": lambda id_, text: keywords(text, vocabulary) or text,
        "dropout": lambda id_, text: drop_words(text, id_),
    }
    return {id_: make[shape](id_, text) for id_, text in queries.items()}


def resembling(queries: Mapping[str, str], examples: Sequence[str], passages: Sequence[str]) -> dict[str, str]:
    """Return each query in the shape that makes all together resemble example queries.

    The examples take turns, and each takes the query nearest to it in four numbers, scaled by their spread over all shapes: length,
    fraction of function words, rarity of the other words, and lexical overlap with the passage that BM25 ranks first. Queries are
    sentences or docstrings by id, which the passages do not contain; examples are real queries without labels, of which at most as many
    are used as there are queries, a random sample.
    """
    if not queries:
        return {}
    examples = random.Random(0).sample(list(examples), min(len(examples), len(queries)))  # a file may be sorted
    pool = [(id_, text) for shape in SHAPES for id_, text in in_shape(shape, queries, passages).items()]
    numbers_QF = _numbers([*(text for _, text in pool), *examples], passages)
    pool_PF, examples_EF = numbers_QF[: len(pool)], numbers_QF[len(pool) :]
    spread_F = np.maximum(pool_PF.std(0), 1e-6)
    distance_EP = np.square((examples_EF[:, None] - pool_PF[None]) / spread_F).sum(-1)
    orders = [iter(np.argsort(row, kind="stable")) for row in distance_EP]
    chosen: dict[str, str] = {}
    while len(chosen) < len(queries):
        for order in orders:
            place = next((place for place in order if pool[place][0] not in chosen), None)
            if place is not None:
                chosen[pool[place][0]] = pool[place][1]
    return {id_: chosen[id_] for id_ in queries}


def _numbers(queries: list[str], passages: Sequence[str]) -> NDArray[np.float64]:
    """Return (Q, 4): log of the length, fraction of function words, mean idf of the others, and idf-weighted overlap."""
    vocabulary = WordCounts.of(passages)
    words_of = [set(words(passage)) for passage in passages]
    best = BM25(list(passages)).search(queries, 1).rows_QK[:, 0]
    rows = []
    for query, place in zip(queries, best, strict=True):
        found = words(query)
        rare = [word for word in found if vocabulary.counts.get(word, 0) < FREQUENT_FRACTION * vocabulary.passages]
        idf = {word: vocabulary.idf(word) for word in rare}
        shared = sum(value for word, value in idf.items() if place >= 0 and word in words_of[place])
        total, frequent = sum(idf.values()), (len(found) - len(rare)) / max(1, len(found))
        rows.append([math.log(1 + len(found)), frequent, total / max(1, len(idf)), shared / max(1e-9, total)])
    return np.array(rows)
