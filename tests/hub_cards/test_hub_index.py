"""An index on the Hub: pushed with the real client to a local Hub, and searched from there."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from loopback_hub import LoopbackHub

from revela_hub.cli.main import main

NAME = "org/my-index"
REPEATED = "Every file has this line about the licence."


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "of me" / "notes"
    folder.mkdir(parents=True)
    for number in range(12):
        (folder / f"note{number}.txt").write_text(f"Rivers carry sediment past {number * 7} stones.")
    for name in ("a.txt", "b.txt", "c.txt"):
        (folder / name).write_text(REPEATED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return folder


@pytest.fixture
def index(retriever_folder: Path, corpus: Path, tmp_path: Path) -> list[str]:
    """The words of a command that builds an index."""
    common = ["--corpus", str(corpus), "--output_dir", str(tmp_path / "index"), "--device", "cpu"]
    return ["index", str(retriever_folder), *common]


def search(model: Path | str, index: str, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["search", str(model), "sediment", "--index", index, "--device", "cpu", "--json", *words]) == 0
    hits: list[dict[str, object]] = json.loads(capsys.readouterr().out)["hits"]
    return hits


def error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("options", [["--dtype", "float16"], ["--index_type", "hnsw"]])
def test_an_index_is_pushed_and_searched_from_the_hub(
    options: list[str],
    hub: LoopbackHub,
    index: list[str],
    retriever_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main([*index, *options, "--push_to_hub", NAME, "--private"]) == 0
    assert f"pushed to {hub.endpoint}/datasets/{NAME}/commit/" in capsys.readouterr().out
    repository = hub.repositories[f"datasets/{NAME}"]
    files = repository.files("main") or {}
    assert repository.private and len(repository.commits) == 2  # the first one creates it
    assert {"index.json", "README.md"} < files.keys() and not any(name.endswith(".faiss") for name in files)
    assert not any(str(tmp_path).encode() in content for content in files.values())
    local = search(retriever_folder, str(tmp_path / "index"), capsys)
    found = search(retriever_folder, f"hf:{NAME}", capsys)
    assert found == local
    hits = search(retriever_folder, f"hf:{NAME}", capsys, "--top_k", "13")
    [licence] = [hit for hit in hits if hit["text"] == REPEATED]
    assert (licence["path"], licence["copies"]) == ("notes/a.txt", ["notes/b.txt:1-1", "notes/c.txt:1-1"])
    hub.requests.clear()
    assert search(retriever_folder, f"hf:{NAME}", capsys, "--mode", "hybrid")
    assert not any(".npy" in request and "GET" in request for request in hub.requests)  # downloaded once
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert search(retriever_folder, f"hf:{NAME}", capsys) == local


def test_a_revision_is_pinned_and_an_index_replaced_but_files_of_the_user_are_kept(
    hub: LoopbackHub, index: list[str], corpus: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*index, "--push_to_hub", NAME]) == 0
    repository = hub.repositories[f"datasets/{NAME}"]
    first, files = list(repository.commits)[-1], dict(repository.files("main") or {})
    own = files | {"LICENSE": b"MIT", "README.md": files["README.md"] + b"My words."}
    repository.commit("main", own, "manually")
    (corpus / "new.txt").write_text("Sediment is what settles.")
    assert "set update" in error(capsys, *index, "--push_to_hub", NAME)
    assert main([*index, "--push_to_hub", NAME, "--update"]) == 0
    now = repository.files("main") or {}
    assert (now["README.md"], now["LICENSE"]) == (own["README.md"], b"MIT")
    assert sum(name.endswith(".arrow") for name in now) == 1
    texts = [
        {hit["text"] for hit in search(retriever_folder, f"hf:{NAME}{revision}", capsys, "--top_k", "20")}
        for revision in ("", f"@{first}")
    ]
    assert texts[0] - texts[1] == {"Sediment is what settles."}


def test_the_vectors_decide_whether_it_is_the_same_model(
    hub: LoopbackHub, index: list[str], retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    assert main([*index, "--push_to_hub", NAME]) == 0
    other = tmp_path / "other"
    shutil.copytree(retriever_folder, other)
    (other / "notes.md").write_text("The same model, with another hash of its files.")
    (other / "config_sentence_transformers.json").write_text(
        (other / "config_sentence_transformers.json").read_text() + " "
    )
    assert search(other, f"hf:{NAME}", capsys)
    path = next(other.rglob("model.safetensors"))
    tensors = {name: tensor + 0.1 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    assert "not comparable" in error(capsys, "search", str(other), "x", "--index", f"hf:{NAME}", "--device", "cpu")


@pytest.mark.parametrize("server", ["http://attacker.example", "attacker.db", None])
def test_a_published_index_does_not_choose_a_server(
    server: str | None,
    hub: LoopbackHub,
    index: list[str],
    retriever_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*index, "--push_to_hub", NAME]) == 0
    repository = hub.repositories[f"datasets/{NAME}"]
    files = dict(repository.files("main") or {})
    metadata = json.loads(files["index.json"])
    metadata["options"] |= {"type": "milvus", "milvus_uri": server}
    repository.commit("main", files | {"index.json": json.dumps(metadata).encode()}, "hostile")
    monkeypatch.setattr("revela_hub.retrieval.milvus.connect", None)
    message = error(capsys, "search", str(retriever_folder), "x", "--index", f"hf:{NAME}", "--device", "cpu")
    assert "Milvus" in message
