"""`revela-hub encode`, `revela-hub index` and what reads them, through the command line."""

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from revela_hub.cli.main import main
from revela_hub.retrieval import PassageStore


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    rows = [{"text": f"Note {number}: rivers carry sediment past {number * 7} stones."} for number in range(30)]
    (folder / "notes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return folder


def test_shards_become_an_index_that_is_searched(
    corpus: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentence_transformers import SentenceTransformer

    model = str(retriever_folder)
    common = [model, "--corpus", "notes.jsonl", "--output_dir", "index", "--device", "cpu"]
    for shard, number in ((1, 10), (0, 10), (2, 10)):
        assert main(["encode", *common, "--shard", f"{shard}/3"]) == 0
        assert f"encoded {number} of 30 passages in" in capsys.readouterr().out
    assert sum(len(np.load(path)) for path in Path("index").glob("vectors-*/vectors-*.npy")) == 30
    with monkeypatch.context() as patched:
        patched.setattr(SentenceTransformer, "encode", None)  # all shards are there
        assert main(["index", *common, "--index-type", "hnsw"]) == 0
    assert "30 passages, 32-dimensional vectors (hnsw)" in capsys.readouterr().out
    words = ["search", model, "--index", "index", "--device", "cpu", "--json", "--top_k", "3"]
    assert main([*words, "Note 7 rivers"]) == 0
    [hits] = [json.loads(line)["hits"] for line in capsys.readouterr().out.splitlines()]
    assert len(hits) == 3
    # It stays open for more queries, and reads its passages for BM25 too.
    monkeypatch.setattr("sys.stdin", io.StringIO("stones\nsediment\n"))
    assert main([*words, "--mode", "hybrid"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["search", "bm25", "past 91", "--index", "index", "--json"]) == 0
    [best, *_] = json.loads(capsys.readouterr().out)["hits"]
    assert best["text"].startswith("Note 13:")


@pytest.mark.slow  # starts two processes
def test_a_model_on_two_devices_has_the_same_vectors(corpus: Path, retriever_folder: Path) -> None:
    common = [str(retriever_folder), "--corpus", "notes.jsonl", "--device"]
    for folder, device in (("one", "cpu"), ("two", "cpu,cpu")):
        assert main(["index", *common, device, "--output_dir", folder]) == 0
    one, two = (PassageStore(folder).vectors[:] for folder in ("one", "two"))
    np.testing.assert_allclose(one, two, atol=1e-6)


def test_a_read_only_index_is_searched_with_a_cache_elsewhere(
    corpus: Path, retriever_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["--corpus", "notes.jsonl", "--output_dir", "index", "--device", "cpu"]
    assert main(["index", str(retriever_folder), *common]) == 0
    before = sorted(Path("index").rglob("*"))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    for where in ([], ["--cache_dir", "elsewhere"]):
        assert main(["search", str(retriever_folder), "stones", "--index", "index", "--mode", "hybrid", *where]) == 0
    assert sorted(Path("index").rglob("*")) == before and any(Path("elsewhere").glob("bm25-*"))


def test_another_model_or_other_vectors_of_the_same_are_noticed(
    corpus: Path,
    retriever_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from safetensors.torch import load_file, save_file
    from sentence_transformers.sentence_transformer.modules import Pooling

    def message(*words: str) -> str:
        assert main(list(words)) == 2
        return capsys.readouterr().err.splitlines()[-1]

    model, changed = str(retriever_folder), tmp_path / "changed"
    shutil.copytree(retriever_folder, changed)
    tensors = load_file(changed / "model.safetensors")
    tensors[name] = tensors[name := next(iter(tensors))] + 0.1
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    common = ["--corpus", "notes.jsonl", "--device", "cpu", "--output_dir"]
    assert (
        main(["index", model, *common, "index"]) == main(["index", model, *common, "short", "--max_length", "9"]) == 0
    )
    search = ["search", model, "rivers", "--device", "cpu", "--index"]
    assert main([*search, "index"]) == 0
    assert "not comparable" in message("search", str(changed), "x", "--index", "index")
    assert "with max_length 9" in message(*search, "short")
    assert "holds the index of" in message("index", str(changed), *common, "index")
    forward = Pooling.forward

    def shifted_mean(module: Pooling, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        forward(module, features, **options)
        return features | {"sentence_embedding": features["token_embeddings"].mean(dim=1) - 1}

    monkeypatch.setattr(Pooling, "forward", shifted_mean)  # a library that pools in another way
    assert "computes other vectors now" in message(*search, "index")
    for shard in Path("index").glob("vectors-*/*.npy"):
        shard.write_bytes(shard.read_bytes()[:-9])
    assert main([*search, "index", "--mode", "bm25"]) == 0  # no vectors are compared, or read


@pytest.mark.parametrize("command", ["index", "encode"])
def test_the_output_stays_apart_from_files_of_the_user(
    command: str, corpus: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("full").mkdir()
    Path("full/precious.txt").write_text("mine")
    words = [command, str(retriever_folder), "--corpus", ".", "--output_dir"]
    for output, message in (("../project/full", "is inside the data"), ("full/index", "is inside the data")):
        assert main([*words, output]) == 2 and message in capsys.readouterr().err
    assert main([*words[:3], "notes.jsonl", "--output_dir", "full"]) == 2
    assert "contains files" in capsys.readouterr().err
    assert sorted(map(str, Path("full").rglob("*"))) == ["full/precious.txt"]
