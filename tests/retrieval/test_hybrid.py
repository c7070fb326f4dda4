"""Hybrid ranking against plain loops in float64, for hits that overlap, that do not, and that are missing."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from revela_hub.errors import UserError
from revela_hub.retrieval.hybrid import Hybrid, fuse
from revela_hub.retrieval.top_k import Hits


class Table:
    """A ranker that looks scores up: minus infinity is no hit."""

    key = "table"

    def __init__(self, scores_QN: np.ndarray) -> None:
        self.scores_QN = scores_QN
        self.searched = 0

    def encode(self, queries: Sequence[str]) -> Any:
        return np.array([int(query) for query in queries])

    def search(self, queries: Any, k: int) -> Hits:
        self.searched += 1
        rows = np.argsort(-self.scores_QN[queries], axis=1, kind="stable")[:, :k]
        scores = np.take_along_axis(self.scores_QN[queries], rows, axis=1)
        return Hits(scores.astype(np.float32), np.where(np.isfinite(scores), rows, -1))

    def why_nothing(self, queries: Any) -> list[str]:
        return [""] * len(queries)

    def pair_scores(self, queries: Any, queries_P: np.ndarray, rows_P: np.ndarray) -> np.ndarray:
        return np.nan_to_num(self.scores_QN[queries[queries_P], rows_P], neginf=0.0).astype(np.float32)


def plain(tables: list[np.ndarray], query: int, depth: int, fusion: str, weights: list[float]) -> dict[int, float]:
    """The header's equations, a text at a time."""
    used = [(table, weight) for table, weight in zip(tables, weights, strict=True) if weight]
    tables, weights = [table for table, _ in used], [weight for _, weight in used]
    hits = []
    for table in tables:
        ranked = sorted(range(table.shape[1]), key=lambda row: (-table[query, row], row))
        hits.append([row for row in ranked[:depth] if math.isfinite(table[query, row])])
    result = {}
    for row in sorted({row for part in hits for row in part}):
        total = 0.0
        for table, part, weight in zip(tables, hits, weights, strict=True):
            score = float(np.float32(table[query, row]))
            if fusion == "sum":
                total += weight * (score if math.isfinite(score) else 0.0)
            elif row in part:
                values = [float(np.float32(table[query, other])) for other in part]
                low, high = min(values), max(values)
                scaled = (score - low) / (high - low) if high > low else 1.0
                total += weight * scaled
        result[row] = total
    return result


@pytest.mark.parametrize("fusion", ["sum", "minmax"])
@pytest.mark.parametrize("weights", [None, [0.7, 0.3], [1.0, 0.0]])
def test_equals_a_plain_loop(fusion: str, weights: list[float] | None) -> None:
    random = np.random.default_rng(0)
    dense, words = random.normal(size=(6, 40)), random.normal(size=(6, 40)) * 9
    words[words < 0] = -np.inf  # no word of the query
    words[4] = -np.inf
    words[5, :3], words[5, 3:] = 2.0, -np.inf  # all the same score
    hybrid = Hybrid([Table(dense), Table(words)], fusion, weights, depth=7)
    queries = hybrid.encode([str(query) for query in range(6)])
    found = hybrid.search(queries, 5)
    used = weights or ([1.0, 1.0] if fusion == "sum" else [0.5, 0.5])
    for query in range(6):
        expected = plain([dense, words], query, 7, fusion, used)
        best = sorted(expected, key=lambda row: (-expected[row], row))[:5]
        assert found.scores_QK[query] == pytest.approx([expected[row] for row in best], rel=1e-5, abs=1e-6)
        if fusion != "rrf":  # whose scores tie within float32
            assert found.rows_QK[query].tolist() == best
        # A pair's score is that of the ranking, for what is in it.
        rows = found.rows_QK[query]
        pairs = hybrid.pair_scores(queries, np.full(5, query), rows)
        in_all = [all(row in np.argsort(-t[query])[:7] for t in (dense, words)) for row in rows]
        keep = np.array([fusion == "sum" or query == 4 or each for each in in_all])  # no hit of a part: it adds nothing
        assert pairs[keep] == pytest.approx(found.scores_QK[query][keep], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("fusion", ["minmax"])
def test_a_part_without_hits_adds_nothing_to_a_pair(fusion: str) -> None:
    words = np.full((2, 8), -np.inf)
    words[0, :5] = range(5)
    hybrid = Hybrid([Table(words), Table(words)], fusion, depth=4)
    pairs = hybrid.pair_scores(hybrid.encode(["0", "1"]), np.array([0, 1, 1]), np.array([4, 4, 6]))
    assert pairs[0] > 0 and pairs[1:].tolist() == [0, 0]


def test_each_part_searches_once() -> None:
    parts = [Table(np.random.default_rng(seed).normal(size=(3, 50))) for seed in range(3)]
    hybrid = Hybrid(parts, "minmax", depth=10)
    queries = hybrid.encode(["0", "2"])
    assert hybrid.search(queries, 5).rows_QK.shape == (2, 5)
    hybrid.pair_scores(queries, np.array([0, 1]), np.array([3, 4]))
    assert [part.searched for part in parts] == [1, 1, 1]


def test_fuse_pads_and_keeps_the_lower_row_first() -> None:
    one = Hits(np.array([[0.9, -np.inf], [0.5, 0.4]], np.float32), np.array([[3, -1], [8, 2]]))
    none = Hits.none(2)
    found = fuse([one, none], 3)
    assert found.rows_QK.tolist() == [[3, -1], [8, 2]]
    assert found.scores_QK[0, 1] == -np.inf
    tied = Hits(np.array([[1.0, 1.0]], np.float32), np.array([[7, 4]]))
    assert fuse([tied, tied], 2, "minmax").rows_QK.tolist() == [[4, 7]]
    assert fuse([none, none], 3).rows_QK.tolist() == [[], []]


@pytest.mark.parametrize(
    ("fusion", "weights", "message"),
    [
        ("mean", None, "must be one of sum, minmax"),
        ("sum", [1.0], "2 weights"),
        ("sum", [0.0, 0.0], "2 weights"),
        ("minmax", [1e308, 1e308], "between 1e-06 and 1e\\+06"),
        ("minmax", [1e-320, 1e-320], "between 1e-06"),
        ("minmax", [1.0, -0.5], "between 1e-06"),
        ("sum", [1.0, float("nan")], "not 1.0 nan"),
        ("sum", [float("inf"), 1.0], "not inf 1.0"),
    ],
)
def test_mistakes(fusion: str, weights: list[float] | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fuse([Hits.none(1), Hits.none(1)], 3, fusion, weights)


@pytest.mark.parametrize("fusion", ["sum", "minmax"])
def test_a_part_without_weight_finds_nothing(fusion: str) -> None:
    words, dense = np.full((1, 8), -np.inf), np.arange(8.0)[None]
    hybrid = Hybrid([Table(dense), Table(words)], fusion, [0.0, 1.0])
    assert (hybrid.search(hybrid.encode(["0"]), 3).rows_QK < 0).all()
    hits = [Hits(np.ones((1, 1), dtype=np.float32), np.array([[row]])) for row in (5, 7)]
    assert fuse(hits, 3, fusion, [0, 1]).rows_QK.tolist() == [[7]]
