"""An index on the Hub: pushed with the real client to a local Hub, read by `datasets`, and searched from there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from loopback_hub import READER, LoopbackHub, Repository

from revela_hub.cli.main import main
from revela_hub.errors import UserError
from revela_hub.hub_cards import hub_index
from revela_hub.hub_cards.hub_index import public_metadata
from revela_hub.hub_cards.index_repository import download_index
from revela_hub.retrieval import IndexOptions, PassageStore, vectors
from revela_hub.retrieval.index_metadata import IndexMetadata
from revela_hub.retrieval.vectors import VectorStore

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
    monkeypatch.setattr(hub_index, "FILE_BYTES", 1500)
    monkeypatch.setattr(hub_index, "ROWS", 4)
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


@pytest.mark.parametrize("options", [[], ["--dtype", "float16"], ["--truncate_dim", "8", "--precision", "int8"]])
def test_an_index_is_pushed_and_searched_from_the_hub(
    options: list[str],
    hub: LoopbackHub,
    index: list[str],
    retriever_folder: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*index, *options, "--push_to_hub", NAME, "--private"]) == 0
    assert f"pushed to {hub.endpoint}/datasets/{NAME} (commit " in capsys.readouterr().out
    repository = hub.repositories[f"datasets/{NAME}"]
    files = repository.files("main") or {}
    assert repository.private and len(repository.commits) == 2  # the first one creates it
    shards = sorted(name for name in files if name.startswith("data/"))
    assert len(shards) > 1 and {"index.json", "README.md"} < files.keys()
    assert not any(str(tmp_path).encode() in content for content in files.values())
    local = search(retriever_folder, str(tmp_path / "index"), capsys)
    found = search(retriever_folder, f"hf:{NAME}", capsys)
    for one, other in zip(local, found, strict=True):
        assert one["text"] == other["text"] and one["score"] == pytest.approx(other["score"], abs=1e-6)
        assert str(one["path"]).removeprefix(f"{corpus.parent}/") == other["path"]
    [licence] = [
        hit for hit in search(retriever_folder, f"hf:{NAME}", capsys, "--top_k", "13") if hit["text"] == REPEATED
    ]
    assert (licence["path"], licence["copies"]) == ("notes/a.txt", ["notes/b.txt:1-1", "notes/c.txt:1-1"])
    hub.requests.clear()
    assert search(retriever_folder, f"hf:{NAME}", capsys, "--mode", "hybrid")
    assert not any("/data/" in request for request in hub.requests)  # downloaded once


def test_the_files_of_a_data_set_are_read_by_address(hub: LoopbackHub, index: list[str], tmp_path: Path) -> None:
    """In a separate process, because datasets reads the address of the Hub when it is imported."""
    assert main([*index, "--push_to_hub", NAME]) == 0
    address = f"hf://datasets/{NAME}"
    code = (
        "import sys; from revela_hub.data import read_documents\n"
        "from revela_hub.data.text.passages import build_passages\n"
        "for source in sys.argv[1:]:\n"
        "    print(len(list(read_documents(source))))\n"
        "    kept, streamed = (build_passages(source, min_words=1, streaming=each) for each in (False, True))\n"
        "    print(len(kept) and list(kept) == list(streamed))"
    )
    addresses = [f"{address}@main/data/passages-*.parquet", address]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, *addresses], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["13", "True"] * 2, done.stderr[-3000:]


def test_datasets_reads_the_rows(
    hub: LoopbackHub, index: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from datasets import load_dataset

    assert main([*index, "--push_to_hub", NAME]) == 0
    files = hub.repositories[f"datasets/{NAME}"].files("main") or {}
    for name in (name for name in files if name.startswith("data/")):
        (tmp_path / Path(name).name).write_bytes(files[name])
    rows = load_dataset(
        "parquet", data_files=str(tmp_path / "passages-*.parquet"), split="train", cache_dir=str(tmp_path)
    )
    store = PassageStore(tmp_path / "index")
    assert rows["id"][:] == list(range(len(store))) == list(range(13))
    assert rows["text"][:] == store.texts(range(len(store)))
    assert all(len(vector) == 32 for vector in rows["vector"])
    text = files["README.md"].decode()
    assert "| passages | 13 |" in text and "data_files: data/passages-*.parquet" in text and "n<1K" in text
    assert f'search retriever "your question" --index hf:{NAME}' in text


def test_a_revision_is_pinned_and_an_index_replaced(
    hub: LoopbackHub, index: list[str], retriever_folder: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push = [*index, "--push_to_hub", NAME]
    assert main(push) == 0
    first = hub.repositories[f"datasets/{NAME}"].refs["main"]
    assert main(push) == 0 and "unchanged)" in capsys.readouterr().out
    shutil.rmtree(corpus)
    corpus.mkdir()
    (corpus / "new.txt").write_text("Sediment is what settles.")
    assert "already holds another index: choose another name, or add --update" in error(capsys, *push)
    assert main([*push, "--update"]) == 0
    files = hub.repositories[f"datasets/{NAME}"].files("main") or {}
    assert [name for name in files if name.startswith("data/")] == ["data/passages-00000.parquet"]
    assert sum(name.startswith("canary-") for name in files) == 1
    assert [hit["path"] for hit in search(retriever_folder, f"hf:{NAME}", capsys)] == ["notes/new.txt"]
    assert len(search(retriever_folder, f"hf:{NAME}@{first}", capsys)) == 5
    assert "hf:org/my-index@gone" in error(capsys, "search", "bm25", "x", "--index", f"hf:{NAME}@gone")


def test_the_canary_decides_whether_it_is_the_same_model(
    hub: LoopbackHub, index: list[str], retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*index, "--push_to_hub", NAME]) == 0
    renamed = tmp_path / "same-vectors"
    shutil.copytree(retriever_folder, renamed)
    (renamed / "notes.txt").write_text("changes the fingerprint")
    assert search(renamed, f"hf:{NAME}", capsys)
    assert "is a different model or version" in error(
        capsys, "search", str(renamed), "x", "--index", str(tmp_path / "index"), "--device", "cpu"
    )
    pooling = next(renamed.glob("1_Pooling/config.json"))
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"pooling_mode": "mean"}))
    other = ["search", str(renamed), "x", "--index", f"hf:{NAME}", "--device", "cpu"]
    assert "was built with retriever (folder@" in (message := error(capsys, *other))
    assert "is a different model or version" in message
    assert main([*other, "--mode", "bm25"]) == 0


def test_damaged_files_are_named(
    hub: LoopbackHub, index: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*index, "--push_to_hub", NAME]) == 0
    repository = hub.repositories[f"datasets/{NAME}"]
    files = dict(repository.files("main") or {})
    canary = next(name for name in files if name.startswith("canary-"))
    listed = json.loads(files["index.json"])
    shard = "data/passages-00001.parquet"
    changes: dict[str, tuple[dict[str, bytes | None], str]] = {
        "shard": ({shard: files[shard][:-50]}, f"hf:{NAME}: {shard} is damaged \\(its SHA-256"),
        "no shard": ({shard: None}, f"{shard} is damaged"),
        "canary": ({canary: b"{}"}, f"{canary} is damaged"),
        "no canary": ({canary: None}, f"hf:{NAME}: {canary} is damaged \\(it is missing"),
        "json": ({"index.json": b"{"}, "index.json is damaged"),
        "no files": ({"index.json": json.dumps(listed | {"files": 3}).encode()}, "index.json is damaged"),
        "escape": (
            {"index.json": json.dumps(listed | {"files": {"../x": {"rows": 1, "sha256": "0"}}}).encode()},
            "unexpected names of files",
        ),
        "count": (
            {"index.json": json.dumps(listed | {"passages": 99}).encode()},
            "it names 99 passages, but there are 13",
        ),
        "dimension": (
            {"index.json": json.dumps(listed | {"dimension": 31}).encode()},
            "vectors are not 31 finite numbers each",
        ),
        **{
            f"{field} {value!r}": (
                {"index.json": json.dumps(listed | {field: value}).encode()},
                f"index.json is damaged \\({message}",
            )
            for field, value, message in (
                ("files", {}, "unexpected names"),
                ("passages", "13", "passages has a value of the wrong type, '13'"),
                ("document_prompt", 5, "document_prompt has a value of the wrong type, 5"),
                ("model", None, "model has a value of the wrong type"),
                ("truncate_dim", "8", ""),
                ("similarity", "manhattan", "unknown similarity 'manhattan'"),
                ("canary", "../../x", "unexpected name of the canary"),
            )
        },
        "none": ({"index.json": None}, "holds no index \\(index.json is missing\\): push one with revela-hub index"),
    }
    for fault, (change, message) in changes.items():
        changed = {name: content for name, content in (files | change).items() if content is not None}
        commit = repository.commit("main", changed, fault)
        with pytest.raises(UserError, match=message):
            PassageStore(download_index(f"hf:{NAME}@{commit}"))


@pytest.mark.parametrize("server", ["http://attacker.example", "attacker.db", None])
def test_a_published_index_does_not_choose_a_server(
    server: str | None,
    hub: LoopbackHub,
    index: list[str],
    retriever_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The token, the passages and the queries would be sent to it, or a file be written outside of the cache."""
    monkeypatch.setenv("MILVUS_TOKEN", "user:password")
    monkeypatch.chdir(tmp_path)
    assert main([*index, "--push_to_hub", NAME]) == 0
    repository = hub.repositories[f"datasets/{NAME}"]
    files = dict(repository.files("main") or {})
    listed = json.loads(files["index.json"]) | {"index": "milvus", "milvus_uri": server}
    repository.commit("main", files | {"index.json": json.dumps(listed).encode()}, "attack")
    message = error(capsys, "search", str(retriever_folder), "x", "--index", f"hf:{NAME}", "--device", "cpu")
    assert "index.json is damaged (a published index is not stored in Milvus)" in message
    assert not (tmp_path / "attacker.db").exists() and not (tmp_path / "xdg" / "revela-hub" / "indexes").exists()


