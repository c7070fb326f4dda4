"""The inverted index against plain loops, and which terms are kept."""

from pathlib import Path

import numpy as np
import pytest
import torch

from revela_hub.errors import UserError
from revela_hub.retrieval import TextList
from revela_hub.retrieval.sparse import SparseIndex, as_terms, pack_terms, unpack_terms
from revela_hub.retrieval.vectors import VectorStore

TERMS = 50


def weights(rows: int, seed: int, share: float = 0.2) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.random((rows, TERMS)) * (random.random((rows, TERMS)) < share)).astype(np.float32)


@pytest.mark.parametrize("layout", ["sparse", "dense"])
def test_equals_a_plain_loop(tmp_path: Path, layout: str) -> None:
    texts_NV, queries_QV = weights(200, 0), weights(70, 1, 0.05)
    queries_QV[3] = 0  # a query with no term
    tensor = torch.from_numpy(texts_NV)
    packed = pack_terms(tensor.to_sparse() if layout == "sparse" else tensor, 30)
    texts = TextList([str(row) for row in range(200)])
    store = VectorStore(tmp_path, "model@1")
    store.fill(texts, lambda batch, _: packed[[int(text) for text in batch]])
    index = SparseIndex(store.vectors(texts), TERMS)
    queries = as_terms(torch.from_numpy(queries_QV))
    hits = index.search(queries, 10)
    for query in range(70):
        scores = []
        for row in range(200):
            scores.append(sum(float(queries_QV[query, t]) * float(texts_NV[row, t]) for t in range(TERMS)))
        best = [row for row in sorted(range(200), key=lambda row: (-scores[row], row))[:10] if scores[row] > 0]
        assert [row for row in hits.rows_QK[query].tolist() if row >= 0] == best
        assert hits.scores_QK[query][: len(best)] == pytest.approx([scores[row] for row in best], rel=1e-5)
    pairs = index.pair_scores(queries, np.array([5, 3, 69]), np.array([7, 0, 199]))
    expected = [queries_QV[q].astype(float) @ texts_NV[r] for q, r in ((5, 7), (3, 0), (69, 199))]
    assert pairs == pytest.approx(expected, rel=1e-5)


def test_the_heaviest_terms_are_kept() -> None:
    row = torch.zeros(1, TERMS)
    row[0, [4, 9, 7, 2]] = torch.tensor([1.0, 3.0, 1.0, 1.0])
    kept = unpack_terms(pack_terms(row, 2), TERMS).toarray()
    assert np.flatnonzero(kept).tolist() == [2, 9]  # the lower term first among equals
    assert kept[0, 9] == 3.0
    everything = unpack_terms(pack_terms(row, 30), TERMS).toarray()
    np.testing.assert_array_equal(everything, row.numpy())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -0.5])
def test_weights_that_are_none(wrong: float) -> None:
    with pytest.raises(UserError, match="contain NaN, infinity or negative"):
        pack_terms(torch.tensor([[0.0, wrong]]), 2)


def test_no_more_terms_are_kept_than_there_are() -> None:
    assert pack_terms(torch.tensor([[0.0, 2.0, 1.0]]), 10**12).tolist() == [[1, 2, -1, 2, 1, 0]]
