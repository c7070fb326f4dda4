"""Encoding on a Ray cluster of this machine: the same vectors as here, and nothing is lost when a worker dies."""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import word_encoder

from revela_hub.cli.main import main
from revela_hub.data.ray_cluster import RayCluster
from revela_hub.errors import UserError
from revela_hub.retrieval.ranking import RankerSettings, document_vectors
from revela_hub.retrieval.ray_engine import RayEngine
from revela_hub.retrieval.texts import TextFile, TextRange, write_texts
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


def encode(texts: Any, folder: Path, engine: RayEngine | None) -> Any:
    settings = RankerSettings(identity="words", engine=engine)
    return document_vectors(texts, word_encoder.Encoder(), settings, folder)


def test_a_killed_worker_loses_nothing_and_the_vectors_are_those_of_one_process(
    ray_cluster: None, tmp_path: Path
) -> None:
    texts = write_texts([*TEXTS, *TEXTS[:3]], tmp_path)
    expected = encode(texts, tmp_path / "here", None)
    engine = RayEngine(partial(dying_encoder, tmp_path / "killed"), RayCluster(num_actors=2))
    found = encode(texts, tmp_path / "there", engine)
    assert (tmp_path / "killed").exists()
    np.testing.assert_array_equal(found.read(0, len(texts)), expected.read(0, len(texts)))
    assert len(list((tmp_path / "there").glob("vectors-*/*.npy"))) == 8  # a shard for each block

    # A second run finds everything, and loads no encoder; a range of the texts needs no more.
    again = encode(TextRange(texts, 10, 20), tmp_path / "there", RayEngine(failing_encoder))
    np.testing.assert_array_equal(again.read(0, 10), expected.read(10, 20))
    assert again.key != expected.key


def test_an_error_of_a_worker_is_one_line(ray_cluster: None, tmp_path: Path) -> None:
    texts = write_texts(TEXTS, tmp_path)
    with pytest.raises(UserError, match=r"^this model cannot be loaded$"):
        encode(texts, tmp_path, RayEngine(failing_encoder, RayCluster(num_actors=1)))


def test_actors_with_gpus_have_a_batch_size(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray rejects actors with GPUs without one."""
    map_batches = ray.data.Dataset.map_batches

    def build(self: Any, *given: Any, **options: Any) -> Any:
        assert options["num_gpus"] == 1
        map_batches(self, *given, **options)  # raises its errors now, and runs nothing
        raise UserError("built")

    monkeypatch.setattr(ray.data.Dataset, "map_batches", build)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 1.0})
    with pytest.raises(UserError, match="^built$"):
        encode(write_texts(TEXTS, tmp_path), tmp_path, RayEngine(word_encoder.Encoder))


def test_texts_and_vectors_travel_as_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts, store = write_texts(TEXTS, Path()), VectorStore(Path("vectors"), "words")
    packed = ray.cloudpickle.dumps(TextRange(texts, 5, 9))
    assert len(packed) < 1000
    both = ray.cloudpickle.dumps((texts, store))
    expected = texts.read([5, 8]), store.folder.resolve()
    monkeypatch.chdir("/")  # workers have their own working directory
    assert ray.cloudpickle.loads(packed).read([0, 3]) == expected[0]
    found, vectors = ray.cloudpickle.loads(both)
    assert isinstance(found, TextFile) and vectors.folder == expected[1]


def test_encode_and_mine_on_a_cluster(
    ray_cluster: None, tmp_path: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, pairs = tmp_path / "corpus.jsonl", tmp_path / "pairs.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"Note {n}: rivers pass {n} stones."}) + "\n" for n in range(40)))
    pairs.write_text(json.dumps({"anchor": "rivers and stones", "positive": "Note 3: rivers pass 3 stones."}) + "\n")
    ray_options = ["--engine", "ray", "--num_actors", "1", "--device", "cpu"]  # each actor imports all libraries
    words = ["encode", str(retriever_folder), "--corpus", str(corpus), "--output_dir", str(tmp_path / "index")]
    assert main([*words, *ray_options]) == 0
    assert "encoded 40 of 40 passages" in capsys.readouterr().out
    assert len(list((tmp_path / "index").glob("vectors-*/*.npy"))) == 4  # the blocks of one actor

    mined = []
    for name, options in (("here", ["--device", "cpu"]), ("there", ray_options)):
        words = ["mine", str(retriever_folder), "--pairs", str(pairs), "--corpus", str(corpus), "--scores"]
        words += ["--output", str(tmp_path / f"{name}.jsonl"), "--cache_dir", str(tmp_path / name), "--max_score", "2"]
        assert main([*words, "--positive_aware", "false", *options]) == 0
        mined.append(json.loads((tmp_path / f"{name}.jsonl").read_text()))
    assert mined[0]["negative_1"] == mined[1]["negative_1"]
    assert mined[0]["scores"] == pytest.approx(mined[1]["scores"], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num_actors", "2"], "--num_actors requires --engine ray"),
        (["--address", "auto"], "--address requires --engine ray"),
        (["--engine", "ray", "--endpoint", "http://localhost:9"], "--engine ray and --endpoint exclude each other"),
        (["--engine", "ray", "--num_processes", "2"], "with --engine ray, set --num_actors"),
    ],
)
def test_options_without_effect(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.txt").write_text("Rivers carry sediment.")
    words = ["encode", "model", "--corpus", str(tmp_path / "corpus.txt"), "--output_dir", str(tmp_path / "index")]
    assert main([*words, *options]) == 2
    assert message in capsys.readouterr().err


def test_bm25_has_nothing_to_encode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"anchor": "rivers", "positive": "Rivers carry sediment."}\n')
    words = ["mine", "bm25", "--pairs", str(pairs), "--output", str(tmp_path / "mined.jsonl"), "--engine", "ray"]
    assert main([*words, "--cache_dir", str(tmp_path / "cache")]) == 2
    assert "--engine ray encodes vectors: it requires --mode dense" in capsys.readouterr().err


def test_a_cluster_that_does_not_answer(ray_cluster: None, tmp_path: Path) -> None:
    ray.shutdown()  # the last test with it
    texts = write_texts(TEXTS, tmp_path)
    with pytest.raises(UserError, match="no Ray cluster answers at --address 127.0.0.1:1 "):
        encode(texts, tmp_path, RayEngine(word_encoder.Encoder, RayCluster("127.0.0.1:1")))