def test_files_and_the_edited_card_of_the_user_are_kept(
    hub: LoopbackHub, index: list[str], corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push = [*index, "--push_to_hub", NAME]
    assert main(push) == 0
    repository = hub.repositories[f"datasets/{NAME}"]
    files = dict(repository.files("main") or {})
    own = files | {"LICENSE": b"MIT", "README.md": files["README.md"].replace(b"---\nconf", b"---\nlicense: mit\nconf")}
    repository.commit("main", own, "manually")
    capsys.readouterr()
    assert main(push) == 0 and "unchanged)" in capsys.readouterr().out
    for number in range(2):
        (corpus / f"new{number}.txt").write_text(f"Sediment is what settles {number} times.")
        assert "add --update to replace it" in error(capsys, *push)
        assert main([*push, "--update"]) == 0
        assert f"{NAME}: keeping the edited README.md" in capsys.readouterr().err
        now = repository.files("main") or {}
        assert (now["README.md"], now["LICENSE"]) == (own["README.md"], b"MIT")
    assert json.loads(now["index.json"])["passages"] == 15 and sum(name.startswith("canary-") for name in now) == 1
    repository.commit("main", {name: content for name, content in now.items() if name != "README.md"}, "manually")
    (corpus / "last.txt").write_text("Sediment again.")
    assert main([*push, "--update"]) == 0
    (corpus / "very-last.txt").write_text("Sediment again, and again.")
    assert main([*push, "--update"]) == 0 and "keeping" not in capsys.readouterr().err
    now = repository.files("main") or {}
    assert b"| passages | 17 |" in now["README.md"] and now["LICENSE"] == b"MIT"


def test_what_cannot_be_pushed_is_reported_before_the_index_is_built(
    hub: LoopbackHub,
    index: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "--private requires --push_to_hub" in error(capsys, *index, "--private")
    assert "'no name' is not a valid name" in error(capsys, *index, "--push_to_hub", "no name")
    assert "has no namespace: use your-name/index" in error(capsys, *index, "--push_to_hub", "index")
    hub.repositories["datasets/org/other"] = other = Repository()
    other.commit("main", {"train.csv": b"a,b"}, "first")
    assert "org/other holds other files (train.csv)" in error(capsys, *index, "--push_to_hub", "org/other")
    hub.repositories["datasets/org/card"] = Repository()
    hub.repositories["datasets/org/card"].commit("main", {"README.md": b"my own words"}, "initial commit")
    assert "org/card already holds a README.md: choose" in error(capsys, *index, "--push_to_hub", "org/card")
    assert hub.repositories["datasets/org/card"].files("main") == {"README.md": b"my own words"}
    other.commit("main", {".gitattributes": b""}, "second")
    assert "org/other is public already" in error(capsys, *index, "--push_to_hub", "org/other", "--private")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "not logged in to the Hub" in error(capsys, *index, "--push_to_hub", "org/new")
    assert not (tmp_path / "index").exists()
    monkeypatch.setenv("HF_TOKEN", READER)
    assert "no write access to org/new" in error(capsys, *index, "--push_to_hub", "org/new")
    assert not list((tmp_path / "index").glob("*.tmp"))


def test_offline_the_downloaded_index_is_searched(
    hub: LoopbackHub,
    index: list[str],
    retriever_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main([*index, "--push_to_hub", NAME]) == 0
    assert search(retriever_folder, f"hf:{NAME}", capsys)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert search(retriever_folder, f"hf:{NAME}", capsys)
    missing = ["search", str(retriever_folder), "x", "--index", "hf:org/never", "--device", "cpu"]
    assert "the Hub cannot be reached, and hf:org/never was not downloaded before" in error(capsys, *missing)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert "hf:org/never is not on the Hub" in error(capsys, *missing)


def test_a_connection_that_breaks_is_resumed(
    hub: LoopbackHub,
    index: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_index, "FILE_BYTES", 1 << 28)
    monkeypatch.setattr("loopback_hub.LARGE", 1000)
    hub.cut_uploads = True
    assert "nothing was pushed: run the same command again to resume" in error(capsys, *index, "--push_to_hub", NAME)
    assert not list((tmp_path / "index").glob("*.tmp"))
    hub.cut_uploads = False
    assert main([*index, "--push_to_hub", NAME]) == 0


def test_a_download_that_was_interrupted_is_resumed(
    hub: LoopbackHub, index: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*index, "--push_to_hub", NAME]) == 0
    monkeypatch.setattr(vectors, "FIRST_SHARD", 2)
    written, write = [], VectorStore._write

    def interrupted(store: VectorStore, *arrays: np.ndarray) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(len(arrays[0]))
        write(store, *arrays)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(VectorStore, "_write", interrupted)
        download_index(f"hf:{NAME}")
    assert written == [2, 4]
    found, expected = PassageStore(download_index(f"hf:{NAME}")), PassageStore(tmp_path / "index")
    assert found.texts(range(13)) == expected.texts(range(13))
    np.testing.assert_array_equal(found.vectors.read(0, 13), expected.vectors.read(0, 13))


def test_places_and_addresses_are_not_published() -> None:
    metadata = IndexMetadata(
        model="/home/me/my-retriever",
        fingerprint="folder@0123:served:tei:/data/models/mine:float16",
        texts="0",
        passages=1,
        dimension=2,
        similarity="dot",
        options=IndexOptions("milvus", milvus_uri="http://db.local:19530"),
        endpoint="text-embeddings-inference 1.9 at http://gpu.local:8080, /data/models/mine, float16",
    )
    public = public_metadata(metadata)
    assert (public.model, public.options) == ("my-retriever", IndexOptions("exact"))
    assert public.fingerprint == "folder@0123:served:tei:mine:float16"
    assert public.endpoint == "text-embeddings-inference 1.9, mine, float16"
    assert public_metadata(IndexMetadata("org/model", "org/model@1", "0", 1, 2, "dot")).model == "org/model"
