"""Passages and indexes on disk: what stands where, what belongs to which model, and the four ways to search them."""

import hashlib
import os
import shutil
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
    write_passages,
)
from revela_hub.retrieval.disk import claim_folder
from revela_hub.retrieval.vectors import VectorStore

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


def test_vectors_of_another_model_are_refused(tmp_path: Path) -> None:
    build(tmp_path / "index")
    message = r"was built with mine \(folder@0123\), but other is a different model or version \(folder@4567\)"
    with pytest.raises(UserError, match=message):
        PassageStore(tmp_path / "index", "folder@4567", "other")
    with pytest.raises(UserError, match="holds the index of mine: choose another --output_dir"):
        build(tmp_path / "index", identity="folder@4567")
    with pytest.raises(UserError, match=r"vectors of dimension 16, but the queries have the shape \(1, 3\)"):
        PassageStore(tmp_path / "index").search(np.ones((1, 3)), 1)
    # A model trained with --query_only, whose documents are those of the model that built the index.
    with pytest.raises(UserError, match="another maximum length: leave out --max_length"):
        PassageStore(tmp_path / "index", "folder@4567:9", "other", documents="folder@0123:9")
    assert len(PassageStore(tmp_path / "index", "folder@4567", "other", documents="folder@0123")) == len(TEXTS)


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
    next((tmp_path / "index").glob("texts-*.lines.npy")).write_bytes(b"")
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
        ({"fusion": "rrf"}, [0.5, 0.5]),
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


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every vector store that is opened; opening one reads the hashes of all vectors."""
    opened: list[Path] = []
    real = VectorStore.__init__

    def init(store: VectorStore, folder: Path, *args: Any, **options: Any) -> None:
        opened.append(folder)
        real(store, folder, *args, **options)

    monkeypatch.setattr(VectorStore, "__init__", init)
    return opened


def test_an_index_is_opened_without_its_vectors_or_hashes(tmp_path: Path, no_reading: list[Path]) -> None:
    made = build(tmp_path / "index", index=IndexOptions(truncate_dim=4))
    shutil.copytree(tmp_path / "index", tmp_path / "copy")  # with other times than those that were checked
    no_reading.clear()
    opened = PassageStore(tmp_path / "copy", "folder@0123")
    assert no_reading == []
    assert (opened.vectors.dimension, opened.vectors.key) == (4, made.vectors.key)
    np.testing.assert_array_equal(opened.vectors.read(0, 10), made.vectors.read(0, 10))
    settings = RankerSettings(identity="folder@0123", index=opened.metadata.options)
    ranker = build_ranker(opened.passages.texts, settings, opened.folder, dense=Words(), vectors=opened.vectors)
    assert ranker.search(ranker.encode([TEXTS[7]]), 1).rows_QK.tolist() == [[7]] and no_reading == []


def test_an_index_without_a_layout_gets_one(tmp_path: Path, no_reading: list[Path]) -> None:
    build(tmp_path / "index")
    [layout] = (tmp_path / "index").glob("vectors-*/layout-*")
    shutil.rmtree(layout)
    for stores in (1, 0):
        no_reading.clear()
        assert PassageStore(tmp_path / "index").search(np.ones((1, DIMENSION)), 3).rows_QK.shape == (1, 3)
        assert len(no_reading) == stores and layout.is_dir()


@pytest.mark.parametrize("file", ["shards.npy", "places.npy", "shards.json"])
def test_a_damaged_layout_is_written_again(tmp_path: Path, file: str) -> None:
    expected = build(tmp_path / "index").vectors.read(0, 10)
    [layout] = (tmp_path / "index").glob("vectors-*/layout-*")
    for content in (b"", (layout / file).read_bytes()[:-20], None):
        (layout / file).write_bytes(content) if content is not None else (layout / file).unlink()
        np.testing.assert_array_equal(PassageStore(tmp_path / "index").vectors.read(0, 10), expected)
    assert (layout / file).is_file()


def test_places_of_other_vectors_are_noticed(tmp_path: Path) -> None:
    expected = build(tmp_path / "index").vectors.read(0, 10)
    [layout] = (tmp_path / "index").glob("vectors-*/layout-*")
    places = np.load(layout / "places.npy")
    np.save(layout / "places.npy", places[::-1])
    np.testing.assert_array_equal(PassageStore(tmp_path / "index").vectors.read(0, 10), expected)
    np.testing.assert_array_equal(np.load(layout / "places.npy"), places)


def test_a_damaged_shard_is_reported_when_the_index_is_opened_and_an_error_when_it_is_searched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(tmp_path / "index")
    [shard] = (tmp_path / "index").glob("vectors-*/*.npy")
    shard.write_bytes(shard.read_bytes()[:-5])
    opened = PassageStore(tmp_path / "index")
    assert f"{shard} is damaged" in caplog.text and opened.texts([0]) == TEXTS[:1]
    with pytest.raises(UserError, match="10 of 10 texts are not encoded in .*: run revela-hub index again"):
        opened.search(np.ones((1, DIMENSION)), 1)
    build(tmp_path / "index", encoder := Words())
    assert encoder.encoded == TEXTS


@pytest.mark.parametrize("kind", ["exact", "hnsw"])
def test_texts_of_a_replaced_index_are_deleted(tmp_path: Path, kind: str) -> None:
    def built(*texts: str) -> PassageStore:
        return build_store(
            lambda folder: write_passages(chunks(texts), folder),
            Words(),
            tmp_path,
            RankerSettings(identity="folder@0123", index=IndexOptions(kind)),
            model="mine",
        )

    build_ranker(built("kept", "secret").passages.texts, RankerSettings(mode="bm25"), tmp_path)
    earlier, other = PassageStore(tmp_path), write_passages(chunks(["of another process"]), tmp_path)
    assert any(tmp_path.glob("bm25-*")) and len(list(tmp_path.glob("*.faiss"))) == (kind == "hnsw")
    now = built("kept")
    assert now.texts([0]) == ["kept"] and earlier.texts([1]) == ["secret"]  # it is still open
    arrows = {f"texts-{each.fingerprint}.arrow" for each in (now.passages.texts, other.texts)}
    assert {path.name for path in tmp_path.glob("texts-*.arrow")} == arrows
    assert len(list(tmp_path.glob("texts-*.npy"))) == 2 * 5 and len(list(tmp_path.glob("canary-*"))) == 1
    assert not any(tmp_path.glob("bm25-*")) and len(list(tmp_path.glob("*.faiss"))) == (kind == "hnsw")
    # Texts that were written again after index.json belong to a process that is still building
    write_passages(chunks(["kept"]), tmp_path)
    built("more")
    assert (tmp_path / f"texts-{now.metadata.texts}.arrow").is_file()
    built("more")
    assert len(list(tmp_path.glob("texts-*.arrow"))) == 1


def test_texts_that_were_never_indexed_are_deleted(tmp_path: Path) -> None:
    encoded = write_passages(chunks(["secret"]), claim_folder(tmp_path))
    build(tmp_path)
    assert not list(tmp_path.glob(f"texts-{encoded.texts.fingerprint}.*"))
    encoded = write_passages(chunks(["secret"]), tmp_path)
    canary = tmp_path / f"canary-{32 * '0'}.json"
    canary.touch()
    soon = (tmp_path / "index.json").stat().st_mtime + 10
    for path in (encoded.texts.path, canary):
        os.utime(path, (soon, soon))
    build_ranker(PassageStore(tmp_path).passages.texts, RankerSettings(mode="bm25"), tmp_path)
    build(tmp_path)
    assert (
        encoded.texts.path.is_file() and canary.is_file()
    )  # newer than the index: perhaps of a process that is running
    for path in (encoded.texts.path, canary):
        os.utime(path, (0, 0))
    build(tmp_path)
    assert not encoded.texts.path.is_file() and not canary.is_file() and any(tmp_path.glob("bm25-*"))


def test_two_processes_may_build_one_index(tmp_path: Path) -> None:
    class Meanwhile(Words):
        """While this one encodes its passages, another process builds the same index."""

        def encode_document(self, inputs: list[str], /, **options: Any) -> np.ndarray:
            if not self.encoded:
                build(tmp_path / "index")
                assert list((tmp_path / "index").rglob("*.tmp")) == []
            return super().encode_document(inputs, **options)

    store = build(tmp_path / "index", Meanwhile())
    expected = Words().encode_document(TEXTS)
    np.testing.assert_allclose(
        store.vectors.read(0, 10), expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-5
    )
    assert PassageStore(tmp_path / "index").metadata == store.metadata
    assert list((tmp_path / "index").rglob("*.tmp")) == []
