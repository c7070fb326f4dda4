"""Hybrid ranking against plain loops in float64, for hits that overlap, that do not, and that are missing."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from revela_hub.retrieval import RankerSettings
from revela_hub.retrieval.hits import Hits
from revela_hub.retrieval.hybrid import Hybrid, fuse


class Table:
    """A ranker that looks scores up: minus infinity is no hit."""

    def __init__(self, scores_QN: np.ndarray) -> None:
        self.scores_QN = scores_QN
        self.searched = 0

    def search(self, queries: Sequence[str], k: int) -> Hits:
        self.searched += 1
        scores_QN = self.scores_QN[list(map(int, queries))]
        rows = np.argsort(-scores_QN, axis=1, kind="stable")[:, :k]
        scores = np.take_along_axis(scores_QN, rows, axis=1)
        return Hits(scores.astype(np.float32), np.where(np.isfinite(scores), rows, -1))

    def pair_scores(self, queries: Sequence[str], queries_P: np.ndarray, rows_P: np.ndarray) -> np.ndarray:
        scores_QN = self.scores_QN[list(map(int, queries))]
        return np.nan_to_num(scores_QN[queries_P, rows_P], neginf=0.0).astype(np.float32)


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
@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.7, 0.3], [1.0, 0.0]])
def test_equals_a_plain_loop(fusion: str, weights: list[float]) -> None:
    random = np.random.default_rng(0)
    dense, words = random.normal(size=(6, 40)), random.normal(size=(6, 40)) * 9
    words[words < 0] = -np.inf  # no word of the query
    words[4] = -np.inf
    words[5, :3], words[5, 3:] = 2.0, -np.inf  # all the same score
    parts = [Table(dense), Table(words)]
    hybrid = Hybrid(parts, weights, fusion, depth=7)
    queries = [str(query) for query in range(6)]
    found = hybrid.search(queries, 5)
    for query in range(6):
        expected = plain([dense, words], query, 7, fusion, weights)
        best = sorted(expected, key=lambda row: (-expected[row], row))[:5]
        assert found.scores_QK[query] == pytest.approx([expected[row] for row in best], rel=1e-5, abs=1e-6)
        assert found.rows_QK[query].tolist() == best
        # A pair's score is that of the ranking, for what is in it.
        rows = found.rows_QK[query]
        pairs = hybrid.pair_scores(queries, np.full(5, query), rows)
        in_all = [all(row in np.argsort(-t[query])[:7] for t in (dense, words)) for row in rows]
        keep = np.array([fusion == "sum" or query == 4 or each for each in in_all])  # no hit of a part: it adds nothing
        assert pairs[keep] == pytest.approx(found.scores_QK[query][keep], rel=1e-5, abs=1e-6)
    assert parts[0].searched == 1  # the pairs' scores use the same hits
    # A text that is no hit adds nothing: of a query without hits, and below the last one.
    assert fusion == "sum" or hybrid.pair_scores(queries, np.array([4]), np.array([0])) <= weights[0]


def test_more_hits_do_not_change_the_first_ones() -> None:
    random = np.random.default_rng(1)
    hybrid = Hybrid([Table(random.normal(size=(3, 60))) for _ in range(2)], [0.7, 0.3], "minmax", depth=10)
    few, more, most = (hybrid.search(["0", "1", "2"], k) for k in (10, 11, 60))
    for found in (more, most):
        assert np.array_equal(found.rows_QK[:, :10], few.rows_QK)
        assert np.array_equal(found.scores_QK[:, :10], few.scores_QK)
    assert np.array_equal(np.sort(most.rows_QK), np.tile(np.arange(60), (3, 1)))
    assert (np.diff(most.scores_QK) <= 0).all()


def test_fuse_pads_and_keeps_the_lower_row_first() -> None:
    one = Hits(np.array([[0.9, -np.inf], [0.5, 0.4]], np.float32), np.array([[3, -1], [8, 2]]))
    none = Hits.none(2)
    found = fuse([one, none], 3, [0.5, 0.5])
    assert found.rows_QK.tolist() == [[3, -1], [8, 2]]
    assert found.scores_QK[0, 1] == -np.inf
    tied = Hits(np.array([[1.0, 1.0]], np.float32), np.array([[7, 4]]))
    assert fuse([tied, tied], 2, [1, 1]).rows_QK.tolist() == [[4, 7]]
    assert fuse([none, none], 3, [1, 1]).rows_QK.tolist() == [[], []]


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [0.7, 0.3]),
        ({"parts": ("bm25", "sparse", "dense")}, [0.3, 0.35, 0.35]),
        ({"parts": ("dense", "sparse")}, [0.5, 0.5]),
        ({"fusion": "sum"}, [1, 1]),
        ({"weights": (0.2, 0.9)}, [0.2, 0.9]),
    ],
)
def test_default_weights(options: dict[str, Any], weights: list[float]) -> None:
    assert RankerSettings(mode="hybrid", **options).part_weights == pytest.approx(weights)
