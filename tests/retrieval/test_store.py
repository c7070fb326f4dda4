"""Passages and indexes on disk: what stands where, what belongs to which model, and the four ways to search them."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from revela_hub.data.sources.documents import read_documents
from revela_hub.data.text.chunks import Chunk
from revela_hub.errors import UserError
from revela_hub.retrieval import (
    Hits,
    IndexOptions,
    Passages,
    PassageStore,
    RankerSettings,
    build_ranker,
    build_store,
    read_passages,
    vectors,
    write_passages,
)

DIMENSION = 16


class Words:
    """An encoder of bags of words, which remembers what it has encoded."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode_query(self, inputs: list[str], /, **options: Any) -> np.ndarray:
        return np.stack([self._vector(text) for text in inputs])

    def encode_document(self, inputs: list[str], /, **options: Any) -> np.ndarray:
        self.encoded += inputs
        return np.stack([self._vector(text) for text in inputs])

    def _vector(self, text: str) -> np.ndarray:
        seeds = [int.from_bytes(hashlib.md5(word.encode()).digest()[:4], "big") for word in text.split()]
        return np.sum([np.random.default_rng(seed).normal(size=DIMENSION) for seed in seeds], axis=0)


def chunk(text: str, place: str = "file.txt", line: int = 1) -> Chunk:
    return Chunk(place, text, place, line, line + text.count("\n"))


def chunks(texts: Iterable[str]) -> list[Chunk]:
    return [chunk(text, line=line) for line, text in enumerate(texts, start=1)]


TEXTS = [f"passage number{number} about topic{number % 5}" for number in range(10)]
SETTINGS = RankerSettings(identity="folder@0123")


def build(output: Path, encoder: Words | None = None, **options: Any) -> PassageStore:
    settings = RankerSettings(**({"identity": "folder@0123"} | options))
    return build_store(
        lambda folder: write_passages(chunks(TEXTS), folder), encoder or Words(), output, settings, model="mine"
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


def test_overlapping_sources_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "note.md").write_text("A note.\n")
    paths = [str(tmp_path), str(tmp_path / "part"), str(tmp_path / "part" / "note.md")]
    found = read_passages(read_documents(paths), tmp_path)
    assert len(found) == 1 and found.hit(0, 1.0).copies == ()


@pytest.mark.parametrize("kind", ["exact", "flat", "hnsw", "milvus"])
def test_an_index_is_made_once_and_opened_again(tmp_path: Path, kind: str) -> None:
    if kind == "milvus":
        pytest.importorskip("milvus_lite", reason="needs the extra milvus")
    encoder = Words()
    made = build(tmp_path / "index", encoder, index=IndexOptions(kind))
    opened = PassageStore(tmp_path / "index", "folder@0123")
    assert encoder.encoded == TEXTS
    assert (len(opened), opened.metadata.options.type, opened.metadata.dimension, opened.metadata.model) == (
        10,
        kind,
        16,
        "mine",
    )
    queries = encoder.encode_query(["topic2", "number7 passage"])
    for store in (made, opened):
        hits = store.search(3 * queries, 3)  # cosines, whatever the length
        for query, rows, scores, passages in zip(queries, *hits[::-1], store.found(hits), strict=True):
            vectors = encoder.encode_document(TEXTS)
            expected = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
            best = np.argsort(-expected)[:3]
            assert rows.tolist() == best.tolist()
            assert scores == pytest.approx(expected[best], rel=1e-5)
            assert [hit.text for hit in passages] == store.texts(rows) == [TEXTS[row] for row in best]
            assert [hit.start_line for hit in passages] == [row + 1 for row in best]
    build(tmp_path / "index", encoder := Words(), index=IndexOptions(kind))
    assert encoder.encoded == []


