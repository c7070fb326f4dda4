"""Batches by tokens give the vectors that the model's own methods give."""

from pathlib import Path

import numpy as np
import pytest

from revela_hub.retrieval import encoding
from revela_hub.retrieval.encoder import load_encoder
from revela_hub.retrieval.encoding import batches, encode_texts


@pytest.mark.parametrize("kind", ["query", "document"])
@pytest.mark.parametrize("prompt", [None, "Find: "])
def test_equals_the_models_own_encoding(
    retriever_folder: Path, kind: str, prompt: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(encoding.TOKENS_PER_BATCH, "cpu", 200)
    random = np.random.default_rng(0)
    texts = ["rivers carry sediment " * int(random.integers(1, 60)) + str(row) for row in range(40)]
    model = load_encoder(str(retriever_folder), device="cpu")
    method = model.encode_query if kind == "query" else model.encode_document
    own = method(texts, **({} if prompt is None else {"prompt": prompt}))
    passes, forward = [], model[0].forward
    monkeypatch.setattr(
        model[0], "forward", lambda features, **o: passes.append(features["attention_mask"]) or forward(features, **o)
    )
    np.testing.assert_allclose(encode_texts(model, texts, kind, prompt=prompt), own, atol=1e-6)  # type: ignore[arg-type]
    assert len(passes) > 3 and sum(map(len, passes)) == 40
    assert all(len(mask) == 1 or mask.numel() <= 300 for mask in passes)  # lengths in tokens are estimates
    assert all(mask.any(0).all() for mask in passes)  # no more padding than the longest of them needs


def test_batches_hold_every_row_once_the_longest_first() -> None:
    lengths = np.random.default_rng(0).integers(0, 300, 500)
    found = list(batches(lengths, 1024, 64))
    assert sorted(np.concatenate(found).tolist()) == list(range(500))
    assert (np.diff([lengths[rows].max() for rows in found]) <= 0).all()
    for rows in found:
        assert len(rows) <= 64 and (len(rows) == 1 or len(rows) * lengths[rows].max() <= 1024)


def test_an_encoder_of_another_kind_gets_all_texts_at_once() -> None:
    class Own:
        def encode_query(self, inputs: list[str], /, **options: object) -> np.ndarray:
            assert options == {"batch_size": 7, "show_progress_bar": False}
            return np.ones((len(inputs), 3))

        encode_document = encode_query

    assert encode_texts(Own(), ["a", "b"], "document", batch_size=7).shape == (2, 3)
