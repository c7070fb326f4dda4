"""Truncated vectors give the hits of a loop in float64; indexes keep their size."""

from pathlib import Path

import numpy as np
import pytest

from revela_hub.data.text.chunks import Chunk
from revela_hub.errors import UserError
from revela_hub.retrieval import TextList
from revela_hub.retrieval.index import PassageStore, build_store
from revela_hub.retrieval.index_options import IndexOptions
from revela_hub.retrieval.passages import write_passages
from revela_hub.retrieval.ranking import RankerSettings, build_ranker
from revela_hub.retrieval.vectors import Vectors, VectorStore

NUMBER, DIMENSION, K = 80, 20, 4


class Encoder:
    """The vector of a text is the row of that number in a random table."""

    similarity_fn_name = "cosine"

    def __init__(self) -> None:
        self.table = np.random.default_rng(0).normal(size=(NUMBER, DIMENSION)).astype(np.float32)

    def encode_document(self, inputs: list[str], /, **_: object) -> np.ndarray:
        return self.table[[int(text) for text in inputs]]

    def encode_query(self, inputs: list[str], /, **_: object) -> np.ndarray:
        return self.table[[int(text) for text in inputs]] + 0.3

    def get_embedding_dimension(self) -> int:
        return DIMENSION


TEXTS = TextList([str(row) for row in range(NUMBER)])


def stored(folder: Path, truncate_dim: int | None = None, *, normalize: bool = True) -> Vectors:
    store = VectorStore(folder, "model@1")
    store.fill(TEXTS, lambda batch, _: Encoder().encode_document(batch))
    return store.vectors(TEXTS, normalize=normalize, truncate_dim=truncate_dim)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.sqrt(sum(value * value for value in vector))


@pytest.mark.parametrize("dims", [None, 11])
def test_hits_are_those_of_a_loop_in_float64(tmp_path: Path, dims: int | None) -> None:
    ranker = build_ranker(
        TEXTS,
        RankerSettings(identity="model@1", index=IndexOptions(truncate_dim=dims)),
        tmp_path,
        dense=Encoder(),
    )
    queries = ["3", "50"]
    hits = ranker.search(ranker.encode(queries), K)
    table = Encoder().table.astype(np.float64)
    for query, rows, scores in zip(queries, hits.rows_QK, hits.scores_QK, strict=True):
        cut = unit((Encoder().encode_query([query])[0].astype(np.float64))[:dims])
        documents = [unit(row[:dims]) for row in table]
        exact = [sum(a * b for a, b in zip(cut, document, strict=True)) for document in documents]
        assert [exact[row] for row in rows] == pytest.approx(sorted(exact, reverse=True)[:K], abs=1e-6)
        assert scores == pytest.approx([exact[row] for row in rows], abs=1e-6)


def test_truncation_keeps_the_lengths_of_vectors_compared_by_dot_product(tmp_path: Path) -> None:
    found = stored(tmp_path, 5, normalize=False)
    np.testing.assert_array_equal(found.read(0, 9), Encoder().table[:9, :5])
    assert found.dimension == 5 and found.key != stored(tmp_path, normalize=False).key


def build(folder: Path, **options: object) -> PassageStore:
    chunks = [Chunk("file", str(row), "file", row + 1, row + 1) for row in range(NUMBER)]
    settings = RankerSettings(identity="folder@1", index=IndexOptions(**options))  # type: ignore[arg-type]
    return build_store(lambda folder: write_passages(chunks, folder), Encoder(), folder, settings, model="mine")


def test_an_index_is_opened_with_its_size(tmp_path: Path) -> None:
    made = build(tmp_path / "index", truncate_dim=11)
    opened = PassageStore(tmp_path / "index", "folder@1")
    assert opened.metadata.dimension == 11
    queries = Encoder().encode_query(["3", "50"])  # of full length: the index cuts them
    np.testing.assert_array_equal(opened.search(queries, K).rows_QK, made.search(queries[:, :11], K).rows_QK)


def test_more_components_than_the_model_has(tmp_path: Path) -> None:
    said = "the model's vectors have 20 dimensions, fewer than the 21 requested: lower the number"
    with pytest.raises(UserError, match=said):
        build(tmp_path / "index", truncate_dim=21)
    assert not list(tmp_path.glob("index/vectors-*"))  # before anything is encoded
    with pytest.raises(UserError, match=said):
        stored(tmp_path, 21)