def test_what_is_no_index(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not an index .*: build one with revela-hub index"):
        PassageStore(tmp_path)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(UserError, match="index.json is damaged"):
        PassageStore(tmp_path)
    build(tmp_path / "index")
    file = tmp_path / "index" / "index.json"
    whole = file.read_text()
    for damaged in (whole[:100], whole.replace("{", '{"of_a_later_version": 1, ', 1)):  # written again
        file.write_text(damaged)
        with pytest.raises(UserError, match="index.json is damaged"):
            PassageStore(tmp_path / "index")
        build(tmp_path / "index", encoder := Words())
        assert file.read_text() == whole and encoder.encoded == []
    next((tmp_path / "index").glob("texts-*.npz")).write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read .*repeat the command"):
        PassageStore(tmp_path / "index")
    with pytest.raises(UserError, match="no passage contains any text"):
        build_store(lambda folder: write_passages([], folder), Words(), tmp_path / "none", SETTINGS, model="mine")


def test_every_mode_finds_passages(tmp_path: Path) -> None:
    passages: Passages = write_passages(chunks(TEXTS), tmp_path)
    for mode in ("dense", "bm25", "hybrid"):
        settings = RankerSettings(mode=mode, identity="folder@0123")
        ranker = build_ranker(passages.texts, settings, tmp_path, dense=Words())
        [hits] = passages.found(ranker.search(ranker.encode(["number7"]), 3))
        assert hits[0].text == TEXTS[7]
        assert len(hits) == (1 if mode == "bm25" else 3)


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
def test_weights_of_a_hybrid(tmp_path: Path, options: dict[str, Any], weights: list[float]) -> None:
    settings = RankerSettings(mode="hybrid", identity="folder@0123", sparse_identity="words@0123", **options)
    assert settings.part_weights == pytest.approx(weights)
    if "sparse" not in settings.parts:
        passages: Passages = write_passages(chunks(TEXTS), tmp_path)
        assert build_ranker(passages.texts, settings, tmp_path, dense=Words()).weights == settings.part_weights


def test_nothing_to_search(tmp_path: Path) -> None:
    for mode in ("dense", "bm25", "hybrid"):
        settings = RankerSettings(mode=mode, identity="folder@0123")
        empty = write_passages([], tmp_path)
        ranker = build_ranker(empty.texts, settings, tmp_path, dense=Words())
        assert empty.found(ranker.search(ranker.encode(["x"]), 3)) == [[]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mode": "lexical"}, UserError, "one of dense, sparse, bm25, hybrid"),
        ({"mode": "hybrid", "parts": ["dense"]}, UserError, "two or three of dense, sparse, bm25, not dense"),
        ({"mode": "hybrid", "parts": ["dense", "dense"]}, UserError, "two or three"),
        ({"depth": 0}, UserError, "depth must be at least 1"),
        ({"batch_size": 0}, UserError, "batch_size must be at least 1"),
    ],
)
def test_settings_that_are_none(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RankerSettings(**options)


def test_vectors_of_another_model_are_rejected(tmp_path: Path) -> None:
    build(tmp_path / "index")
    with pytest.raises(UserError, match=r"built with mine .*folder@0123.* other \(folder@4567\)"):
        PassageStore(tmp_path / "index", "folder@4567", "other")
    with pytest.raises(UserError, match="holds the index of mine"):
        build(tmp_path / "index", identity="folder@4567")
    with pytest.raises(UserError, match="dimension 16"):
        PassageStore(tmp_path / "index").search(np.ones((1, 3)), 1)
    # A model trained with --query_only, whose documents are those of the model that built the index.
    with pytest.raises(UserError):
        PassageStore(tmp_path / "index", "folder@4567:9", "other", documents="folder@0123:9")
    assert len(PassageStore(tmp_path / "index", "folder@4567", "other", documents="folder@0123")) == len(TEXTS)


def test_only_new_passages_are_encoded_again_and_removed_text_is_deleted(tmp_path: Path) -> None:
    def built(*texts: str) -> tuple[PassageStore, list[str]]:
        settings, encoder = RankerSettings(identity="folder@0123", index=IndexOptions("hnsw")), Words()
        store = build_store(
            lambda folder: write_passages(chunks(texts), folder), encoder, tmp_path, settings, model="m"
        )
        build_ranker(store.passages.texts, RankerSettings(mode="bm25"), tmp_path)
        return store, encoder.encoded

    earlier, _ = built("kept", "secret")
    now, encoded = built("new", "kept")
    assert encoded == ["new"]
    expected = Words().encode_query(["kept"])
    assert now.texts(now.search(expected, 1).rows_QK[0]) == ["kept"]
    assert earlier.texts([1]) == ["secret"]  # it is still open
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert len(list(tmp_path.glob("texts-*"))) == 2 and len(list(tmp_path.glob("*.faiss"))) == 1


def test_an_interrupted_build_keeps_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Words):
        def encode_document(self, inputs: list[str], /, **options: Any) -> np.ndarray:
            if len(self.encoded) == 4:
                raise KeyboardInterrupt
            return super().encode_document(inputs, **options)

    monkeypatch.setattr(vectors, "FIRST_SHARD", 2)
    monkeypatch.setattr(vectors, "SHARD_SIZE", 2)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "index", Killed())
    with pytest.raises(UserError, match="is not an index"):
        PassageStore(tmp_path / "index")
    store = build(tmp_path / "index", encoder := Words())
    assert encoder.encoded == TEXTS[4:]
    expected = Words().encode_document(TEXTS)
    np.testing.assert_allclose(
        store.vectors.read(0, 10), expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-5
    )
    assert list((tmp_path / "index").rglob("*.tmp")) == []


