"""The one vector store: nothing is encoded twice, whatever happens in between."""

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from revela_hub.errors import UserError
from revela_hub.retrieval import TextList, vectors
from revela_hub.retrieval.texts import write_texts
from revela_hub.retrieval.vectors import VectorStore

DIMENSION = 8
TEXTS = [f"passage number{number}" for number in range(10)]


class Encode:
    """Texts to vectors; stops after `limit` calls, and keeps what it has encoded."""

    def __init__(self, limit: int | None = None, dimension: int = DIMENSION) -> None:
        self.limit, self.dimension = limit, dimension
        self.texts: list[str] = []

    def __call__(self, texts: list[str], progress: Callable[[int], object] = bool) -> np.ndarray:
        if self.limit is not None:
            if self.limit == 0:
                raise KeyboardInterrupt
            self.limit -= 1
        self.texts += texts
        progress(len(texts))
        seeds = [sum(map(ord, text)) for text in texts]
        return np.stack([np.random.default_rng(seed).normal(size=self.dimension) for seed in seeds]).astype(np.float32)


def fill(folder: Path, encode: Encode, texts: list[str] = TEXTS, model: str = "model@1", **options: str) -> VectorStore:
    store = VectorStore(folder, model, **options)
    store.fill(TextList(texts), encode)
    return store


def shards(folder: Path) -> list[Path]:
    return sorted(folder.rglob("vectors-*.npy"))


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "FIRST_SHARD", 2)
    monkeypatch.setattr(vectors, "SHARD_SIZE", 4)


def test_gives_the_vectors_of_any_rows_in_order(tmp_path: Path) -> None:
    expected = Encode()(TEXTS)
    store = fill(tmp_path, Encode())
    found = store.vectors(TextList(TEXTS))
    assert len(found) == 10 and found.dimension == DIMENSION
    np.testing.assert_array_equal(found.read(3, 99), expected[3:])
    rows = np.array([9, 0, 4, 4, 2])
    np.testing.assert_array_equal(found.take(rows), expected[rows])
    backwards = store.vectors(TextList(TEXTS[::-1]), normalize=True)
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(backwards.read(0, 10), unit[::-1], rtol=1e-6)
    assert backwards.key != found.key != fill(tmp_path, Encode(), model="model@2").vectors(TextList(TEXTS)).key


def test_files_begin_small_and_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    first = Encode(limit=2)
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path, first)
    assert first.texts == TEXTS[:6]  # of 2, then of 4
    second = Encode()
    store = fill(tmp_path, second)
    assert second.texts == TEXTS[6:]
    assert store.vectors(TextList(TEXTS)).reused == 6
    third = Encode(limit=0)
    store = fill(tmp_path, third)
    np.testing.assert_array_equal(store.vectors(TextList(TEXTS)).read(0, 10), Encode()(TEXTS))


def test_files_stop_growing_when_they_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "SHARD_SECONDS", -1.0)
    fill(tmp_path, Encode())
    assert [len(np.load(path)) for path in shards(tmp_path)] == [2] * 5


def test_only_what_is_new_is_encoded_wherever_it_stands(tmp_path: Path) -> None:
    fill(tmp_path, Encode())
    encode = Encode()
    fill(tmp_path, encode, ["new", *TEXTS[5:], "new", "other", *TEXTS[:2]])
    assert encode.texts == ["new", "other"]


def test_models_and_types_do_not_share_vectors(tmp_path: Path) -> None:
    for model, dtype in (("a@1", "float32"), ("a@2", "float32"), ("a@1:64", "float32"), ("a@1", "float16")):
        encode = Encode()
        store = fill(tmp_path, encode, model=model, dtype=dtype)
        assert encode.texts == TEXTS
    assert len({path.parent for path in shards(tmp_path)}) == 4
    half = store.vectors(TextList(TEXTS)).read(0, 10)
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, Encode()(TEXTS), rtol=1e-3)
    with pytest.raises(UserError, match="overflow float16; store them as float32"):
        VectorStore(tmp_path, "b", dtype="float16").fill(TextList(["x"]), lambda *_: np.full((1, 2), 1e6, np.float32))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def other_array(path: Path) -> None:
    with path.open("wb") as stream:
        np.save(stream, np.zeros((3, DIMENSION), np.float32))


@pytest.mark.parametrize("damage", [truncate, other_array, lambda path: path.write_bytes(b"")])
def test_a_damaged_file_is_replaced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    fill(tmp_path, Encode())
    [_, damaged, *_] = shards(tmp_path)
    damage(damaged)
    encode = Encode()
    with caplog.at_level(logging.WARNING):
        store = fill(tmp_path, encode)
    assert f"{damaged} is damaged" in caplog.text
    assert len(encode.texts) == 4
    np.testing.assert_array_equal(store.vectors(TextList(TEXTS)).read(0, 10), Encode()(TEXTS))
    fill(tmp_path, Encode(limit=0))


def test_two_processes_may_fill_one_store(tmp_path: Path) -> None:
    class Meanwhile(Encode):
        """Between this process's reading and its first writing, another one encodes the same texts."""

        def __call__(self, texts: list[str], progress: Callable[[int], object] = bool) -> np.ndarray:
            if not self.texts:
                fill(tmp_path, Encode(), [*TEXTS, "one more"])
            return super().__call__(texts, progress)

    expected = Encode()(TEXTS)
    np.testing.assert_array_equal(fill(tmp_path, Meanwhile()).vectors(TextList(TEXTS)).read(0, 10), expected)
    again = fill(tmp_path, Encode(limit=0))
    np.testing.assert_array_equal(again.vectors(TextList(TEXTS)).read(0, 10), expected)


def test_mistakes_of_the_caller(tmp_path: Path) -> None:
    store = fill(tmp_path, Encode())
    with pytest.raises(UserError, match="1 of 2 texts are not encoded in"):
        store.vectors(TextList([TEXTS[0], "unknown"]))
    with pytest.raises(ValueError, match="is shared by two models"):
        fill(tmp_path, Encode(dimension=DIMENSION + 1), ["new"])


def test_a_text_that_cannot_be_read_leaves_no_file(tmp_path: Path) -> None:
    def texts() -> Iterator[str]:
        yield "one"
        raise OSError(errno.EIO, "Input/output error", "corpus.jsonl")

    with pytest.raises(OSError, match="corpus.jsonl"):
        write_texts(texts(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_user_in_a_store_is_left_alone(tmp_path: Path) -> None:
    folder = VectorStore(tmp_path, "model@1").folder
    (folder / "mine.npy").write_bytes(b"mine")
    VectorStore(tmp_path, "model@1")
    assert (folder / "mine.npy").read_bytes() == b"mine"


def test_any_rows_in_any_order_are_those_of_the_files(tmp_path: Path) -> None:
    texts = [f"text number{number}" for number in range(300)]
    found = fill(tmp_path, Encode(), texts).vectors(TextList(texts))
    expected = Encode()(texts)
    random = np.random.default_rng(0)
    for rows in (random.integers(0, 300, 500), random.permutation(300), np.arange(290, 300), np.array([5, 5, 4]), []):
        np.testing.assert_array_equal(found.take(np.array(rows, dtype=np.int64)), expected[np.array(rows, dtype=int)])
