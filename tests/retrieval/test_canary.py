"""The canary of an index: changes of the vectors that the model's fingerprint does not cover."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from revela_hub.data.text.chunks import Chunk
from revela_hub.errors import UserError
from revela_hub.retrieval import IndexOptions, PassageStore, RankerSettings, build_store, write_passages
from revela_hub.retrieval.canary import Canary, finding

TEXTS = [f"passage {number}" for number in range(100)]


class Changing:
    """An encoder whose vectors pass through `change`; it counts its calls."""

    def __init__(
        self, change: Callable[[np.ndarray], np.ndarray] = lambda vectors: vectors, similarity: str = "cosine"
    ) -> None:
        self.change, self.similarity_fn_name, self.sent = change, similarity, []

    def encode_query(self, inputs: list[str], /, **options: Any) -> np.ndarray:
        return self.encode_document(inputs)

    def encode_document(self, inputs: list[str], /, **options: Any) -> np.ndarray:
        self.sent.append(list(inputs))
        random = [np.random.default_rng(sum(text.encode()) + 1000 * len(text)).normal(size=32) for text in inputs]
        return self.change(3 * np.stack(random).astype(np.float32))


def build(folder: Path, encoder: Changing | None = None, **options: Any) -> PassageStore:
    chunks = [Chunk("a.txt", text, "a.txt", line, line) for line, text in enumerate(TEXTS, start=1)]
    settings = RankerSettings(identity="folder@1", index=IndexOptions(**options))
    return build_store(
        lambda folder: write_passages(chunks, folder), encoder or Changing(), folder, settings, model="mine"
    )


def noise(size: float) -> Callable[[np.ndarray], np.ndarray]:
    drawn = np.random.default_rng(0).normal(size=(16, 32))
    return lambda vectors: (vectors + size * 3 * drawn[: len(vectors)]).astype(np.float32)


def half_noise(vectors: np.ndarray) -> np.ndarray:
    return np.concatenate([vectors[:8], -vectors[8:]])


@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}, {"truncate_dim": 8}, {"precision": "int8"}])
def test_sixteen_passages_are_kept_as_they_were_encoded(tmp_path: Path, options: dict[str, Any]) -> None:
    store = build(tmp_path, **options)
    canary = Canary.read(tmp_path, store.metadata.canary or "")
    assert canary.texts[0] == TEXTS[0] and canary.texts[-1] == TEXTS[-1] and len(canary.texts) == 16
    expected = Changing().encode_document(canary.texts)[:, : options.get("truncate_dim")]
    np.testing.assert_allclose(canary.vectors, expected, rtol=1e-3 if "dtype" in options else 0)
    assert {"torch", "sentence-transformers"} <= canary.versions.keys()
    encoder = Changing()
    assert PassageStore(tmp_path, "folder@1").compare_canary(encoder) == ""
    assert list(map(len, encoder.sent)) == [16]  # one batch
    name = store.metadata.canary
    assert build(tmp_path, **options).metadata.canary == name and len(list(tmp_path.glob("canary-*"))) == 1


def test_rounding_is_a_warning_and_another_vector_an_error(tmp_path: Path) -> None:
    store = build(tmp_path)
    assert store.compare_canary(Changing(noise(0.01))) == ""
    warning = store.compare_canary(Changing(noise(0.2)))
    assert (
        "16 of 16 of its passages have other vectors now than when it was built (cosine to the stored ones 0.9"
        in warning
    )
    assert warning.endswith("at the lowest). Results may differ slightly")
    assert store.compare_canary(Changing(lambda vectors: 2 * vectors)) == ""  # the cosine ignores the length
    for change, mean in (
        (half_noise, "8 of 16 .* -?0.0000 on average, -1.0000"),
        (lambda v: v * 0, "16 of 16 .* 0.0000"),
    ):
        with pytest.raises(
            UserError, match=f"{mean}.*Queries would find the wrong passages: undo the change of a library"
        ):
            store.compare_canary(Changing(change))
    with pytest.raises(UserError, match="have 32 dimensions in the index, but the model computes 16 now"):
        store.compare_canary(Changing(lambda vectors: vectors[:, :16]))
    with pytest.raises(UserError, match="NaN"):
        store.compare_canary(Changing(lambda vectors: vectors * np.nan))


def test_lengths_count_for_the_dot_product(tmp_path: Path) -> None:
    store = build(tmp_path, Changing(similarity="dot"))
    assert store.compare_canary(Changing(similarity="dot")) == ""
    with pytest.raises(UserError, match=r"similarity \(cosine times ratio of lengths\) to the stored ones 0.3333"):
        store.compare_canary(Changing(lambda v: v / 3, "dot"))


def test_changed_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("revela_hub.retrieval.canary.version", lambda name: "1.0")
        store = build(tmp_path)
    assert store.compare_canary(Changing()) == ""  # new versions with the same vectors
    with pytest.raises(UserError, match=r"changed since: torch 1.0 -> \d.*, transformers 1.0 -> \d"):
        store.compare_canary(Changing(lambda vectors: -vectors))


def test_a_damaged_or_missing_canary(tmp_path: Path) -> None:
    store = build(tmp_path)
    path = tmp_path / f"canary-{store.metadata.canary}.json"
    whole = path.read_bytes()
    for content in (whole[:-5], whole.replace(b"passage 0", b"passage 1"), b"{}"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{path.name} is damaged \(.*running revela-hub index"):
            PassageStore(tmp_path, "folder@1").compare_canary(Changing())
    path.unlink()
    with pytest.raises(UserError, match=f"{path.name} is missing: write it again"):
        PassageStore(tmp_path, "folder@1").compare_canary(Changing())
    assert store.compare_canary(Changing()) == ""  # it was opened before another index replaced it
    build(tmp_path, encoder := Changing())
    assert path.read_bytes() == whole and encoder.sent == []


def test_the_thresholds() -> None:
    assert finding(np.array([1, 0.9995]), "cosine", []) == (True, "")
    assert finding(np.array([1, 0.91]), "cosine", ["x"]) == (
        True,
        "1 of 2 of its passages have other vectors now than when it was built (cosine to the stored ones 0.9550 on average,"
        " 0.9100 at the lowest); changed since: x",
    )
    assert not finding(np.array([1, 0.89]), "cosine", [])[0]
    assert finding(np.empty(0), "cosine", []) == (True, "")
