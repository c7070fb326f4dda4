"""The passage index: what it finds, and that nothing is encoded twice, whatever happens in between."""

import errno
import hashlib
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from revela_hub.data.sources.documents import read_documents
from revela_hub.data.text.chunks import Chunk
from revela_hub.errors import UserError
from revela_hub.retrieval import BM25Index, PassageIndex, Passages, VectorCache, collect_passages, index, read_passages

DIMENSION = 16


class Words:
    """An encoder of bags of words; fails after `limit` calls of `encode_document`, and keeps what it has encoded."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.encoded: list[str] = []

    def encode_query(self, inputs: list[str], /, *, batch_size: int, show_progress_bar: bool) -> np.ndarray:
        return np.stack([self._vector(text) for text in inputs])

    def encode_document(self, inputs: list[str], /, *, batch_size: int, show_progress_bar: bool) -> np.ndarray:
        if self.limit is not None and self.limit == 0:
            raise KeyboardInterrupt
        self.limit = None if self.limit is None else self.limit - 1
        self.encoded += inputs
        return np.stack([self._vector(text) for text in inputs])

    def _vector(self, text: str) -> np.ndarray:
        seeds = [int.from_bytes(hashlib.md5(word.encode()).digest()[:4], "big") for word in text.split()]
        return np.sum([np.random.default_rng(seed).normal(size=DIMENSION) for seed in seeds], axis=0)


def chunk(text: str, place: str = "file.txt", line: int = 1) -> Chunk:
    return Chunk(place, text, place, line, line + text.count("\n"))


def passages(texts: Iterable[str]) -> Passages:
    return collect_passages(chunk(text, line=line) for line, text in enumerate(texts, start=1))


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SHARD_SIZE", 4)


@pytest.fixture
def cache(tmp_path: Path) -> VectorCache:
    return VectorCache(tmp_path / "cache", "folder@0123")


def shards(cache: VectorCache) -> list[Path]:
    return sorted(cache.folder.glob("*.safetensors"))


TEXTS = [f"passage number{number} about topic{number % 5}" for number in range(10)]


def ranking(found: PassageIndex | BM25Index, query: str = "topic3 number8") -> list[tuple[str, float]]:
    return [(hit.text, round(hit.score, 4)) for hit in found.search([query], 4)[0]]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_finds_the_most_similar_passages(similarity: str) -> None:
    encoder = Words()
    found = PassageIndex(encoder, passages(TEXTS), similarity=similarity)
    queries = ["topic2", "number7 passage"]
    for query, hits in zip(queries, found.search(queries, 3), strict=True):
        a = encoder._vector(query)
        scores = []
        for text in TEXTS:
            b = encoder._vector(text)
            scores.append(a @ b / (np.linalg.norm(a) * np.linalg.norm(b) if similarity == "cosine" else 1.0))
        best = np.argsort(scores)[::-1][:3]
        assert [hit.text for hit in hits] == [TEXTS[row] for row in best]
        assert [hit.score for hit in hits] == pytest.approx([scores[row] for row in best], rel=1e-5)
        assert [hit.start_line for hit in hits] == [row + 1 for row in best]
    assert len(found.search(["topic2"], 1000)[0]) == len(TEXTS)


def test_an_interrupted_run_is_resumed_where_it_stopped(cache: VectorCache, small_shards: None) -> None:
    first = Words(limit=1)
    with pytest.raises(KeyboardInterrupt):
        PassageIndex(first, passages(TEXTS), cache)
    assert first.encoded == TEXTS[:4]
    second = Words()
    resumed = PassageIndex(second, passages(TEXTS), cache)
    assert second.encoded == TEXTS[4:]
    assert resumed.reused == 4
    third = Words(limit=0)
    cached = PassageIndex(third, passages(TEXTS), cache)
    assert third.encoded == []
    assert ranking(cached) == ranking(resumed) == ranking(PassageIndex(Words(), passages(TEXTS)))


def test_only_what_changed_is_encoded(cache: VectorCache, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.md").write_text(f"Everything about {name}.\n")

    def encoded() -> list[str]:
        encoder = Words()
        PassageIndex(encoder, read_passages(read_documents([str(folder)])), cache)
        return encoder.encoded

    assert encoded() == ["Everything about a.", "Everything about b.", "Everything about c."]
    (folder / "b.md").write_text("Something else.\n")
    (folder / "d.md").write_text("A new note.\n")
    (folder / "c.md").rename(folder / "moved.md")
    assert encoded() == ["Something else.", "A new note."]
    (folder / "b.md").write_text("Everything about b.\n")  # and back again
    assert encoded() == []


def test_models_do_not_share_vectors(tmp_path: Path) -> None:
    for model in ("folder@1", "folder@2", "org/name@1", "org/name@1:64"):
        encoder = Words()
        PassageIndex(encoder, passages(TEXTS), VectorCache(tmp_path, model))
        assert encoder.encoded == TEXTS
    assert len(list(tmp_path.iterdir())) == 4


def test_a_text_that_is_there_twice_is_encoded_and_found_once(cache: VectorCache) -> None:
    licence = "Licensed to you"
    chunks = [chunk(licence, "a.py"), chunk("other text", "a.py", 9), chunk(licence, "b.py"), chunk(licence, "c.py", 7)]
    encoder = Words()
    found = PassageIndex(encoder, collect_passages(chunks), cache)
    assert encoder.encoded == [licence, "other text"]
    first, second = found.search([licence], 10)[0]
    assert (first.location, first.copies) == ("a.py:1-1", ("b.py:1-1", "c.py:7-7"))
    assert (second.location, second.copies) == ("a.py:9-9", ())
    assert first.to_dict()["copies"] == ["b.py:1-1", "c.py:7-7"]


def test_overlapping_sources_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "note.md").write_text("A note.\n")
    found = read_passages(read_documents([str(tmp_path), str(tmp_path / "part"), str(tmp_path / "part" / "note.md")]))
    assert [len(places) for places in found.places] == [1]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x40
    path.write_bytes(content)


def other_tensors(path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"vectors": np.zeros((4, DIMENSION), np.float32)}, path)


def shorter(path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    save_file({"digests": tensors["digests"], "vectors": tensors["vectors"][:-1]}, path)


@pytest.mark.parametrize("damage", [truncate, flip, other_tensors, shorter, lambda path: path.write_bytes(b"")])
def test_a_damaged_shard_is_replaced_with_a_warning(
    cache: VectorCache, small_shards: None, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    whole = ranking(PassageIndex(Words(), passages(TEXTS), cache))
    assert len(shards(cache)) == 3
    damaged = shards(cache)[1]
    assert callable(damage)
    damage(damaged)
    encoder = Words()
    with caplog.at_level(logging.WARNING):
        assert ranking(PassageIndex(encoder, passages(TEXTS), cache)) == whole
    assert f"{damaged} is damaged" in caplog.text
    assert 2 <= len(encoder.encoded) <= 4
    again = Words()
    PassageIndex(again, passages(TEXTS), cache)
    assert again.encoded == []


def test_a_shard_that_cannot_be_read_is_left_alone(
    cache: VectorCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    PassageIndex(Words(), passages(TEXTS), cache)
    [shard] = shards(cache)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("revela_hub.retrieval.cache.safe_open", refuse)
    encoder = Words()
    PassageIndex(encoder, passages(TEXTS), cache)
    assert encoder.encoded == TEXTS
    assert shard.exists()
    assert "cannot be read" in caplog.text


def test_a_full_disk_is_one_message_and_loses_nothing(
    cache: VectorCache, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="the disk is full at .*--cache-dir.*run again to continue"):
        PassageIndex(Words(), passages(TEXTS), cache)
    assert len(shards(cache)) == 1
    assert list(cache.folder.glob("*.tmp")) == []
    resumed = Words()
    PassageIndex(resumed, passages(TEXTS), cache)
    assert resumed.encoded == TEXTS[4:]


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot use the cache .*file.*--cache-dir"):
        VectorCache(tmp_path / "file", "m@1")


def test_what_a_killed_process_left_half_written_is_removed_when_old(cache: VectorCache) -> None:
    fresh, old = cache.folder / "a.1.tmp", cache.folder / "b.2.tmp"
    fresh.write_bytes(b"half")
    old.write_bytes(b"half")
    os.utime(old, (0, 0))
    VectorCache(cache.folder.parent, "folder@0123")
    assert fresh.exists()
    assert not old.exists()


def test_two_processes_may_fill_one_cache(cache: VectorCache, small_shards: None) -> None:
    class Meanwhile(Words):
        """Between this process's reading and its first writing, another one encodes the same passages."""

        def encode_document(self, inputs: list[str], /, *, batch_size: int, show_progress_bar: bool) -> np.ndarray:
            if not self.encoded:
                PassageIndex(Words(), passages([*TEXTS, "one more"]), VectorCache(cache.folder.parent, "folder@0123"))
            return super().encode_document(inputs, batch_size=batch_size, show_progress_bar=show_progress_bar)

    alone = ranking(PassageIndex(Words(), passages(TEXTS)))
    assert ranking(PassageIndex(Meanwhile(), passages(TEXTS), cache)) == alone
    encoder = Words()
    assert ranking(PassageIndex(encoder, passages(TEXTS), cache)) == alone  # each passage once, though written twice
    assert encoder.encoded == []


