"""Truncated, int8 and binary vectors give the hits of a loop in float64; indexes keep their size."""

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers.util.quantization import quantize_embeddings

from revela_hub.data.text.chunks import Chunk
from revela_hub.errors import UserError
from revela_hub.retrieval import TextList
from revela_hub.retrieval.dense import open_index, signs
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
@pytest.mark.parametrize("precision", ["float32", "int8", "binary"])
def test_hits_are_those_of_a_loop_in_float64(tmp_path: Path, dims: int | None, precision: str) -> None:
    ranker = build_ranker(
        TEXTS,
        RankerSettings(identity="model@1", index=IndexOptions(truncate_dim=dims, precision=precision)),
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
        candidates = list(range(NUMBER))
        if precision == "binary":  # the 10 * k nearest by Hamming distance; of equal distances any
            distance = [sum((a > 0) != (b > 0) for a, b in zip(cut, document, strict=True)) for document in documents]
            limit = sorted(distance)[10 * K - 1]
            sure = [row for row in candidates if distance[row] < limit]
            assert all(distance[row] <= limit for row in rows)
            worst = min(exact[row] for row in rows)
            assert {row for row in sure if exact[row] > worst + 1e-6} <= set(rows.tolist())
        # An int8 code is within half a step of 255 in each component.
        steps = [(max(column) - min(column)) / 255 for column in zip(*documents, strict=True)]
        error = sum(abs(a) * step * 0.51 for a, step in zip(cut, steps, strict=True)) if precision == "int8" else 1e-6
        if precision != "binary":
            best = sorted(exact, reverse=True)[:K]
            assert [exact[row] for row in rows] == pytest.approx(best, abs=2 * error)
        assert scores == pytest.approx([exact[row] for row in rows], abs=error)


def test_codes_have_the_documented_size_and_meaning(tmp_path: Path) -> None:
    import faiss

    vectors = stored(tmp_path, 12).read(0, NUMBER)
    np.testing.assert_array_equal(signs(vectors[:, :8]), quantize_embeddings(vectors[:, :8], "ubinary"))
    for row, codes in zip(vectors[:5], signs(vectors), strict=False):
        assert [int(bit) for bit in np.unpackbits(codes)] == [int(value > 0) for value in row] + [0] * 4
    open_index(stored(tmp_path, 12), IndexOptions(precision="int8"), folder=tmp_path)
    [file] = tmp_path.glob("int8-*.faiss")
    index = faiss.read_index(str(file))
    assert index.sa_code_size() == 12 == IndexOptions(precision="int8").bytes_per_vector(12)
    for number, row in enumerate(
        vectors[:5]
    ):  # one of 256 steps between the smallest and the largest value of the column
        step = (vectors.max(axis=0) - vectors.min(axis=0)) / 255
        assert (np.abs(index.reconstruct(number) - row) <= step * 0.51 + 1e-6).all()


def test_bytes_per_vector() -> None:
    sizes = [
        IndexOptions(kind, dtype, None, dims, precision).bytes_per_vector(384)
        for kind, dtype, dims, precision in (
            ("exact", "float32", None, "float32"),
            ("exact", "float16", None, "float32"),
            ("flat", "float16", None, "float32"),
            ("flat", "float32", 192, "float32"),
            ("flat", "float32", 192, "int8"),
            ("flat", "float32", 100, "binary"),
        )
    ]
    assert sizes == [1536, 768, 1536, 768, 192, 13]


def test_truncation_keeps_the_lengths_of_vectors_compared_by_dot_product(tmp_path: Path) -> None:
    found = stored(tmp_path, 5, normalize=False)
    np.testing.assert_array_equal(found.read(0, 9), Encoder().table[:9, :5])
    assert found.dimension == 5 and found.key != stored(tmp_path, normalize=False).key


def build(folder: Path, **options: object) -> PassageStore:
    chunks = [Chunk("file", str(row), "file", row + 1, row + 1) for row in range(NUMBER)]
    settings = RankerSettings(identity="folder@1", index=IndexOptions(**options))  # type: ignore[arg-type]
    return build_store(lambda folder: write_passages(chunks, folder), Encoder(), folder, settings, model="mine")


@pytest.mark.parametrize("precision", ["float32", "int8", "binary"])
def test_an_index_is_opened_with_its_size(tmp_path: Path, precision: str) -> None:
    made = build(tmp_path / "index", truncate_dim=11, precision=precision)
    opened = PassageStore(tmp_path / "index", "folder@1")
    assert (opened.metadata.dimension, opened.metadata.options.precision) == (11, precision)
    queries = Encoder().encode_query(["3", "50"])  # of full length: the index cuts them
    np.testing.assert_array_equal(opened.search(queries, K).rows_QK, made.search(queries[:, :11], K).rows_QK)


def test_more_components_than_the_model_has(tmp_path: Path) -> None:
    said = "the model's vectors have 20 dimensions, fewer than the 21 requested: lower the number"
    with pytest.raises(UserError, match=said):
        build(tmp_path / "index", truncate_dim=21)
    assert not list(tmp_path.glob("index/vectors-*"))  # before anything is encoded
    with pytest.raises(UserError, match=said):
        stored(tmp_path, 21)


@pytest.mark.parametrize("kind", ["hnsw", "ivfpq", "milvus"])
def test_other_index_types_have_no_precision(kind: str) -> None:
    with pytest.raises(UserError, match=f"the precision int8 is for the index types exact and flat, not {kind}"):
        IndexOptions(kind, precision="int8")
