"""Texts and vectors on disk: nothing is encoded twice, whatever happens in between."""

import json
from pathlib import Path

import numpy as np
import pytest

from revela_hub.errors import UserError
from revela_hub.retrieval import TextList, vectors
from revela_hub.retrieval.texts import TextFile, write_texts
from revela_hub.retrieval.vectors import VectorStore

DIMENSION = 8
TEXTS = [f"passage number{number}" for number in range(10)]


class Encode:
    """Texts to vectors; stops after `limit` calls, and keeps what it has encoded."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.texts: list[str] = []

    def __call__(self, texts: list[str]) -> np.ndarray:
        if self.limit is not None:
            if self.limit == 0:
                raise KeyboardInterrupt
            self.limit -= 1
        self.texts += texts
        seeds = [sum(map(ord, text)) for text in texts]
        return np.stack([np.random.default_rng(seed).normal(size=DIMENSION) for seed in seeds]).astype(np.float32)


def fill(folder: Path, encode: Encode, texts: list[str] = TEXTS, model: str = "model@1", **options: str) -> VectorStore:
    store = VectorStore(folder, model, **options)
    store.fill(TextList(texts), encode)
    return store


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "FIRST_SHARD", 2)
    monkeypatch.setattr(vectors, "SHARD_SIZE", 4)


def test_gives_the_vectors_of_any_rows_in_order(tmp_path: Path) -> None:
    texts = [f"text number{number}" for number in range(300)]
    found, expected = fill(tmp_path, Encode(), texts).vectors(TextList(texts)), Encode()(texts)
    random = np.random.default_rng(0)
    for rows in (random.integers(0, 300, 500), random.permutation(300), np.array([5, 5, 4]), np.array([], dtype=int)):
        np.testing.assert_array_equal(found[rows], expected[rows])
    np.testing.assert_array_equal(found[290:999], expected[290:])
    store = fill(tmp_path, Encode(limit=0), texts[:9])
    backwards = store.vectors(TextList(texts[8::-1]), normalize=True)
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(backwards[:], unit[8::-1], rtol=1e-6)
    keys = {found.key, backwards.key, fill(tmp_path, Encode(), texts, model="model@2").vectors(TextList(texts)).key}
    assert len(keys) == 3


def test_only_what_is_new_is_encoded_wherever_it_stands(tmp_path: Path) -> None:
    fill(tmp_path, Encode())
    encode = Encode()
    store = fill(tmp_path, encode, ["new", *TEXTS[5:], "new", "other", *TEXTS[:2]])
    assert encode.texts == ["new", "other"]
    with pytest.raises(UserError, match="1 of 2 texts are not encoded in"):
        store.vectors(TextList([TEXTS[0], "unknown"]))


def test_models_and_types_do_not_share_vectors(tmp_path: Path) -> None:
    for model, dtype in (("a@1", "float32"), ("a@2", "float32"), ("a@1:64", "float32"), ("a@1", "float16")):
        encode = Encode()
        store = fill(tmp_path, encode, model=model, dtype=dtype)
        assert encode.texts == TEXTS
    assert len({path.parent for path in tmp_path.rglob("vectors-*.npy")}) == 4
    half = store.vectors(TextList(TEXTS))[:]
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, Encode()(TEXTS), rtol=1e-3)
    with pytest.raises(UserError, match="overflow float16; store them as float32"):
        VectorStore(tmp_path, "b", dtype="float16").fill(TextList(["x"]), lambda _: np.full((1, 2), 1e6, np.float32))


def test_two_processes_may_fill_one_store(tmp_path: Path) -> None:
    class Meanwhile(Encode):
        """Between this process's reading and its first writing, another one encodes the same texts."""

        def __call__(self, texts: list[str]) -> np.ndarray:
            if not self.texts:
                fill(tmp_path, Encode(), [*TEXTS, "one more"])
            return super().__call__(texts)

    expected = Encode()(TEXTS)
    for encode in (Meanwhile(), Encode(limit=0)):
        np.testing.assert_array_equal(fill(tmp_path, encode).vectors(TextList(TEXTS))[:], expected)


@pytest.mark.parametrize("name", ["vectors", "digests"])
@pytest.mark.parametrize("kept", [0, -7])
def test_a_damaged_file_is_replaced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, kept: int
) -> None:
    fill(tmp_path, Encode())
    damaged = sorted(tmp_path.rglob(f"{name}-*.npy"))[1]
    damaged.write_bytes(damaged.read_bytes()[:kept])
    encode = Encode()
    store = fill(tmp_path, encode)
    assert "is damaged" in caplog.text and len(encode.texts) == 4
    np.testing.assert_array_equal(store.vectors(TextList(TEXTS))[:], Encode()(TEXTS))


def test_texts_that_repeat_have_one_number(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 60, 3000)
    texts = TextFile(write_texts(({"text": f"text {number}"} for number in numbers), tmp_path))
    distinct = list(dict.fromkeys(f"text {number}" for number in numbers))
    assert texts.read(range(len(texts))) == distinct
    assert [distinct[row] for row in texts.rows_L] == [f"text {number}" for number in numbers]
    text = json.loads('"broken \\ud800 half"')
    assert TextFile(write_texts([{"text": text}], tmp_path)).read([0]) == ["broken \ufffd half"]


def test_a_digest_next_to_a_stored_one_is_another_text(tmp_path: Path) -> None:
    store, near = fill(tmp_path, Encode()), TextList(TEXTS)
    near.digests_N = near.digests_N - np.uint64(1)
    assert store.missing(near).tolist() == list(range(len(TEXTS)))  # as float64 they would be equal
