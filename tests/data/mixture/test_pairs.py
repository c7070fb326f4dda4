"""Labels, scores and negatives to pairs: each rule against all rows of a small set, by plain loops."""

from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from revela_hub.data.mixture.pairs import (
    ANCHOR_EQUALS_POSITIVE,
    BELOW_THRESHOLD,
    EMPTY,
    NO_LABEL,
    NO_NEGATIVE,
    REPEATED,
    SINGLE_EXAMPLE_CLASS,
    KnownPairs,
    Pair,
    PairMode,
    classification_pairs,
    distinct_draws,
    distinct_pairs,
    fill_negatives,
    sts_pairs,
)

TEXTS = ["a0", "b0", "a1", "c0", "b1", "a2", "c1", "a3"]
LABELS = [text[0] for text in TEXTS]


def known(*pairs: tuple[str, str]) -> KnownPairs:
    found = KnownPairs()
    for anchor, text in pairs:
        found.add(anchor, text)
    return found


# --- classification and clustering


def test_examples_of_the_same_class_are_positives_and_of_others_negatives() -> None:
    for seed in range(20):
        pairs = list(classification_pairs(TEXTS, LABELS, num_negatives=3, seed=seed))

        assert [pair.anchor for pair in pairs] == TEXTS
        for pair in pairs:
            assert pair.positive != pair.anchor
            assert pair.positive[0] == pair.anchor[0]
            assert len(set(pair.negatives)) == 3
            assert all(text in TEXTS and text[0] != pair.anchor[0] for text in pair.negatives)


def test_every_other_example_can_be_drawn_and_equally_often() -> None:
    positives: Counter[tuple[str, str]] = Counter()
    negatives: Counter[tuple[str, str]] = Counter()
    rounds = 2000
    for seed in range(rounds):
        for pair in classification_pairs(TEXTS, LABELS, seed=seed):
            positives[pair.anchor, pair.positive] += 1
            negatives[pair.anchor, pair.negatives[0]] += 1

    for one, other in product(TEXTS, TEXTS):
        same = one[0] == other[0]
        size = LABELS.count(one[0])
        chance = 1 / (size - 1) if same and one != other else 0.0
        assert positives[one, other] / rounds == pytest.approx(chance, abs=0.05)
        chance = 0.0 if same else 1 / (len(TEXTS) - size)
        assert negatives[one, other] / rounds == pytest.approx(chance, abs=0.05)


def test_labels_as_documents() -> None:
    names = {"a": "first letter", "b": "second letter", "c": "third letter"}
    labels = [names[text[0]] for text in TEXTS]
    seen = set()
    for seed in range(20):
        for pair in classification_pairs(TEXTS, labels, mode="label", num_negatives=2, seed=seed):
            assert pair.positive == names[pair.anchor[0]]
            assert {pair.positive, *pair.negatives} == set(names.values())
            seen.add((pair.anchor, tuple(pair.negatives)))
    assert len(seen) == 2 * len(TEXTS)  # both orders of the two other labels


def test_numbers_are_labels_too() -> None:
    pairs = list(classification_pairs(["x", "y"], [0, 1], mode="label"))

    assert pairs == [Pair("x", "0", ["1"]), Pair("y", "1", ["0"])]


def test_too_few_negatives_are_repeated() -> None:
    (pair, _) = classification_pairs(["no", "yes"], ["negative", "positive"], mode="label", num_negatives=3)
    assert pair.negatives == ["positive"] * 3
    pairs = list(classification_pairs(["a0", "a1", "b0", "b1"], list("aabb"), num_negatives=5))
    assert all(set(pair.negatives) == {"b0", "b1"} and len(pair.negatives) == 5 for pair in pairs[:2])


def test_what_cannot_be_a_pair_is_counted() -> None:
    texts = ["a0", "", "a1", "a0", "  ", "alone", "b0", "x", "y", "b1"]
    labels = ["a", "a", "a", "a", "b", "c", "b", None, "", "b"]
    dropped: Counter[str] = Counter()

    pairs = list(classification_pairs(texts, labels, dropped=dropped))

    assert [pair.anchor for pair in pairs] == ["a0", "a1", "b0", "b1"]
    assert dropped == {EMPTY: 2, REPEATED: 1, SINGLE_EXAMPLE_CLASS: 1, NO_LABEL: 2}
    assert any(
        "alone" in pair.negatives for seed in range(20) for pair in classification_pairs(texts, labels, seed=seed)
    )
    assert [pair.anchor for pair in classification_pairs(texts, labels, mode="label")] == [
        "a0", "a1", "alone", "b0", "b1"
    ]  # fmt: skip


def test_a_label_that_is_the_text_is_no_positive() -> None:
    dropped: Counter[str] = Counter()
    pairs = list(
        classification_pairs(["joy", "I laugh", "I cry"], ["joy", "joy", "grief"], mode="label", dropped=dropped)
    )
    assert [pair.anchor for pair in pairs] == ["I laugh", "I cry"]
    assert dropped == {ANCHOR_EQUALS_POSITIVE: 1}


def test_a_text_of_two_classes_is_no_negative_of_either() -> None:
    texts = ["both", "a0", "a1", "both", "b0", "b1"]
    for seed in range(20):
        for pair in classification_pairs(texts, list("aaabbb"), num_negatives=4, seed=seed):
            label = next(text[0] for text in (pair.anchor, pair.positive) if text != "both")
            assert set(pair.negatives) == ({"b0", "b1"} if label == "a" else {"a0", "a1"})


