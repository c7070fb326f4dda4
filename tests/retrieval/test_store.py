"""Passages and indexes on disk: what stands where, what belongs to which model, and the ways to search them."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest

from revela_hub.data.sources.documents import read_documents
from revela_hub.data.text.chunks import Chunk
from revela_hub.errors import UserError
from revela_hub.retrieval import (
    Hits,
    IndexOptions,
    PassageStore,
    RankerSettings,
    build_ranker,
    build_store,
    read_passages,
    write_passages,
)

DIMENSION = 16


class Words:
    """An encoder of bags of words, which remembers what it has encoded."""

    similarity_fn_name = "cosine"

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.change: Any = np.positive

    def encode_query(self, inputs: list[str], /, **options: Any) -> np.ndarray:
        return np.stack([self._vector(text) for text in inputs])

    def encode_document(self, inputs: list[str], /, **options: Any) -> np.ndarray:
        self.encoded += inputs
        return self.change(np.stack([self._vector(text) for text in inputs]))

    def _vector(self, text: str) -> np.ndarray:
        seeds = [int.from_bytes(hashlib.md5(word.encode()).digest()[:4], "big") for word in text.split()]
        return np.sum([np.random.default_rng(seed).normal(size=DIMENSION) for seed in seeds], axis=0)


def chunk(text: str, place: str = "file.txt", line: int = 1) -> Chunk:
    return Chunk(place, text, place, line, line + text.count("\n"))


TEXTS = [f"passage number{number} about topic{number % 5}" for number in range(10)]


def build(
    output: Path, encoder: Words | None = None, texts: Iterable[str] = tuple(TEXTS), **options: Any
) -> PassageStore:
    settings = RankerSettings(**({"identity": "folder@0123"} | options))
    chunks = [chunk(text, line=line) for line, text in enumerate(texts, start=1)]
    return build_store(
        lambda folder: write_passages(chunks, folder), encoder or Words(), output, settings, model="mine"
    )


def test_a_text_that_is_there_twice_is_one_passage(tmp_path: Path) -> None:
    licence = "Licensed to you"
    found = write_passages(
        [chunk(licence, "a.py"), chunk("other text", "a.py", 9), chunk(licence, "b.py"), chunk(licence, "c.py", 7)],
        tmp_path,
    )
    assert len(found) == 2
    first, second = found.hit(0, 0.5), found.hit(1, 0.25)
    assert (first.location, first.copies, first.text) == ("a.py:1-1", ("b.py:1-1", "c.py:7-7"), licence)
    assert (second.location, second.copies) == ("a.py:9-9", ())
    assert first.to_dict()["copies"] == ["b.py:1-1", "c.py:7-7"]
    hits = Hits(np.array([[0.9, -np.inf]], np.float32), np.array([[1, -1]]))
    assert [[hit.text for hit in one] for one in found.found(hits)] == [["other text"]]


def test_names_of_files_are_relative_to_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "home" / "notes").mkdir(parents=True)
    (tmp_path / "home" / "notes" / "a.md").write_text("A note.\n")
    (tmp_path / "home" / "rows.jsonl").write_text('{"text": "A row."}\n')
    corpus = [str(tmp_path / "home" / "notes"), str(tmp_path / "home" / "rows.jsonl")]
    found = read_passages(read_documents(corpus), tmp_path, corpus=corpus)
    assert [found.hit(row, 1.0).location for row in range(2)] == ["notes/a.md:1-1", "rows.jsonl:1:1-1"]


@pytest.mark.parametrize(
    "options",
    [IndexOptions(), IndexOptions("hnsw"), IndexOptions("milvus"), IndexOptions(truncate_dim=7)],
    ids=lambda options: f"{options.type} {options.truncate_dim}",
)
def test_an_index_is_made_once_and_opened_again(tmp_path: Path, options: IndexOptions) -> None:
    if options.type == "milvus":
        pytest.importorskip("milvus_lite", reason="needs the extra milvus")
    encoder, dims = Words(), options.truncate_dim
    made = build(tmp_path / "index", encoder, index=options)
    opened = PassageStore(tmp_path / "index", "folder@0123")
    assert encoder.encoded == TEXTS
    assert opened.metadata.options == options
    assert (len(opened), opened.metadata.dimension, opened.metadata.model) == (10, dims or 16, "mine")
    queries = encoder.encode_query(["topic2", "number7 passage"])
    for store in (made, opened):
        hits = store.search(3 * queries, 3)  # cosines, whatever the length
        for query, rows, scores, passages in zip(queries[:, :dims], *hits[::-1], store.found(hits), strict=True):
            vectors = encoder.encode_document(TEXTS)[:, :dims]
            expected = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
            best = np.argsort(-expected)[:3]
            assert rows.tolist() == best.tolist()
            assert scores == pytest.approx(expected[best], rel=1e-5)
            assert [hit.text for hit in passages] == [TEXTS[row] for row in best]
            assert [hit.start_line for hit in passages] == [row + 1 for row in best]
    build(tmp_path / "index", encoder := Words(), index=options)
    assert encoder.encoded == []


def test_vectors_of_another_model_are_rejected(tmp_path: Path) -> None:
    build(tmp_path / "index")
    with pytest.raises(UserError, match=r"built with mine .*folder@0123.* other \(folder@4567\)"):
        PassageStore(tmp_path / "index", "folder@4567", "other")
    with pytest.raises(UserError, match="holds the index of mine"):
        build(tmp_path / "index", identity="folder@4567")
    # A model trained with --query_only, whose documents are those of the model that built the index.
    with pytest.raises(UserError):
        PassageStore(tmp_path / "index", "folder@4567:9", "other", documents="folder@0123:9")
    assert len(PassageStore(tmp_path / "index", "folder@4567", "other", documents="folder@0123")) == len(TEXTS)
    with pytest.raises(ValueError, match="needs the model's identity"):
        build_ranker(write_passages([], tmp_path), RankerSettings(), tmp_path, dense=Words())


def test_only_new_passages_are_encoded_again_and_removed_text_is_deleted(tmp_path: Path) -> None:
    def built(*texts: str) -> tuple[PassageStore, list[str]]:
        store = build(tmp_path, encoder := Words(), texts, index=IndexOptions("hnsw"))
        build_ranker(store.passages, RankerSettings(mode="bm25"), tmp_path)
        return store, encoder.encoded

    earlier, _ = built("kept", "secret")
    now, encoded = built("new", "kept")
    assert encoded == ["new"]
    expected = Words().encode_query(["kept"])
    assert now.passages.read(now.search(expected, 1).rows_QK[0]) == ["kept"]
    assert earlier.passages.read([1]) == ["secret"]  # it is still open
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert len(list(tmp_path.glob("texts-*"))) == 2 and len(list(tmp_path.glob("*.faiss"))) == 1


def test_only_one_process_builds_an_index_in_a_folder(tmp_path: Path) -> None:
    class Meanwhile(Words):
        def encode_document(self, inputs: list[str], /, **options: Any) -> np.ndarray:
            with pytest.raises(filelock.Timeout):
                build(tmp_path / "index")
            return super().encode_document(inputs, **options)

    build(tmp_path / "index", Meanwhile())
    assert len(PassageStore(tmp_path / "index")) == len(TEXTS)


@pytest.mark.parametrize("truncate_dim", [None, 4])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_other_vectors_of_the_same_model_are_noticed(tmp_path: Path, truncate_dim: int | None, similarity: str) -> None:
    encoder = Words()
    encoder.similarity_fn_name = similarity
    store = build(tmp_path / "index", encoder, index=IndexOptions(truncate_dim=truncate_dim))
    store.check_vectors(encoder)
    assert store.similarity(encoder) == pytest.approx(1)
    encoder.change = lambda vectors: 2 * vectors
    if similarity == "cosine":
        store.check_vectors(encoder)
    else:
        with pytest.raises(UserError, match="computes other vectors now"):
            store.check_vectors(encoder)
    for change in (lambda vectors: vectors[:, ::-1], lambda vectors: vectors[:, :3]):
        encoder.change = change
        with pytest.raises(UserError):
            store.check_vectors(encoder)
