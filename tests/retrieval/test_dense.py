"""Every index of vectors gives the same hits as a plain loop, or nearly so where it is approximate."""

from pathlib import Path

import numpy as np
import pytest

from revela_hub.retrieval import TextList, dense
from revela_hub.retrieval.dense import open_index
from revela_hub.retrieval.index_options import IndexOptions
from revela_hub.retrieval.vectors import Vectors, VectorStore


def made(
    folder: Path, number: int, dimension: int = 16, *, normalize: bool = False, truncate_dim: int | None = None
) -> tuple[Vectors, np.ndarray]:
    """Vectors of clusters, as those of texts are."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(max(1, number // 50), dimension))
    table = (centres[random.integers(len(centres), size=number)] + random.normal(size=(number, dimension)) / 2).astype(
        np.float32
    )
    texts = TextList([str(row) for row in range(number)])
    store = VectorStore(folder, "model@1")
    store.fill(texts, lambda batch: table[[int(text) for text in batch]])
    return store.vectors(texts, normalize=normalize, truncate_dim=truncate_dim), table


@pytest.mark.parametrize("kind", ["exact", "flat", "hnsw", "milvus"])
@pytest.mark.parametrize(("normalize", "dims"), [(False, 16), (True, 16), (True, 5), (False, 5)])
def test_equals_a_plain_loop(
    tmp_path: Path, kind: str, normalize: bool, dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "MIN_BLOCK", 7)
    monkeypatch.setattr(dense, "BLOCK_NUMBERS", 1)
    monkeypatch.setattr(dense, "QUERY_BLOCK", 2)
    monkeypatch.setattr(dense, "CACHED_BYTES", 1000 if dims == 5 else 1 << 20)
    if kind == "milvus":
        pytest.importorskip("milvus_lite", reason="needs the extra milvus")
    vectors, table = made(tmp_path, 60, normalize=normalize, truncate_dim=dims)
    assert vectors.shape == (60, dims)
    index = open_index(vectors, IndexOptions(kind), folder=tmp_path)
    queries = np.random.default_rng(1).normal(size=(5, dims)).astype(np.float32)
    hits = index.search(queries, 4)
    documents = table.astype(float)[:, :dims]
    for query, rows, scores in zip(queries, hits.rows_QK, hits.scores_QK, strict=True):
        expected = [float(query @ vector / (np.linalg.norm(vector) if normalize else 1)) for vector in documents]
        best = np.argsort(expected)[::-1][:4]
        assert rows.tolist() == best.tolist()
        assert scores == pytest.approx([expected[row] for row in best], rel=1e-5)
    assert index.search(queries, 1000).rows_QK.shape == (5, 60)
    assert index.search(queries[:0], 4).rows_QK.shape[0] == 0
    again = open_index(vectors, IndexOptions(kind), folder=tmp_path).search(queries, 4)  # from the disk
    np.testing.assert_array_equal(again.rows_QK, hits.rows_QK)


@pytest.mark.parametrize("kind", ["hnsw", "ivfpq"])
def test_approximate_indexes_find_nearly_all(tmp_path: Path, kind: str) -> None:
    vectors, _ = made(tmp_path, 3000, normalize=True)
    queries = vectors[:100] + np.random.default_rng(2).normal(size=(100, 16)).astype(np.float32) / 10
    exact = open_index(vectors, IndexOptions("exact")).search(queries, 10)
    found = open_index(vectors, IndexOptions(kind)).search(queries, 10)
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact.rows_QK, found.rows_QK, strict=True)])
    assert recall > 0.9
    # Hits have exact scores, also if the index only stores codes.
    for rows_a, scores_a, rows_b, scores_b in zip(*exact[::-1], *found[::-1], strict=True):
        known = dict(zip(rows_a.tolist(), scores_a.tolist(), strict=True))
        for row, score in zip(rows_b.tolist(), scores_b.tolist(), strict=True):
            assert known.get(row, score) == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("kind", ["hnsw", "flat"])
def test_lengths_of_vectors_are_warned_about(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """By dot product, approximate indexes found 0.01 to 0.65 of the best vectors without a word."""
    for normalize in (True, False):
        vectors, _ = made(tmp_path, 1200, normalize=normalize)
        open_index(vectors, IndexOptions(kind))
        assert ("have lengths of" in caplog.text) is (kind == "hnsw" and not normalize)


def test_equal_scores_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    store = VectorStore(tmp_path, "model@1")
    texts = TextList([str(row) for row in range(30)])
    store.fill(texts, lambda batch: np.ones((len(batch), 4), np.float32))
    for kind in ("exact", "flat"):
        hits = open_index(store.vectors(texts), IndexOptions(kind)).search(np.ones((1, 4), np.float32), 5)
        assert hits.rows_QK.tolist() == [[0, 1, 2, 3, 4]]