def test_a_shard_that_another_process_deletes_is_passed_over(cache: VectorCache, small_shards: None) -> None:
    PassageIndex(Words(), passages(TEXTS), cache)
    rows = {digest: row for row, digest in enumerate(passages(TEXTS).digests)}
    reading = cache.read(rows)
    first = next(reading)
    for path in shards(cache)[1:]:
        path.unlink()
    assert list(reading) == []
    assert len(first.rows) in (2, 4)


def test_vectors_of_another_model_under_the_same_key_are_refused(cache: VectorCache) -> None:
    PassageIndex(Words(), passages(TEXTS), cache)

    class Wider(Words):
        def _vector(self, text: str) -> np.ndarray:
            return np.ones(DIMENSION + 1)

    with pytest.raises(ValueError, match="does not tell models apart"):
        PassageIndex(Wider(), passages([*TEXTS, "new"]), cache)


def test_nothing_to_search() -> None:
    assert PassageIndex(Words(), Passages()).search(["x"]) == [[]]
    assert PassageIndex(Words(), passages(TEXTS)).search([]) == []
    assert BM25Index(Passages()).search(["x"]) == [[]]


def test_bm25_finds_passages() -> None:
    found = BM25Index(passages(TEXTS))
    [hits] = found.search(["number7"], 3)
    assert [hit.text for hit in hits] == [TEXTS[7]]
    assert found.search(["unheard"], 3) == [[]]


def test_missing_faiss_is_said_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    encoder = Words()
    with pytest.raises(UserError, match=r"pip install 'revela-hub\[search\]'"):
        PassageIndex(encoder, passages(TEXTS))
    assert encoder.encoded == []
