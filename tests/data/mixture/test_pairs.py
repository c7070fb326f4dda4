"""Labels, scores and negatives to pairs: each rule against all rows of a small set, by plain loops."""

from collections import Counter
from itertools import product

import pytest

from revela_hub.data.mixture.pairs import (
    ANCHOR_EQUALS_POSITIVE,
    BELOW_THRESHOLD,
    EMPTY,
    NO_NEGATIVE,
    REPEATED,
    SINGLE_EXAMPLE_CLASS,
    KnownPairs,
    Pair,
    SameLabel,
    class_pairs,
    distinct_pairs,
    fill_negatives,
    sts_pairs,
)

TEXTS = ["a0", "b0", "a1", "c0", "b1", "a2", "c1", "a3"]
EXAMPLES = [(text, text[0]) for text in TEXTS]


def examples(seed: int, num_negatives: int = 1) -> list[Pair]:
    pairs = class_pairs(EXAMPLES, seed=seed, dropped=Counter())
    return list(fill_negatives(pairs, TEXTS, SameLabel(EXAMPLES), num_negatives=num_negatives, seed=seed))


def test_every_other_example_of_a_class_is_a_positive_and_of_others_a_negative_equally_often() -> None:
    positives: Counter[tuple[str, str]] = Counter()
    negatives: Counter[tuple[str, str]] = Counter()
    rounds = 2000
    for seed in range(rounds):
        pairs = examples(seed)
        assert sorted(pair.anchor for pair in pairs) == sorted(TEXTS)
        for pair in pairs:
            positives[pair.anchor, pair.positive] += 1
            negatives[pair.anchor, pair.negatives[0]] += 1

    for one, other in product(TEXTS, TEXTS):
        same = one[0] == other[0]
        size = sum(text[0] == one[0] for text in TEXTS)
        chance = 1 / (size - 1) if same and one != other else 0.0
        assert positives[one, other] / rounds == pytest.approx(chance, abs=0.05)
        chance = 0.0 if same else 1 / (len(TEXTS) - size)
        assert negatives[one, other] / rounds == pytest.approx(chance, abs=0.05)
    assert all(len(set(pair.negatives)) == 4 for pair in examples(0, 4))
    assert examples(1) == examples(1) != examples(2)


def test_a_text_of_two_classes_is_no_negative_of_either() -> None:
    given = list(zip(["both", "a0", "a1", "both", "b0", "b1"], "aaabbb", strict=True))
    pool = [text for text, _ in given]
    for seed in range(20):
        pairs = class_pairs(given, seed=seed, dropped=Counter())
        for pair in fill_negatives(pairs, pool, SameLabel(given), num_negatives=4, seed=seed):
            own = pair.anchor[0]
            assert own != "b" or pair.anchor != "both"
            assert set(pair.negatives) == ({"b0", "b1"} if own == "a" else {"a0", "a1"})
    dropped: Counter[str] = Counter()
    alone = [("x", "a"), ("y", "b"), ("z", "b")]
    assert len(list(class_pairs(alone, dropped=dropped))) == 2
    assert dropped == {SINGLE_EXAMPLE_CLASS: 1}


def test_similar_sentences_are_pairs_both_ways() -> None:
    dropped: Counter[str] = Counter()
    rows = [("one", "1", 5.0), ("two", "2", 4.0), ("three", "3", 3.99), ("four", "4", float("nan"))]
    pairs = list(sts_pairs(rows, dropped=dropped))
    assert pairs == [Pair("one", "1"), Pair("1", "one"), Pair("two", "2"), Pair("2", "two")]
    assert dropped == {BELOW_THRESHOLD: 2}
    assert len(list(sts_pairs(rows, threshold=3.5, dropped=dropped))) == 6


def test_pairs_that_teach_nothing_are_counted() -> None:
    dropped: Counter[str] = Counter()
    pairs = [Pair("q", "p"), Pair("q", "p", ["n"]), Pair("q", "q"), Pair(" ", "p"), Pair("q", ""), Pair("q", "p2")]

    assert list(distinct_pairs(pairs, dropped=dropped)) == [Pair("q", "p"), Pair("q", "p2")]
    assert dropped == {REPEATED: 1, ANCHOR_EQUALS_POSITIVE: 1, EMPTY: 2}


def test_given_negatives_are_cut_and_missing_ones_drawn() -> None:
    pool = ["p0", "p1", "p2", "p3", "p4", "p5"]
    belongs = KnownPairs([("q", "p0"), ("q", "p1"), ("other", "p2")])
    pairs = [Pair("q", "p0", ["h1", "h2", "h3"]), Pair("q", "p0", ["h1"]), Pair("q", "p1")]
    drawn = set()
    for seed in range(50):
        counts: Counter[str] = Counter()
        first, second, third = fill_negatives(pairs, pool, belongs, num_negatives=2, seed=seed, counts=counts)

        assert first.negatives == ["h1", "h2"]
        assert second.negatives[0] == "h1"
        drawn |= {second.negatives[1], *third.negatives}
        assert len(set(third.negatives)) == 2
        assert +counts == {"given": 3, "drawn": 3}
    assert drawn == {"p2", "p3", "p4", "p5"}  # not p1, which is another right answer to q


@pytest.mark.parametrize(
    ("pool", "negatives"),
    [
        (["p", "p"], None),  # none is possible: the pair is dropped
        (["p", "n", "n"], ["n", "n", "n"]),  # too few are repeated
        (["n", "n", "n", "m"], ["m", "n"]),  # a repeated text is drawn once
    ],
)
def test_negatives_of_a_small_pool(pool: list[str], negatives: list[str] | None) -> None:
    for seed in range(20):
        dropped: Counter[str] = Counter()
        number = len(negatives or "n")
        filled = list(
            fill_negatives([Pair("q", "p")], pool, KnownPairs(), num_negatives=number, seed=seed, dropped=dropped)
        )
        assert [sorted(pair.negatives) for pair in filled] == ([negatives] if negatives else [])
        assert dropped == ({} if negatives else {NO_NEGATIVE: 1})
