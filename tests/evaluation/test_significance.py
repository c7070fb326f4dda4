"""The paired bootstrap against a plain loop, and what it says of equal, better and unlike models."""

import numpy as np
import pytest

from revela_hub.evaluation import compare_queries, paired_bootstrap
from revela_hub.evaluation.significance import too_few_queries


def test_equals_a_plain_loop() -> None:
    random = np.random.default_rng(1)
    a = random.random(40)
    b = a + random.normal(0.05, 0.15, 40)
    mean = float(np.mean(b - a))
    draws = np.random.default_rng(2)
    means = [float(np.mean((b - a)[draws.integers(0, 40, 40)])) for _ in range(20_000)]
    found = paired_bootstrap(a, b)
    assert found.difference == pytest.approx(mean)
    assert (found.low, found.high) == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=2e-3)
    assert found.p_value == pytest.approx(2 * np.mean([m <= 0 for m in means]), abs=0.01)
    assert found == paired_bootstrap(a, b)


def test_queries_of_one_document_are_drawn_together() -> None:
    random = np.random.default_rng(1)
    groups = [f"document {number % 13}" for number in range(60)]
    d = random.normal(0.05, 0.1, 60) + np.array([random.normal(0, 0.2)] * 60)
    d += np.array([0.2 * (number % 13 - 6) / 6 for number in range(60)])  # alike within a document
    draws = np.random.default_rng(2)
    members = [[query for query, name in enumerate(groups) if name == own] for own in sorted(set(groups))]
    means = []
    for _ in range(5_000):
        drawn = [query for number in draws.integers(0, 13, 13) for query in members[number]]
        means.append(sum(d[query] for query in drawn) / len(drawn))
    found, alone = paired_bootstrap(np.zeros(60), d, groups=groups), paired_bootstrap(np.zeros(60), d)
    assert found.difference == alone.difference == pytest.approx(d.mean())
    assert (found.low, found.high) == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=6e-3)
    assert found.high - found.low > 1.3 * (alone.high - alone.low)
    assert paired_bootstrap(np.zeros(60), d, groups=[*map(str, range(60))]) == alone
    assert paired_bootstrap(np.zeros(60), d, groups=["one document"] * 60) == alone  # no sample of documents


def test_verdicts() -> None:
    a = np.linspace(0, 1, 50)
    noise = np.where(np.arange(50) % 2, 0.3, -0.3)
    assert paired_bootstrap(a, a).to_dict() | {"queries": 50} == {
        "difference": 0.0, "low": 0.0, "high": 0.0, "p_value": 1.0, "queries": 50, "confidence": 0.95,
        "verdict": "no significant difference",
    }  # fmt: skip
    assert paired_bootstrap(a, a + noise).verdict == "no significant difference"
    assert paired_bootstrap(a, a + 0.2 + noise / 10).verdict == "better"
    for shift in np.linspace(0, 0.2, 21):  # was: "p = 0.060: worse"
        found = paired_bootstrap(a, a + shift + np.sin(9 * a) * np.sin(7 * a) - 0.3)
        assert (found.p_value < 0.05) == (found.low > 0 or found.high < 0)
    assert str(paired_bootstrap(a[:49], a[:49] + 0.2)).endswith(": too few queries")
    worse = paired_bootstrap(a, a - 0.2 + noise / 10)
    assert worse.verdict == "worse"
    assert str(worse).endswith(", p < 0.001: worse") and str(worse).startswith("-0.2000 [-0.2")


def test_chance_alone_is_significant_as_often_as_it_should_be() -> None:
    random = np.random.default_rng(0)
    found = [paired_bootstrap(random.random(60), random.random(60), samples=500, seed=s) for s in range(200)]
    assert 0.01 <= np.mean([f.p_value < 0.05 for f in found]) <= 0.10


def test_queries_are_paired_by_their_ids() -> None:
    a, b = {"q1": 0.1, "q2": 0.9, "q3": 0.5}, {"q3": 0.6, "q2": 1.0, "q1": 0.2}
    assert compare_queries(a, b).difference == pytest.approx(0.1)
    with pytest.raises(ValueError, match="2 queries have a score from only one of the models"):
        compare_queries(a, {"q1": 0.1, "q2": 0.9, "q4": 0.5})


def test_fewer_than_fifty_queries_support_no_claim() -> None:
    for queries, verdict in ((49, "no significant difference"), (50, "better")):
        difference = paired_bootstrap(np.zeros(queries), np.ones(queries))
        assert difference.verdict == verdict and difference.low == 1
        assert ("at least 50" in too_few_queries([difference])) == (queries == 49)
