"""Mining on disk: blocks, interruptions, full disks and damaged files; and that the corpus is not in memory."""

import logging
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from word_encoder import WORDS, Encoder

from revela_hub.errors import UserError
from revela_hub.retrieval import IndexOptions, dense, vectors
from revela_hub.retrieval.mining import mining
from revela_hub.retrieval.mining.mining import MiningSettings, RankerSettings, mine, mine_negatives

CACHED = RankerSettings(identity="model@1")


def random_texts(number: int, seed: int, length: int = 6) -> list[str]:
    random = np.random.default_rng(seed)
    return [f"{' '.join(random.choice(WORDS, length))} {seed}x{index}" for index in range(number)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small data have several blocks of everything, and last blocks that are not full."""
    monkeypatch.setattr(vectors, "FIRST_SHARD", 7)
    monkeypatch.setattr(vectors, "SHARD_SIZE", 7)
    monkeypatch.setattr(dense, "PRODUCT_VECTORS", 3)
    monkeypatch.setattr(mining, "ANCHOR_BLOCK", 5)


DOCUMENTS = random_texts(40, 2)
ANCHORS = random_texts(11, 3)


def mined_rows(ranker: Any, folder: Path | None, **values: Any) -> list[dict[str, Any]]:
    settings = MiningSettings(num_negatives=2, relative_margin=None, scores=True, **values)
    return list(mine_negatives(ANCHORS, DOCUMENTS[:11], DOCUMENTS, ranker, settings, CACHED, cache_dir=folder).dataset)


@pytest.mark.parametrize("ranker", [Encoder(), "bm25"])
def test_blocks_change_nothing(ranker: Any, request: pytest.FixtureRequest) -> None:
    whole = mined_rows(ranker, None)
    request.getfixturevalue("small_blocks")
    blocks = mined_rows(ranker, None)
    for one, other in zip(whole, blocks, strict=True):
        assert one.pop("scores") == pytest.approx(other.pop("scores"), rel=1e-5)
        assert one == other
    assert len(whole) == 11


def test_an_interrupted_run_is_resumed_where_it_stopped(tmp_path: Path, small_blocks: None) -> None:
    first = Encoder(limit=2)  # blocks of 7 texts
    with pytest.raises(KeyboardInterrupt):
        mined_rows(first, tmp_path)
    assert first.documents == DOCUMENTS[:14]
    assert list(tmp_path.rglob("*.tmp")) == []
    second = Encoder()
    resumed = mined_rows(second, tmp_path)
    assert second.documents == DOCUMENTS[14:]
    assert second.queries == ANCHORS  # when their block is searched for
    assert resumed == mined_rows(Encoder(), None)
    third = Encoder(limit=0)
    assert mined_rows(third, tmp_path) == resumed
    assert third.queries == third.documents == []


def test_an_interrupted_search_is_resumed_and_other_limits_need_none(
    tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []
    real = dense.ExactIndex.search

    def spy(self: Any, queries: np.ndarray, k: int) -> Any:
        if len(searched) == 2:
            raise KeyboardInterrupt
        searched.append(len(queries))
        return real(self, queries, k)

    monkeypatch.setattr(dense.ExactIndex, "search", spy)
    with pytest.raises(KeyboardInterrupt):
        mined_rows(Encoder(), tmp_path)
    assert searched == [5, 5]
    searched.clear()
    mined_rows(Encoder(), tmp_path)
    assert searched == [1]
    other = Encoder()
    mined_rows(other, tmp_path, max_score=0.99, range_max=3)
    assert searched == [1]
    assert other.queries == other.documents == []  # the positives' scores are kept with the hits


def test_an_index_of_bm25_is_kept(tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = mined_rows("bm25", tmp_path)
    for path in tmp_path.glob("hits-*/*.npz"):
        path.unlink()
    monkeypatch.setattr("bm25s.BM25.index", None)  # it is mapped into memory, not made again
    assert mined_rows("bm25", tmp_path) == first


def test_models_corpora_and_types_do_not_share_vectors(tmp_path: Path) -> None:
    encoder = Encoder()

    def run(corpus: list[str], **values: Any) -> list[str]:
        encoder.documents.clear()
        ranking = RankerSettings(**({"identity": "model@1"} | values))
        settings = MiningSettings(relative_margin=None)
        mine_negatives(ANCHORS, DOCUMENTS[:11], corpus, encoder, settings, ranking, cache_dir=tmp_path)
        return list(encoder.documents)

    assert run(DOCUMENTS) == DOCUMENTS
    assert run(DOCUMENTS) == []
    assert run(DOCUMENTS, identity="model@2") == DOCUMENTS
    encoder.similarity_fn_name = "dot"
    assert run(DOCUMENTS) == []  # vectors are stored as the model returns them
    assert run(DOCUMENTS, index=IndexOptions(dtype="float16")) == DOCUMENTS
    assert run([*DOCUMENTS, "new"]) == ["new"]
    with pytest.raises(ValueError, match="a cache needs the model's identity"):
        mine_negatives(ANCHORS, DOCUMENTS[:11], DOCUMENTS, encoder, cache_dir=tmp_path)


def test_float16_vectors_take_half_the_space(tmp_path: Path) -> None:
    def size(dtype: str) -> int:
        ranking = RankerSettings(identity="model@1", index=IndexOptions(dtype=dtype))
        settings = MiningSettings(relative_margin=None, scores=True)
        folder = tmp_path / dtype
        mined = mine_negatives(ANCHORS, DOCUMENTS[:11], DOCUMENTS, Encoder(), settings, ranking, cache_dir=folder)
        values.append([row["scores"] for row in mined.dataset])
        return sum(np.load(path).nbytes for path in folder.glob("vectors-*/vectors-*.npy"))

    values: list[Any] = []
    assert size("float32") == 2 * size("float16")
    np.testing.assert_allclose(values[1], values[0], atol=2e-3)
    assert values[0] != values[1]

    class Loud(Encoder):
        similarity_fn_name = "dot"

        def encode_document(self, inputs: list[str], /, *, batch_size: int, show_progress_bar: bool) -> np.ndarray:
            return np.full((len(inputs), 8), 1e6, dtype=np.float32)

    ranking = RankerSettings(index=IndexOptions(dtype="float16"))
    with pytest.raises(UserError, match="overflow float16; store them as float32"):
        mine_negatives(ANCHORS, DOCUMENTS[:11], DOCUMENTS, Loud(), None, ranking)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("damage", [truncate, lambda path: path.write_bytes(b"")])
def test_damaged_files_are_made_again_with_a_warning(
    tmp_path: Path, small_blocks: None, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    whole = mined_rows(Encoder(), tmp_path)
    damage(next(path for path in tmp_path.glob("vectors-*/vectors-*.npy") if len(np.load(path)) == 7))
    for path in tmp_path.glob("hits-*/*.npz"):
        damage(path)
    encoder = Encoder()
    with caplog.at_level(logging.WARNING):
        assert mined_rows(encoder, tmp_path) == whole
    assert len(encoder.documents) == 7
    assert "its texts must be encoded again" in caplog.text
    assert "searching for its anchors again" in caplog.text


@pytest.mark.slow
def test_the_corpus_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "SHARD_SIZE", 256)
    monkeypatch.setattr(dense, "PRODUCT_VECTORS", 256)
    monkeypatch.setattr(dense, "CACHED_BYTES", 1 << 20)
    monkeypatch.setattr("revela_hub.retrieval.texts.LINES_PER_BATCH", 64)
    number, filler = 3000, "x" * 10_000

    class Sparse(Encoder):
        """Vectors of 1,024 numbers, of which the first says all."""

        def encode_query(self, inputs: list[str], /, *, batch_size: int, show_progress_bar: bool) -> np.ndarray:
            vectors = np.ones((len(inputs), 1024), dtype=np.float32)
            vectors[:, 0] = [float(text.split()[0]) for text in inputs]
            return vectors

        encode_document = encode_query
        similarity_fn_name = "dot"

    def corpus() -> Iterator[str]:
        for index in range(number):
            yield f"{index} {filler}"

    ranking = RankerSettings(identity="model@1")
    settings = MiningSettings(relative_margin=None)
    tracemalloc.start()
    try:
        mined = mine([("1", "5")], corpus(), Sparse(), settings, ranking, folder=tmp_path)
        [row] = mined.rows
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert row["negative_1"].startswith(f"{number - 1} ")
    # The texts are 30 MB and their vectors 12 MB.
    assert peak < 8e6
