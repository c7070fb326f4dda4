"""Making (anchor, positive, negatives) from labelled texts, scored sentences and question-passage pairs.

As in arXiv 2405.17428, section 4.2. Classification and clustering, example-based (`mode="example"`, for tasks with many
classes): the positive is another example of the same class, negatives are examples of other classes. Label-based
(`mode="label"`, for binary tasks, too): the positive is the text of the label, negatives are the texts of
other labels. Semantic similarity: a pair with a score of at least 4 of 5 gives an example in each direction.

Missing negatives are drawn uniformly from the texts of the same task, except for known positives. All functions are
generators, draw with `seed` only, and count skipped items by reason in `dropped`. Texts are read by index, so a memory-mapped
Arrow column works as well as a list.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, cycle, islice
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from revela_hub.data.text.same_text import text_key

PairMode: TypeAlias = Literal["example", "label"]
Integers: TypeAlias = npt.NDArray[np.int64]

EMPTY = "empty"
ANCHOR_EQUALS_POSITIVE = "anchor equal to positive"
REPEATED = "repeated"
NO_NEGATIVE = "without a possible negative"
NO_LABEL = "without label"
BELOW_THRESHOLD = "below the threshold"
SINGLE_EXAMPLE_CLASS = "in a class with one example"

_key = lru_cache(maxsize=64)(text_key)  # of a pair's texts, which are compared with each candidate
# Give up after this many unusable draws in a row: the pool has hardly any other texts.
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


@dataclass
class KnownPairs:
    """The known positives of each anchor, which must not be negatives.

    Texts with the same `text_key` are the same. Stores 64-bit hashes instead of texts: about 100 bytes per pair.
    """

    hashes: set[int] = field(default_factory=set)

    def add(self, anchor: str, text: str) -> bool:
        """Add a pair; return whether it is new."""
        before = len(self.hashes)
        self.hashes.add(self._hash(anchor, text))
        return len(self.hashes) > before

    def __contains__(self, pair: tuple[str, str]) -> bool:
        return self._hash(*pair) in self.hashes

    @staticmethod
    def _hash(anchor: str, text: str) -> int:
        return hash((_key(anchor), _key(text)))


def is_empty(text: str) -> bool:
    """Return whether the text is empty or only white space."""
    return not text or text.isspace()


# --- classification and clustering


def classification_pairs(
    texts: Sequence[str],
    labels: Sequence[Any],
    *,
    mode: PairMode = "example",
    num_negatives: int = 1,
    seed: int = 0,
    max_pairs: int | None = None,
    dropped: Counter[str] | None = None,
) -> Iterator[Pair]:
    """Make a pair of each labelled text; in clustering, the label is the cluster.

    Texts that are empty, unlabelled (None or ""), or repeated under the same label are skipped. A text with two labels is
    never a negative for an anchor with either of them.

    Args:
        texts: The N texts.
        labels: Their N labels; with `mode="label"` their strings are embedded.
        mode: `"example"` or `"label"`, see above. With `"example"` a class needs at least two texts.
        num_negatives: Negatives per pair; they are distinct, or repeated if there are too few.
        seed: The seed of the draws, and of the selection if `max_pairs` limits the pairs.
        max_pairs: Stop after this many pairs.
        dropped: Counts of skipped items by reason, updated here.

    Yields:
        Pairs in the order of the texts (in random order with `max_pairs`).
    """
    dropped = Counter() if dropped is None else dropped
    rng = np.random.default_rng(seed)
    examples = _Examples(texts, labels, dropped)
    order = np.arange(len(examples.codes)) if max_pairs is None else rng.permutation(len(examples.codes))
    made = 0
    for index in order.tolist():
        if made == max_pairs:
            return
        anchor, label = examples.text(index), int(examples.codes[index])
        if mode == "label":
            positive, candidates = examples.names[label], examples.other_names(rng, label)
        elif examples.size(label) > 1:
            positive, candidates = examples.another(rng, index), examples.of_other_classes(rng, label)
        else:
            dropped[SINGLE_EXAMPLE_CLASS] += 1
            continue
        own = {_key(anchor), _key(positive)}
        if len(own) == 1:  # only for a label's text: examples of a class are distinct
            dropped[ANCHOR_EQUALS_POSITIVE] += 1
            continue
        allowed = (text for text in candidates if _key(text) not in own and not examples.has(label, text))
        negatives = _filled([], allowed, num_negatives)
        if len(negatives) < num_negatives:
            dropped[NO_NEGATIVE] += 1
            continue
        made += 1
        yield Pair(anchor, positive, negatives)


class _Examples:
    """Labelled texts, distinct within each class; others are counted in `dropped`.

    Attributes:
        texts: All texts, including unused ones.
        kept: (N,) The positions of the examples in `texts`.
        codes: (N,) Their classes, 0 to C - 1.
        names: The C labels.
        labelled: The set of (label, text).
    """

    def __init__(self, texts: Sequence[str], labels: Sequence[Any], dropped: Counter[str]) -> None:
        self.texts, self.labelled = texts, KnownPairs()
        kept: list[int] = []
        codes: list[int] = []
        code_of: dict[str, int] = {}
        for index, (text, label) in enumerate(zip(texts, labels, strict=True)):
            name = "" if label is None else str(label)
            if is_empty(text):
                dropped[EMPTY] += 1
            elif is_empty(name):
                dropped[NO_LABEL] += 1
            elif not self.labelled.add(name, text):
                dropped[REPEATED] += 1
            else:
                kept.append(index)
                codes.append(code_of.setdefault(name, len(code_of)))
        self.names = list(code_of)
        self.kept: Integers = np.array(kept, dtype=np.int64)
        self.codes: Integers = np.array(codes, dtype=np.int64)
        # The examples sorted by class, class c from starts[c] to starts[c + 1]; and the rank of each in that order.
        self.by_class = np.argsort(self.codes, kind="stable")
        self.starts = np.concatenate([[0], np.cumsum(np.bincount(self.codes, minlength=len(self.names)))])
        self.rank = np.argsort(self.by_class, kind="stable")

    def text(self, index: int) -> str:
        return self.texts[int(self.kept[index])]

    def size(self, label: int) -> int:
        return int(self.starts[label + 1] - self.starts[label])

    def has(self, label: int, text: str) -> bool:
        """Return whether the text has this label, possibly among others."""
        return (self.names[label], text) in self.labelled

    def another(self, rng: np.random.Generator, index: int) -> str:
        """Draw another example of the same class."""
        label = self.codes[index]
        drawn = int(self.starts[label] + rng.integers(self.size(label) - 1))
        return self.text(self.by_class[drawn + (drawn >= self.rank[index])])

    def of_other_classes(self, rng: np.random.Generator, label: int) -> Iterator[str]:
        """Yield all examples of other classes, in random order."""
        start, size = int(self.starts[label]), self.size(label)
        for drawn in distinct_draws(rng, len(self.codes) - size):
            yield self.text(self.by_class[drawn + size * (drawn >= start)])

    def other_names(self, rng: np.random.Generator, label: int) -> Iterator[str]:
        """Yield the texts of the other labels, in random order."""
        for drawn in distinct_draws(rng, len(self.names) - 1):
            yield self.names[drawn + (drawn >= label)]


# --- semantic similarity


def sts_pairs(
    sentences1: Iterable[str],
    sentences2: Iterable[str],
    scores: Iterable[float],
    *,
    threshold: float = 4.0,
    dropped: Counter[str] | None = None,
) -> Iterator[Pair]:
    """Make two pairs, one per direction, of sentences with a score of at least `threshold` (4 on the scale from 0 to 5).

    `dropped` counts skipped items by reason, once for both directions.

    Yields:
        Pairs without negatives; `fill_negatives` draws them.
    """
    dropped = Counter() if dropped is None else dropped
    for first, second, score in zip(sentences1, sentences2, scores, strict=True):
        if is_empty(first) or is_empty(second):
            dropped[EMPTY] += 1
        elif not score >= threshold:  # NaN too
            dropped[BELOW_THRESHOLD] += 1
        elif _key(first) == _key(second):
            dropped[ANCHOR_EQUALS_POSITIVE] += 1
        else:
            yield Pair(first, second)
            yield Pair(second, first)


# --- retrieval, and the negatives of all that have pairs


def distinct_pairs(pairs: Iterable[Pair], *, dropped: Counter[str] | None = None) -> Iterator[Pair]:
    """Skip pairs with an empty side, with two equal sides, and duplicates."""
    dropped = Counter() if dropped is None else dropped
    seen = KnownPairs()
    for pair in pairs:
        if is_empty(pair.anchor) or is_empty(pair.positive):
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
    known: KnownPairs,
    *,
    num_negatives: int = 1,
    seed: int = 0,
    dropped: Counter[str] | None = None,
    counts: Counter[str] | None = None,
) -> Iterator[Pair]:
    """Give each pair `num_negatives` negatives: remove extra ones, draw missing ones from the pool.

    A negative must not be empty, the same text as the anchor or the positive, or a known positive of the anchor.
    The negatives of a pair are distinct, or repeated if there are too few.

    Args:
        pairs: Pairs with any number of negatives; the first ones are kept.
        pool: The texts to draw from: the corpus, or the texts of the task.
        known: All known pairs.
        num_negatives: Negatives per pair.
        seed: The seed of the draws.
        dropped: Counts of skipped items, updated with the pairs that have no possible negative.
        counts: Counts of negatives, updated here: `given`, `drawn`, and `wrong` (given, but not allowed).

    Yields:
        The pairs, with `num_negatives` negatives each.
    """
    dropped = Counter() if dropped is None else dropped
    counts = Counter() if counts is None else counts
    rng = np.random.default_rng(seed)
    for pair in pairs:
        allowed = [text for text in pair.negatives if _may_be_negative(text, pair, known)]
        counts.update(["wrong"] * (len(pair.negatives) - len(allowed)))
        given = _distinct(allowed)[:num_negatives]
        candidates: Iterable[str] = ()
        if len(given) < num_negatives:
            drawn = islice((pool[index] for index in distinct_draws(rng, len(pool))), _MAX_DRAWS)
            candidates = (text for text in drawn if _may_be_negative(text, pair, known))
        negatives = _filled(given, candidates, num_negatives)
        if len(negatives) < num_negatives:
            dropped[NO_NEGATIVE] += 1
            continue
        counts.update({"given": len(given), "drawn": num_negatives - len(given)})
        yield replace(pair, negatives=negatives)


def _may_be_negative(text: str, pair: Pair, known: KnownPairs) -> bool:
    own = (_key(pair.anchor), _key(pair.positive))
    return not (is_empty(text) or _key(text) in own or (pair.anchor, text) in known)


def _filled(given: Sequence[str], candidates: Iterable[str], count: int) -> list[str]:
    """Return `count` texts: the given ones, then distinct candidates, repeated if there are too few."""
    texts = _distinct(chain(given, candidates), count)
    return list(islice(cycle(texts), count)) if texts else []


def _distinct(texts: Iterable[str], most: int | None = None) -> list[str]:
    """Return the first texts that are not the same as an earlier one; no more are read than needed."""
    found: dict[str, str] = {}
    for text in texts:
        found.setdefault(_key(text), text)
        if len(found) == most:
            break
    return list(found.values())


def distinct_draws(rng: np.random.Generator, population: int) -> Iterator[int]:
    """Yield the numbers 0 to `population - 1` in random order, drawn lazily.

    This is cheap for the first few numbers of a large population, unlike a permutation.
    """
    seen: set[int] = set()
    while 2 * len(seen) < population:
        number = int(rng.integers(population))
        if number not in seen:
            seen.add(number)
            yield number
    rest = np.array([number for number in range(population) if number not in seen], dtype=np.int64)
    yield from (int(number) for number in rng.permutation(rest))
