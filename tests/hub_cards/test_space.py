"""`publish --space` with the real client to a local Hub, and the program of the Space."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapt_report import adapt_report
from loopback_hub import READER, LoopbackHub, Repository

from revela_hub import __version__
from revela_hub.cli import main as cli
from revela_hub.cli.commands.demo import Arguments
from revela_hub.demo.space import publish_space, space_files
from revela_hub.errors import UserError
from revela_hub.hub_cards import Check, Destination, upload


@pytest.fixture(autouse=True)
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the verification of the model, which needs a separate process."""
    monkeypatch.setattr(upload, "verify", lambda *args, **options: [Check("all", True, "not looked at")])


@pytest.fixture
def adapted(tmp_path: Path, retriever_folder: Path) -> Path:
    """The output folder of an adaptation; its report has settings with names of local files."""
    folder = tmp_path / "adapted"
    (folder / "work" / "probe").mkdir(parents=True)
    (folder / "retriever").symlink_to(retriever_folder)
    report = adapt_report()
    report["settings"]["labels"] = "secret-labels.jsonl"
    (folder / "adapt.json").write_text(json.dumps(report))
    (folder / "settings.json").write_text(json.dumps({"retriever": "sentence-transformers/all-MiniLM-L6-v2"}))
    (folder / "work" / "probe" / "corpus.jsonl").write_text('{"text": "a private passage"}\n')
    (folder / "work" / "probe" / "queries.jsonl").write_text('{"text": "a private query"}\n')
    return folder


def arguments_of(app: str) -> Arguments:
    """The arguments that app.py passes to `revela-hub demo`."""
    call = ast.parse(app).body[-1].value.args[0]  # type: ignore[attr-defined]
    return Arguments(**{word.arg: ast.literal_eval(word.value) for word in call.keywords})


def metadata_of(readme: str) -> dict[str, Any]:
    return yaml.safe_load(readme.split("---\n")[1])


def test_the_files_of_an_adaptation(adapted: Path) -> None:
    files = space_files("org/x", adapted)
    assert list(files) == ["README.md", "app.py", "requirements.txt", "adapt.json"]
    base = "sentence-transformers/all-MiniLM-L6-v2"
    assert arguments_of(files["app.py"]) == Arguments(
        model="org/x", report="adapt.json", base=base, host="0.0.0.0", port=7860
    )
    metadata = metadata_of(files["README.md"])
    assert metadata["sdk"] == "gradio" and metadata["app_file"] == "app.py"
    assert metadata["models"] == ["org/x", base]
    assert metadata["sdk_version"].split(".")[0] == "6"
    assert len(metadata["short_description"]) <= 60
    assert f"revela-hub[demo]=={__version__}" in files["requirements.txt"].splitlines()
    everything = "".join(files.values())
    for private in (str(adapted.parent), "/tmp", "secret-labels", "private", "hf_"):
        assert private not in everything
    assert json.loads(files["adapt.json"])["settings"] == {"budget": "6m"}


def test_the_files_of_another_retriever(retriever_folder: Path) -> None:
    files = space_files("org/x", retriever_folder, package="git+https://example.org/revela-hub")
    assert list(files) == ["README.md", "app.py", "requirements.txt"]
    assert arguments_of(files["app.py"]) == Arguments(model="org/x", host="0.0.0.0", port=7860)
    assert files["requirements.txt"].endswith("\ngit+https://example.org/revela-hub\n")
    files = space_files("org/x", retriever_folder, trust_remote_code=True)
    assert arguments_of(files["app.py"]).trust_remote_code is True


@pytest.mark.parametrize("base", ["/home/me/base", "./base", "~/base", "a/b/c", None])
def test_a_base_model_on_this_machine_is_left_out(adapted: Path, base: str | None) -> None:
    (adapted / "settings.json").write_text(json.dumps({"retriever": base}))
    files = space_files("org/x", adapted)
    assert arguments_of(files["app.py"]).base is None
    assert metadata_of(files["README.md"])["models"] == ["org/x"]


def test_text_and_queries_that_are_given(adapted: Path, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "rivers.md").write_text("Rivers reach the sea. Täglich.\n")
    (tmp_path / "queries.txt").write_text("where?\nwhere?\nwho?\n")
    given = ("org/x", adapted, [str(tmp_path / "docs")], str(tmp_path / "queries.txt"))
    files = space_files(*given)
    assert json.loads(files["sample.jsonl"]) == {"_id": "rivers.md", "text": "Rivers reach the sea. Täglich."}
    assert files["queries.txt"] == "where?\nwho?\n"
    options = arguments_of(files["app.py"])
    assert (options.corpus, options.example_queries) == (["sample.jsonl"], "queries.txt")
    (tmp_path / "docs" / "rivers.md").write_text("word. " * 120 * 2100)
    with pytest.raises(UserError, match=r"--space_corpus has .* passages, more than 2,000"):
        space_files(*given)


