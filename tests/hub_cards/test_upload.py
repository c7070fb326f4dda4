"""Errors at each step of an upload, and the second run of the same command."""

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub, Repository

from revela_hub.checkpoints import publish
from revela_hub.cli import main as cli
from revela_hub.errors import UserError
from revela_hub.hub_cards import Assembly, Check, Destination, ModelCardMetadata, Result, upload, write_card
from revela_hub.internals import limit_waiting_for_the_hub
from revela_hub.trainers.nvembed import NVEMBED

DESTINATION = Destination("org/x", revision="next", tag="v1", collection="Tiny ones")
# The requests of an upload in order. The process is killed before and after each of them.
STEPS = (
    "POST /api/repos/create",
    "POST /api/models/org/x/branch/next",
    "POST /api/models/org/x/preupload/next",
    "POST /org/x.git/info/lfs/objects/batch",
    "PUT /lfs/",
    "POST /api/models/org/x/commit/next",
    "GET /org/x/resolve/",
    "POST /api/models/org/x/tag/",
    "POST /api/collections",
    "POST /api/collections/org/",
)


@pytest.fixture(autouse=True)
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the verification, which needs a separate process."""
    monkeypatch.setattr(upload, "verify", lambda *args, **options: [Check("all", True, "not looked at")])


def reset(hub: LoopbackHub) -> None:
    hub.before_request = hub.after_request = lambda request: None
    for kept in (hub.repositories, hub.large, hub.collections):
        kept.clear()


def waiting(step: str, reached: threading.Event, released: threading.Event) -> Callable[[str], None]:
    def wait(request: str) -> None:
        if request.startswith(step) and not reached.is_set():
            reached.set()
            released.wait(60)

    return wait


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.exhaustive), "after"])
def test_a_killed_upload_is_resumed_at_any_step(hub: LoopbackHub, retriever_folder: Path, when: str) -> None:
    for step in STEPS:
        reset(hub)
        reached, released = threading.Event(), threading.Event()

        setattr(hub, f"{when}_request", waiting(step, reached, released))
        child = os.fork()
        if not child:
            try:
                publish(retriever_folder, DESTINATION)
            finally:
                os._exit(0)
        assert reached.wait(60), step
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        hub.before_request = hub.after_request = lambda request: None
        released.set()
        try:
            published = publish(retriever_folder, DESTINATION)
        except UserError as error:  # the last request of the killed process arrived in between
            assert "run the same command again" in str(error), step
            published = publish(retriever_folder, DESTINATION)
        repository = hub.repositories["org/x"]
        assert repository.refs["v1"] == repository.refs["next"] == published.commit, step
        assert repository.messages.count(repository.messages[-1]) == 1, f"{step}: published twice"
        assert set(repository.files("main")) == {".gitattributes"}, step
        assert {"model.safetensors", "modules.json", "README.md"} <= set(repository.files("next")), step
        assert [set(items) for items in hub.collections.values()] == [{"org/x"}], step


@pytest.mark.parametrize("step", ["GET /api/models/org/x", "GET /api/whoami-v2", "POST /api/models/org/x/commit/main"])
def test_a_hub_that_never_answers(
    hub: LoopbackHub,
    retriever_folder: Path,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """huggingface_hub itself would wait forever."""
    monkeypatch.setattr(cli, "HUB_TIMEOUT", 0.5)
    reached, released = threading.Event(), threading.Event()
    hub.before_request = waiting(step, reached, released)
    try:
        assert cli.main(["publish", str(retriever_folder), "org/x"]) == 2
    finally:
        released.set()
        limit_waiting_for_the_hub(60)
    assert re.search(
        r"connection to the Hub failed \(ReadTimeout.*run the same command again to resume", capsys.readouterr().err
    )
    assert reached.is_set()
    hub.before_request = lambda request: None
    assert cli.main(["publish", str(retriever_folder), "org/x"]) == 0


def test_private_models_are_not_published_in_public_repositories(hub: LoopbackHub, retriever_folder: Path) -> None:
    hub.repositories["org/x"] = Repository()
    hub.repositories["org/x"].commit("main", {}, "initial commit")
    for destination in (Destination("org/x", private=True), Destination("org/x", private=True, revision="other")):
        with pytest.raises(UserError, match="public already"):
            publish(retriever_folder, destination)
    assert set(hub.repositories["org/x"].files("main")) == set()


@pytest.mark.parametrize("name", ["README.md", "LICENSE"])
def test_files_of_others_are_replaced_on_demand_only(
    hub: LoopbackHub, retriever_folder: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "licensed"
    shutil.copytree(retriever_folder, folder)
    (folder / "LICENSE").write_text("MIT")
    (folder / ".gitattributes").write_text("")
    repository = hub.repositories["org/x"] = Repository()
    before = {name: b"my own words", "notes.txt": b"notes", ".gitattributes": b""}
    repository.commit("main", before, "initial commit")
    with pytest.raises(UserError, match=rf"org/x already contains a file of this name \({name}\): .* add --update"):
        publish(folder, Destination("org/x"))
    assert repository.files("main") == before
    publish(folder, Destination("org/x", update=True))
    files = repository.files("main") or {}
    assert files[name] != b"my own words" and files["notes.txt"] == b"notes" and "model.safetensors" in files


def test_an_existing_tag(hub: LoopbackHub, retriever_folder: Path) -> None:
    first = publish(retriever_folder, Destination("org/x", tag="v1"))
    assert publish(retriever_folder, Destination("org/x", tag="v1")).commit == first.commit
    metadata = Assembly(metadata=ModelCardMetadata(license="mit"))
    with pytest.raises(UserError, match=r"verified at .* but not tagged: org/x has the tag v1 already"):
        publish(retriever_folder, Destination("org/x", tag="v1", update=True), metadata)
    hub.repositories["org/x"].commit("main", dict(hub.repositories["org/x"].files("main")), "a manual change")
    count = len(hub.repositories["org/x"].messages)
    with pytest.raises(UserError, match="tag v1 already"):
        publish(retriever_folder, Destination("org/x", tag="v1", update=True), metadata)
    assert len(hub.repositories["org/x"].messages) == count


def test_a_collection_without_write_access(hub: LoopbackHub, retriever_folder: Path) -> None:
    hub.forbid_collections = True
    with pytest.raises(
        UserError, match=r"no write access to the collection 'Ours'.*\(org/x is published and was verified"
    ):
        publish(retriever_folder, Destination("org/x", collection="Ours"))
    hub.forbid_collections = False
    publish(retriever_folder, Destination("org/x", collection="Ours"))


def test_concurrent_commits(hub: LoopbackHub, retriever_folder: Path) -> None:
    publish(retriever_folder, Destination("org/x"))
    repository = hub.repositories["org/x"]

    def meanwhile(request: str) -> None:
        if "/preupload/" in request:
            hub.before_request = lambda request: None
            repository.commit("main", dict(repository.files("main")) | {"NEWS.md": b""}, "of another user")

    hub.before_request = meanwhile
    with pytest.raises(UserError, match="another user committed to org/x"):
        publish(
            retriever_folder, Destination("org/x", update=True), Assembly(metadata=ModelCardMetadata(license="mit"))
        )
    assert "NEWS.md" in repository.files("main")


def test_error_after_the_commit_reports_the_state(hub: LoopbackHub, retriever_folder: Path) -> None:
    def cut(request: str) -> None:
        if "/resolve/" in request:
            raise ConnectionResetError

    hub.before_request = cut
    with pytest.raises(
        UserError, match=r"org/x is at \w{10}, but the download was not verified: run the same command again"
    ):
        publish(retriever_folder, Destination("org/x"))
    hub.before_request = lambda request: None
    publish(retriever_folder, Destination("org/x"))
    assert len(hub.repositories["org/x"].messages) == 2


def test_no_repository_is_created_after_errors(hub: LoopbackHub, retriever_folder: Path, tmp_path: Path) -> None:
    for name, text in {
        "broken.md": "---\nlicense: [mit\n---\n",
        "open.md": "---\nlicense: mit\n\n# A model\n",
        "licence.md": "---\nlicense: mine\n---\n",
        "base.md": "---\nbase_model: ../runs/checkpoint-10\n---\n",
        "language.md": "---\nlanguage: no\n---\n",
        "index.md": "---\nmodel-index: 5\n---\n",
        "list.md": "---\n- mit\n---\n",
    }.items():
        folder = tmp_path / name.removesuffix(".md")
        shutil.copytree(retriever_folder, folder)
        (folder / "README.md").write_text(text)
        with pytest.raises(UserError, match="README.md"):
            publish(folder, Destination("org/x"))
    for destination in (Destination("other/x"), Destination("org/x", revision="main", tag="v1")):
        if destination.repo_id == "other/x":
            with pytest.raises(UserError, match="no write access"):
                publish(retriever_folder, destination)
    with pytest.raises(UserError, match="valid name in git"):
        Destination("org/x", tag="v 1")
    assert hub.repositories == {}


def test_only_model_files_are_published(hub: LoopbackHub, retriever_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-7"
    shutil.copytree(retriever_folder, folder)
    skipped = ["optimizer.pt", "rng_state.pth", "training_args.bin", "trainer_state.json", "notes.ipynb", "train.jsonl",
             "runs/events.out.tfevents.1", "checkpoint-3/model.safetensors", "stray.py", ".env", "1_Pooling/log.csv"]  # fmt: skip
    for name in skipped:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"hf_" + b"a" * 34)
    (folder / "LICENSE").write_text("MIT")
    (folder / "README.md").write_text("# M\n![map](map.png)\n")
    (folder / "map.png").write_bytes(b"png")
    published = publish(folder, Destination("org/x"))
    assert sorted(published.skipped) == sorted(skipped)
    there = set(hub.repositories["org/x"].files("main")) - {".gitattributes"}
    assert there == set(published.files) == {
        *(f.relative_to(retriever_folder).as_posix() for f in retriever_folder.rglob("*") if f.is_file()),
        "LICENSE", "README.md", "map.png",
    }  # fmt: skip
    assert upload.check(folder)[0] == Check(
        "contents", False, "optimizer.pt and 2 more: pickles can run code when loaded; delete them"
    )


def test_the_card_names_the_published_model(retriever_folder: Path, tmp_path: Path) -> None:
    """Our card is written again with the new id; an edited card is kept."""
    folder = tmp_path / "embedder"
    shutil.copytree(retriever_folder, folder)
    result = Result("scifact/test", {"ndcg_at_10": 0.5}, dataset="mteb/scifact")
    write_card(folder, ModelCardMetadata(method=NVEMBED, results=(result,)))
    assert 'SentenceTransformer("embedder"' in (folder / "README.md").read_text()
    published = publish(folder, Destination("org/x"), dry_run=True, keep=tmp_path / "kept")
    card = (tmp_path / "kept" / "model" / "README.md").read_text()
    assert 'SentenceTransformer("org/x"' in card and "2405.17428" in card and '"embedder"' not in card
    assert ".eval_results/mteb__scifact-scifact_test.yaml" in published.files
    assert not any(name.startswith(".revela_hub") for name in published.files)
    (folder / "README.md").write_text("# My own words\n")
    publish(folder, Destination("org/x"), dry_run=True, keep=tmp_path / "again")
    assert (tmp_path / "again" / "model" / "README.md").read_text() == "# My own words\n"


@pytest.mark.parametrize("target", ["/etc/hostname", "absent", "vocab.txt", "..", "/etc"])
def test_symbolic_links_are_errors(retriever_folder: Path, tmp_path: Path, target: str) -> None:
    folder = tmp_path / "linked"
    shutil.copytree(retriever_folder, folder)
    (folder / "vocab.txt").symlink_to(target)
    with pytest.raises(UserError, match=r"vocab.txt (links to|is a broken symbolic link)"):
        publish(folder, Destination("org/x"), dry_run=True)
    assert not upload.check(folder)[0].ok
