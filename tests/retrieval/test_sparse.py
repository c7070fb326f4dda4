"""The inverted index against plain loops, and which terms are kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from revela_hub.retrieval import TextList
from revela_hub.retrieval.sparse import SparseRanker, pack_terms, unpack_terms

TERMS = 50


def weights(rows: int, seed: int, share: float = 0.2) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.random((rows, TERMS)) * (random.random((rows, TERMS)) < share)).astype(np.float32)


class Encoder:
    """Text number n has row n of a table."""

    def __init__(self, texts_NV: np.ndarray, queries_QV: np.ndarray) -> None:
        self.tables = {"document": torch.from_numpy(texts_NV), "query": torch.from_numpy(queries_QV)}

    def encode_document(self, inputs: list[str], **_: Any) -> torch.Tensor:
        return self.tables["document"][list(map(int, inputs))].to_sparse()

    def encode_query(self, inputs: list[str], **_: Any) -> torch.Tensor:
        return self.tables["query"][[int(text) if text.isdigit() else 0 for text in inputs]].to_sparse()


@pytest.mark.parametrize("block", [64, 1 << 18])
def test_equals_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("revela_hub.retrieval.sparse.BLOCK", block)
    texts_NV, queries_QV = weights(200, 0), weights(70, 1, 0.05)
    queries_QV[3] = 0  # a query with no term
    encoder, texts = Encoder(texts_NV, queries_QV), TextList([str(row) for row in range(200)])
    ranker = SparseRanker(encoder, texts, tmp_path, "terms")
    queries = [str(query) for query in range(70)]
    hits = ranker.search(queries, 10)
    for query in range(70):
        scores = []
        for row in range(200):
            scores.append(sum(float(queries_QV[query, t]) * float(texts_NV[row, t]) for t in range(TERMS)))
        best = [row for row in sorted(range(200), key=lambda row: (-scores[row], row))[:10] if scores[row] > 0]
        assert [row for row in hits.rows_QK[query].tolist() if row >= 0] == best
        assert hits.scores_QK[query][: len(best)] == pytest.approx([scores[row] for row in best], rel=1e-5)
    pairs = ranker.pair_scores(queries, np.array([5, 3, 69]), np.array([7, 0, 199]))
    expected = [queries_QV[q].astype(float) @ texts_NV[r] for q, r in ((5, 7), (3, 0), (69, 199))]
    assert pairs == pytest.approx(expected, rel=1e-5)


def test_the_heaviest_terms_are_kept() -> None:
    row = torch.zeros(1, TERMS)
    row[0, [4, 9, 7, 2]] = torch.tensor([1.0, 3.0, 1.0, 1.0])
    kept = unpack_terms(pack_terms(row.to_sparse(), 2), TERMS).toarray()
    assert np.flatnonzero(kept).tolist() == [2, 9]  # the lower term first among equals
    assert kept[0, 9] == 3.0
    for most in (30, 10**12):
        everything = unpack_terms(pack_terms(row.to_sparse(), most), TERMS).toarray()
        np.testing.assert_array_equal(everything, row.numpy())