@pytest.mark.parametrize("mode", ["example", "label"])
def test_one_class_has_no_negatives(mode: PairMode) -> None:
    dropped: Counter[str] = Counter()
    assert not list(classification_pairs(["x", "y"], ["a", "a"], mode=mode, dropped=dropped))
    assert dropped == {NO_NEGATIVE: 2}


def test_the_seed_decides() -> None:
    texts = [f"{label}{number}" for label in "abcd" for number in range(10)]
    labels = [text[0] for text in texts]

    def made(seed: int, max_pairs: int | None = None) -> list[Pair]:
        return list(classification_pairs(texts, labels, num_negatives=2, seed=seed, max_pairs=max_pairs))

    assert made(1) == made(1) != made(2)
    assert len(made(1, 15)) == 15
    assert {pair.anchor for pair in made(1, 15)} != {pair.anchor for pair in made(2, 15)}
    assert len({pair.anchor[0] for pair in made(1, 15)}) > 1  # not the first 15, which are of two classes only
    assert len(made(1, 1000)) == len(texts)


# --- semantic similarity


def test_similar_sentences_are_pairs_both_ways() -> None:
    dropped: Counter[str] = Counter()
    rows: list[tuple[str, str, float]] = [
        ("one", "1", 5.0),
        ("two", "2", 4.0),
        ("three", "3", 3.99),
        ("four", "four", 5.0),
        ("five", "", 5.0),
        ("six", "6", float("nan")),
    ]

    pairs = list(sts_pairs(*zip(*rows, strict=True), dropped=dropped))

    assert pairs == [Pair("one", "1"), Pair("1", "one"), Pair("two", "2"), Pair("2", "two")]
    assert dropped == {BELOW_THRESHOLD: 2, ANCHOR_EQUALS_POSITIVE: 1, EMPTY: 1}
    assert len(list(sts_pairs(*zip(*rows, strict=True), threshold=3.5))) == 6


# --- retrieval


def test_pairs_that_teach_nothing_are_counted() -> None:
    dropped: Counter[str] = Counter()
    pairs = [Pair("q", "p"), Pair("q", "p", ["n"]), Pair("q", "q"), Pair(" ", "p"), Pair("q", ""), Pair("q", "p2")]

    assert list(distinct_pairs(pairs, dropped=dropped)) == [Pair("q", "p"), Pair("q", "p2")]
    assert dropped == {REPEATED: 1, ANCHOR_EQUALS_POSITIVE: 1, EMPTY: 2}


def test_given_negatives_are_cut_and_missing_ones_drawn() -> None:
    pool = ["p0", "p1", "p2", "p3", "p4", "p5"]
    belongs = known(("q", "p0"), ("q", "p1"), ("other", "p2"))
    pairs = [Pair("q", "p0", ["h1", "h2", "h3"]), Pair("q", "p0", ["h1"]), Pair("q", "p1")]
    drawn = set()
    for seed in range(50):
        counts: Counter[str] = Counter()
        first, second, third = fill_negatives(pairs, pool, belongs, num_negatives=2, seed=seed, counts=counts)

        assert first.negatives == ["h1", "h2"]
        assert second.negatives[0] == "h1"
        drawn |= {second.negatives[1], *third.negatives}
        assert len(set(third.negatives)) == 2
        assert counts == {"given": 3, "drawn": 3}
    assert drawn == {"p2", "p3", "p4", "p5"}  # not p1, which is another right answer to q


def test_given_negatives_that_are_right_are_left_out() -> None:
    counts: Counter[str] = Counter()
    pair = Pair("q", "p p", ["p\np ", "also  right", " q", "", "n", "n"])
    pool = ["p  p", "also right\n", "q", " ", "m"]

    (filled,) = fill_negatives([pair], pool, known(("q", "p p"), ("q ", "also right")), num_negatives=2, counts=counts)

    assert filled == Pair("q", "p p", ["n", "m"])
    assert counts == {"wrong": 4, "given": 1, "drawn": 1}


def test_without_any_negative_a_pair_is_dropped() -> None:
    dropped: Counter[str] = Counter()
    assert not list(fill_negatives([Pair("q", "p")], ["p", "p"], known(("q", "p")), dropped=dropped))
    assert dropped == {NO_NEGATIVE: 1}


def test_few_possible_negatives_are_repeated() -> None:
    (filled,) = fill_negatives([Pair("q", "p")], ["p", "n", "n"], known(("q", "p")), num_negatives=3)
    assert filled.negatives == ["n", "n", "n"]


def test_texts_that_are_twice_in_the_pool_are_drawn_once() -> None:
    for seed in range(20):
        (filled,) = fill_negatives([Pair("q", "p")], ["n", "n", "n", "m"], known(), num_negatives=2, seed=seed)
        assert set(filled.negatives) == {"n", "m"}


class Endless(Sequence[str]):
    """A pool of which nothing may be drawn; counts the draws."""

    draws = 0

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int | slice) -> str:  # type: ignore[override]
        self.draws += 1
        return ""


def test_a_pool_of_nothing_usable_is_given_up() -> None:
    pool = Endless()
    assert not list(fill_negatives([Pair("q", "p")], pool, known()))
    assert pool.draws == 1000


@pytest.mark.parametrize("population", [0, 1, 2, 7, 100])
def test_draws_are_a_permutation(population: int) -> None:
    draws = [tuple(distinct_draws(np.random.default_rng(seed), population)) for seed in range(5)]
    assert all(sorted(drawn) == list(range(population)) for drawn in draws)
    assert population < 7 or len(set(draws)) > 1
