"""Encoding on a Ray cluster of this machine: the same vectors as here, and nothing is lost when a worker dies."""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import word_encoder

from revela_hub.cli.main import main
from revela_hub.errors import UserError
from revela_hub.retrieval.encoding import encode_texts
from revela_hub.retrieval.ray_engine import encode_on_ray
from revela_hub.retrieval.texts import TextFile, TextList, write_texts
from revela_hub.retrieval.vectors import VectorStore

ray = pytest.importorskip("ray", reason="ray is not installed")
WORDS = word_encoder.WORDS
TEXTS = [f"{a} {b} {c}" for a in WORDS for b in WORDS[:8] for c in WORDS[:4]]
for module in (word_encoder, sys.modules[__name__]):  # the workers do not find these files
    ray.cloudpickle.register_pickle_by_value(module)


def dying_encoder(marker: Path) -> Any:
    """An encoder whose process is killed in the first call, once."""
    encoder = word_encoder.Encoder()
    encode = encoder.encode_document

    def encode_once_killed(texts: list[str], **options: Any) -> Any:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return encode(texts, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    encoder.encode_document = encode_once_killed  # type: ignore[method-assign]
    return encoder


def failing_encoder() -> Any:
    raise UserError("this model cannot be loaded")


def encoded(texts: Any, folder: Path, load: Callable[[], Any], actors: int = 1) -> Any:
    store = VectorStore(folder, "words")
    encode_on_ray(load, store, texts, num_actors=actors)
    return store.vectors(texts)


def test_a_killed_worker_loses_nothing_and_the_vectors_are_those_of_one_process(
    ray_cluster: None, tmp_path: Path
) -> None:
    texts = TextFile(write_texts(({"text": text} for text in [*TEXTS, *TEXTS[:3]]), tmp_path))
    expected = encode_texts(word_encoder.Encoder(), TEXTS, "document")
    found = encoded(texts, tmp_path / "there", partial(dying_encoder, tmp_path / "killed"), actors=2)
    assert (tmp_path / "killed").exists()
    np.testing.assert_array_equal(found[:], expected)

    # A second run finds everything, and loads no encoder.
    again = encoded(texts, tmp_path / "there", failing_encoder)
    np.testing.assert_array_equal(again[10:20], expected[10:20])


def test_an_error_of_a_worker_is_one_line(ray_cluster: None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^this model cannot be loaded$"):
        encoded(TextList(TEXTS), tmp_path, failing_encoder)


def test_encode_on_a_cluster(
    ray_cluster: None,
    tmp_path: Path,
    retriever_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.jsonl").write_text("".join(json.dumps({"text": f"Note {n}: {n} stones."}) + "\n" for n in range(40)))
    words = ["encode", str(retriever_folder), "--corpus", "corpus.jsonl", "--output_dir", "index", "--device", "cpu"]
    assert main([*words, "--ray", "local", "--num_actors", "1"]) == 0
    assert "encoded 40 of 40 passages" in capsys.readouterr().out
    assert sorted(path.suffix for path in Path("index").glob("vectors-*/*.npy"))