def test_a_damaged_shard_is_encoded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path / "index")
    [shard] = (tmp_path / "index").glob("vectors-*/vectors-*.npy")
    shard.write_bytes(shard.read_bytes()[:-5])
    opened = PassageStore(tmp_path / "index")
    assert opened.texts([0]) == TEXTS[:1]
    with pytest.raises(UserError, match="10 of 10 texts are not encoded in .*: run revela-hub index again"):
        opened.search(np.ones((1, DIMENSION)), 1)
    assert f"{shard} is damaged" in caplog.text
    build(tmp_path / "index", encoder := Words())
    assert encoder.encoded == TEXTS


def test_only_one_process_builds_an_index_in_a_folder(tmp_path: Path) -> None:
    class Meanwhile(Words):
        def encode_document(self, inputs: list[str], /, **options: Any) -> np.ndarray:
            with pytest.raises(UserError, match="another process builds an index"):
                build(tmp_path / "index")
            return super().encode_document(inputs, **options)

    build(tmp_path / "index", Meanwhile())
    assert len(PassageStore(tmp_path / "index")) == len(TEXTS)


@pytest.mark.parametrize("options", [IndexOptions(), IndexOptions(truncate_dim=4)])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_other_vectors_of_the_same_model_are_noticed(tmp_path: Path, options: IndexOptions, similarity: str) -> None:
    class Changed(Words):
        similarity_fn_name, change = similarity, staticmethod(np.positive)

        def encode_document(self, inputs: list[str], /, **options: Any) -> np.ndarray:
            return self.change(super().encode_document(inputs))

    encoder = Changed()
    store = build(tmp_path / "index", encoder, index=options)
    store.check_vectors(encoder)
    assert store.similarities(encoder) == pytest.approx(1)
    encoder.change = lambda vectors: 2 * vectors  # type: ignore[method-assign]
    if similarity == "cosine":
        store.check_vectors(encoder)
    else:
        with pytest.raises(UserError, match="computes other vectors now"):
            store.check_vectors(encoder)
    for change in (lambda vectors: vectors[:, ::-1], lambda vectors: vectors[:, :3]):
        encoder.change = change  # type: ignore[method-assign]
        with pytest.raises(UserError):
            store.check_vectors(encoder)


def test_names_of_files_are_relative_to_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "home" / "notes").mkdir(parents=True)
    (tmp_path / "home" / "notes" / "a.md").write_text("A note.\n")
    (tmp_path / "home" / "rows.jsonl").write_text('{"text": "A row."}\n')
    corpus = [str(tmp_path / "home" / "notes"), str(tmp_path / "home" / "rows.jsonl")]
    found = read_passages(read_documents(corpus), tmp_path, corpus=corpus)
    assert [found.hit(row, 1.0).location for row in range(2)] == ["notes/a.md:1-1", "rows.jsonl:1:1-1"]