def test_a_dry_run_prints_the_files(adapted: Path, hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["publish", str(adapted), "org/x", "--space", "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "files of the Space:" in out and "requirements.txt" in out and 'model="org/x"' in out
    assert "nothing was uploaded to org/x" in out
    assert hub.repositories == {}


def test_the_space_is_published_after_its_model(
    adapted: Path, hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["publish", str(adapted), "org/x", "--space"]) == 0
    assert f"demo: {hub.endpoint}/spaces/org/x" in capsys.readouterr().out
    assert set(hub.repositories) == {"org/x", "spaces/org/x"}
    files = hub.repositories["spaces/org/x"].files("main")
    assert files is not None
    assert {name: content.decode() for name, content in files.items() if name != ".gitattributes"} == space_files(
        "org/x", adapted
    )
    requests = [request for request in hub.requests if request.startswith("POST") and "/commit/" in request]
    assert requests == ["POST /api/models/org/x/commit/main", "POST /api/spaces/org/x/commit/main"]
    # The same command again changes nothing.
    assert cli.main(["publish", str(adapted), "org/x", "--space"]) == 0
    assert hub.repositories["spaces/org/x"].files("main") == files


def test_texts_that_are_no_longer_given_are_deleted(
    adapted: Path, hub: LoopbackHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rivers.md").write_text("Private rivers reach the sea.\n")
    (tmp_path / "q.txt").write_text("where?\n")
    texts = ["--space_corpus", str(tmp_path / "rivers.md"), "--space_queries", str(tmp_path / "q.txt")]
    assert cli.main(["publish", str(adapted), "org/x", "--space", *texts]) == 0
    space = hub.repositories["spaces/org/x"]
    files = dict(space.files("main") or {})
    assert {"sample.jsonl", "queries.txt", "adapt.json"} < files.keys()
    space.commit("main", files | {"logo.png": b"of the user"}, "manually")
    assert cli.main(["publish", str(adapted), "org/x", "--space", "--update"]) == 0
    printed = capsys.readouterr().out
    for name in ("sample.jsonl", "queries.txt"):
        assert f"the Space org/x: deleting {name} of the previous page" in printed
    now = space.files("main") or {}
    assert files.keys() - now.keys() == {"sample.jsonl", "queries.txt"} and "logo.png" in now


def test_a_private_space(adapted: Path, hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["publish", str(adapted), "org/x", "--space", "--private"]) == 0
    assert hub.repositories["spaces/org/x"].private
    assert "add a secret HF_TOKEN" in capsys.readouterr().out


def test_private_text_is_not_uploaded_to_a_public_space(
    adapted: Path, hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["publish", str(adapted), "org/x", "--space"]) == 0
    space = hub.repositories["spaces/org/x"]
    count = len(space.messages)
    hub.repositories["org/x"].private = True
    assert cli.main(["publish", str(adapted), "org/x", "--space", "--private", "--update"]) == 2
    assert "the Space org/x is public already, which --private cannot change" in capsys.readouterr().err
    assert len(space.messages) == count
    space.private = True
    assert cli.main(["publish", str(adapted), "org/x", "--space", "--private", "--update"]) == 0


def test_the_space_of_somebody_else_is_kept(
    adapted: Path, hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    other = hub.repositories["spaces/org/x"] = Repository()
    other.commit("main", {"app.py": b"print()"}, "initial commit")
    other.commit("main", {"app.py": b"print(1)"}, "My own app")
    assert cli.main(["publish", str(adapted), "org/x", "--space"]) == 2
    assert "the Space org/x exists already, and was not made by revela-hub" in capsys.readouterr().err
    assert set(hub.repositories) == {"spaces/org/x"}, "the model was not published"
    assert cli.main(["publish", str(adapted), "org/x", "--space", "--update"]) == 0
    assert b"revela_hub" in (other.files("main") or {})["app.py"]


def test_an_upload_that_stopped_is_resumed(adapted: Path, hub: LoopbackHub) -> None:
    def stop(request: str) -> None:
        if request == "POST /api/spaces/org/x/commit/main":
            hub.before_request = lambda request: None
            raise ConnectionError

    hub.before_request = stop
    cli.main(["publish", str(adapted), "org/x", "--space"])
    assert cli.main(["publish", str(adapted), "org/x", "--space"]) == 0
    assert "app.py" in (hub.repositories["spaces/org/x"].files("main") or {})


def test_without_write_access(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(UserError, match="no write access to the Space org/x"):
        publish_space({"app.py": ""}, Destination("org/x"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--space_corpus docs", "--space_corpus requires --space"),
        ("--space_queries q.txt", "--space_queries requires --space"),
        ("--space_package x", "--space_package requires --space"),
        ("--space --revision next", "--space shows the model of the main branch"),
        ("--space --pull_request", "--space shows the model of the main branch"),
        ("--space --part lm", "--space has no page for the part lm"),
        ("--space --space_corpus nowhere", "nowhere"),
        ("--space --space_queries nowhere", "no file nowhere"),
    ],
)
def test_mistakes(retriever_folder: Path, words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["publish", str(retriever_folder), "org/x", "--dry_run", *words.split()]) == 2
    assert told in capsys.readouterr().err
