"""Pseudo-queries extracted from passages, without a model; `revela-hub pseudo-queries` generates them with one."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from revela_hub.data.text.words import LETTER, UNSPACED, UNSPACED_CHARACTER, join_words, visible, word_places, words_at

WORD = re.compile(rf"[{UNSPACED}]+|(?:(?![{UNSPACED}]){LETTER})+(?:['’-](?:(?![{UNSPACED}]){LETTER})+)*")
SENTENCE_END = re.compile("[.!?;:\\n\u0964\u061f\u061b\u06d4\u17d4\u104b\u3002\uff01\uff1f\uff1b\uff1a]")


class ExtractiveQueries:
    """Extracts the n-gram that best distinguishes a passage from the others; needs no model.

    A query consists of at most `words` consecutive words of one sentence, with the largest sum of log(N / n) over its
    distinct words, where n of the N passages contain the word; several queries do not overlap. Case and punctuation are
    removed.
    """

    def __init__(self, queries: int = 1, words: int = 8) -> None:
        self.queries, self.words = queries, words
        self.description = f"extracted: the {words}-gram that best distinguishes a passage from the others"

    def __call__(self, passages: Sequence[str]) -> list[list[str]]:
        """Return the queries of each passage, with word weights computed on all of them."""
        texts = [visible(passage).lower() for passage in passages]
        found = [_words(text) for text in texts]
        documents = Counter(word for each in found for word in {word for place in each for word in place.words})
        weight = {word: math.log((1 + len(passages)) / number) for word, number in documents.items()}
        return [self._of(text, places, weight) for text, places in zip(texts, found, strict=True)]

    def _of(self, text: str, places: list["_Word"], weight: dict[str, float]) -> list[str]:
        windows = []
        for start, first in enumerate(places):
            window = [place for place in places[start : start + self.words] if place.sentence == first.sentence]
            distinct = set(chain.from_iterable(place.words for place in window))
            total = math.fsum(weight[word] for word in distinct)  # exact, so independent of their order
            windows.append((-total, len(window), start))
        chosen: list[tuple[int, int]] = []
        for _, length, start in sorted(windows):
            if len(chosen) < self.queries and all(start >= b or start + length <= a for a, b in chosen):
                chosen.append((start, start + length))
        return [join_words(text, [place.place for place in places[start:end]]) for start, end in chosen]


class _Word(NamedTuple):
    """A word of a text: its place, the words that it weighs as, and the number of its sentence."""

    place: tuple[int, int]
    words: list[str]
    sentence: int


def _words(text: str) -> list[_Word]:
    """Return the words of a text in lower case; in scripts without spaces, those of `word_places`."""
    found: list[_Word] = []
    sentence = end = 0
    for match in WORD.finditer(text):
        sentence += SENTENCE_END.search(text, end, match.start()) is not None
        end = match.end()
        if UNSPACED_CHARACTER.match(match[0]):
            places = [(start + match.start(), stop + match.start()) for start, stop in word_places(match[0])]
            found += [_Word(place, at, sentence) for place, at in zip(places, words_at(text, places), strict=True)]
        else:
            found.append(_Word(match.span(), [match[0]], sentence))
    return found
