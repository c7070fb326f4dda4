"""Making (anchor, positive, negatives) from labelled texts, scored sentences and question-passage pairs.

As in arXiv 2405.17428, section 4.2. Classification and clustering, example-based (`mode="example"`, for tasks with many
classes): the positive is another example of the same class, negatives are examples of other classes. Label-based
(`mode="label"`, for binary tasks, too): the positive is the text of the label, negatives are the texts of
other labels. Semantic similarity: a pair with a score of at least 4 of 5 gives an example in each direction.

Missing negatives are drawn uniformly from the texts of the same task, except for known positives. All functions draw with `seed`
only, and count skipped items by reason in `dropped`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, cycle, islice
from typing import Literal, TypeAlias

import numpy as np

from revela_hub.data.text.same_text import text_key

PairMode: TypeAlias = Literal["example", "label"]

EMPTY = "empty"
ANCHOR_EQUALS_POSITIVE = "anchor equal to positive"
REPEATED = "repeated"
NO_NEGATIVE = "without a possible negative"
BELOW_THRESHOLD = "below the threshold"
SINGLE_EXAMPLE_CLASS = "in a class with one example"

_key = lru_cache(maxsize=64)(text_key)  # of a pair's texts, which are compared with each candidate
# Give up after this many draws: the pool has hardly any usable texts.
_MAX_DRAWS = 1000


@dataclass(frozen=True)
class Pair:
    """One training example: an anchor, its positive, and its negatives, hardest first.

    `instruction` overrides the instruction of the task.
    """

    anchor: str
    positive: str
    negatives: Sequence[str] = ()
    instruction: str = ""


class KnownPairs:
    """Known pairs of an anchor and a positive, which must not be a negative of it.

    Texts with the same `text_key` are the same. Stores 64-bit hashes instead of texts: about 100 bytes per pair.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._hashes = {self._hash(*pair) for pair in pairs}

    def add(self, anchor: str, text: str) -> bool:
        """Add a pair; return whether it is new."""
        before = len(self._hashes)
        self._hashes.add(self._hash(anchor, text))
        return len(self._hashes) > before

    def __contains__(self, pair: tuple[str, str]) -> bool:
        return self._hash(*pair) in self._hashes

    @staticmethod
    def _hash(anchor: str, text: str) -> int:
        return hash((_key(anchor), _key(text)))


class SameLabel:
    """The pairs of texts that have a label in common: a text with two labels is never a negative of either class."""

    def __init__(self, examples: Iterable[tuple[str, str]]) -> None:
        self._labels: dict[str, set[str]] = defaultdict(set)
        for text, label in examples:
            self._labels[_key(text)].add(label)

    def __contains__(self, pair: tuple[str, str]) -> bool:
        first, second = (self._labels.get(_key(text), set()) for text in pair)
        return not first.isdisjoint(second)


def class_pairs(examples: Iterable[tuple[str, str]], *, seed: int = 0, dropped: Counter[str]) -> Iterator[Pair]:
    """Pair each labelled text with another text of its class at random; a class needs at least two texts.

    The texts of a class are distinct (by `text_key`): `distinct_pairs` of texts and labels.
    """
    rng = np.random.default_rng(seed)
    classes: dict[str, list[str]] = defaultdict(list)
    for text, label in examples:
        classes[label].append(text)
    for texts in classes.values():
        if len(texts) == 1:
            dropped[SINGLE_EXAMPLE_CLASS] += 1
            continue
        others = (np.arange(len(texts)) + rng.integers(1, len(texts), size=len(texts))) % len(texts)
        yield from (Pair(text, texts[other]) for text, other in zip(texts, others.tolist(), strict=True))


def sts_pairs(
    rows: Iterable[tuple[str, str, float]], *, threshold: float = 4.0, dropped: Counter[str]
) -> Iterator[Pair]:
    """Make two pairs, one per direction, of sentences with a score of at least `threshold` (4 on the scale from 0 to 5)."""
    for first, second, score in rows:
        if score >= threshold:  # not NaN
            yield Pair(first, second)
            yield Pair(second, first)
        else:
            dropped[BELOW_THRESHOLD] += 1


def distinct_pairs(pairs: Iterable[Pair], *, dropped: Counter[str]) -> Iterator[Pair]:
    """Skip pairs with an empty side, with two equal sides, and duplicates."""
    seen = KnownPairs()
    for pair in pairs:
        if not pair.anchor.strip() or not pair.positive.strip():
            dropped[EMPTY] += 1
        elif _key(pair.anchor) == _key(pair.positive):
            dropped[ANCHOR_EQUALS_POSITIVE] += 1
        elif not seen.add(pair.anchor, pair.positive):
            dropped[REPEATED] += 1
        else:
            yield pair


def fill_negatives(
    pairs: Iterable[Pair],
    pool: Sequence[str],
    known: KnownPairs | SameLabel,
    *,
    num_negatives: int = 1,
    seed: int = 0,
    dropped: Counter[str] | None = None,
    counts: Counter[str] | None = None,
) -> Iterator[Pair]:
    """Give each pair `num_negatives` negatives: remove extra ones, draw missing ones from the pool.

    A negative must not be empty, the same text as the anchor or the positive, or a known positive of the anchor.
    The negatives of a pair are distinct, or repeated if there are too few. Pairs without a possible negative are counted in `dropped`,
    negatives in `counts`: `given`, `drawn`, and `wrong` (given, but not allowed).
    """
    dropped = Counter() if dropped is None else dropped
    counts = Counter() if counts is None else counts
    rng = np.random.default_rng(seed)
    for pair in pairs:
        allowed = [text for text in pair.negatives if _may_be_negative(text, pair, known)]
        counts["wrong"] += len(pair.negatives) - len(allowed)
        given = distinct_texts(allowed, num_negatives)
        drawn: Iterable[str] = ()
        if len(given) < num_negatives:
            drawn = (pool[index] for index in rng.choice(len(pool), min(len(pool), _MAX_DRAWS), replace=False))
        usable = (text for text in drawn if _may_be_negative(text, pair, known))
        negatives = distinct_texts(chain(given, usable), num_negatives)
        if not negatives:
            dropped[NO_NEGATIVE] += 1
            continue
        counts.update({"given": len(given), "drawn": num_negatives - len(given)})
        yield replace(pair, negatives=list(islice(cycle(negatives), num_negatives)))


def _may_be_negative(text: str, pair: Pair, known: KnownPairs | SameLabel) -> bool:
    own = (_key(pair.anchor), _key(pair.positive))
    return bool(text.strip()) and _key(text) not in own and (pair.anchor, text) not in known


def distinct_texts(texts: Iterable[str], most: int) -> list[str]:
    """Return the first texts that are not the same as an earlier one (`text_key`); no more are read than needed."""
    found: dict[str, str] = {}
    for text in texts:
        found.setdefault(_key(text), text)
        if len(found) == most:
            break
    return list(found.values())
