"""`publish --space` with the real client to a local Hub, and the program of the Space."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapt_report import adapt_report
from loopback_hub import LoopbackHub, Repository

from revela_hub import __version__
from revela_hub.cli import main as cli
from revela_hub.cli.commands.demo import Arguments
from revela_hub.demo.space import space_files
from revela_hub.errors import UserError
from revela_hub.hub_cards import Check, upload


@pytest.fixture(autouse=True)
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the verification of the model, which needs a separate process."""
    monkeypatch.setattr(upload, "verify", lambda *args, **options: [Check("all", True, "not looked at")])


@pytest.fixture
def adapted(tmp_path: Path, retriever_folder: Path) -> Path:
    """The output folder of an adaptation; its report and its probe stay here."""
    folder = tmp_path / "adapted"
    (folder / "work" / "probe").mkdir(parents=True)
    (folder / "retriever").symlink_to(retriever_folder)
    (retriever_folder / "hybrid.json").write_text(json.dumps(adapt_report()))
    (folder / "adapt.json").write_text(json.dumps({"settings": {"labels": "secret-labels.jsonl"}}))
    (folder / "work" / "probe" / "corpus.jsonl").write_text('{"text": "a private passage"}\n')
    (folder / "work" / "probe" / "queries.jsonl").write_text('{"text": "a private query"}\n')
    return folder


def arguments_of(app: str) -> Arguments:
    """The arguments that app.py passes to `revela-hub demo`."""
    call = ast.parse(app).body[-1].value.args[0]  # type: ignore[attr-defined]
    return Arguments(**{word.arg: ast.literal_eval(word.value) for word in call.keywords})


def metadata_of(readme: str) -> dict[str, Any]:
    return yaml.safe_load(readme.split("---\n")[1])


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A text to search."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "rivers.md").write_text("Rivers reach the sea. Täglich.\n")
    return str(tmp_path / "docs")


def test_the_files(adapted: Path, text: str, tmp_path: Path) -> None:
    (tmp_path / "queries.txt").write_text("where?\nwhere?\nwho?\n")
    files = space_files("org/x", [text], str(tmp_path / "queries.txt"), trust_remote_code=True)
    assert list(files) == ["README.md", "app.py", "requirements.txt", "sample.jsonl", "queries.txt"]
    assert arguments_of(files["app.py"]) == Arguments(
        model="org/x",
        corpus=["sample.jsonl"],
        example_queries="queries.txt",
        trust_remote_code=True,
        host="0.0.0.0",
        port=7860,
    )
    metadata = metadata_of(files["README.md"])
    assert metadata["sdk"] == "gradio" and metadata["app_file"] == "app.py" and metadata["models"] == ["org/x"]
    assert metadata["sdk_version"].split(".")[0] == "6" and len(metadata["short_description"]) <= 60
    assert f"revela-hub[demo]=={__version__}" in files["requirements.txt"].splitlines()
    assert json.loads(files["sample.jsonl"]) == {"_id": "rivers.md", "text": "Rivers reach the sea. Täglich."}
    assert files["queries.txt"] == "where?\nwho?\n"
    everything = "".join(files.values())
    for private in (str(adapted.parent), "/tmp", "secret-labels", "private", "hf_"):
        assert private not in everything
    (tmp_path / "docs" / "rivers.md").write_text("word. " * 120 * 2100)
    with pytest.raises(UserError, match="passages"):
        space_files("org/x", [text])


def test_the_space_is_published_with_its_model(
    adapted: Path, text: str, hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["publish", str(adapted), "org/x", "--space", "--space_corpus", text]) == 0
    assert f"demo: {hub.endpoint}/spaces/org/x" in capsys.readouterr().out
    assert set(hub.repositories) == {"org/x", "spaces/org/x"}
    model = hub.repositories["org/x"].files("main") or {}
    assert json.loads(model["hybrid.json"])["bm25_weight"] == 0.2 and b"adapt.json" not in model["README.md"]
    files = hub.repositories["spaces/org/x"].files("main")
    assert files is not None
    written = {name: content.decode() for name, content in files.items() if name != ".gitattributes"}
    assert written == space_files("org/x", [text])
    requests = [request for request in hub.requests if request.startswith("POST") and "/commit/" in request]
    assert requests == ["POST /api/spaces/org/x/commit/main", "POST /api/models/org/x/commit/main"]
    count = len(hub.repositories["spaces/org/x"].messages)
    assert cli.main(["publish", str(adapted), "org/x", "--space", "--space_corpus", text, "--update"]) == 0
    assert len(hub.repositories["spaces/org/x"].messages) == count, "nothing has changed"


def test_private_text_is_not_uploaded_to_a_public_space(
    adapted: Path, text: str, hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["publish", str(adapted), "org/x", "--space", "--space_corpus", text, "--private"]
    assert cli.main(command) == 0
    space = hub.repositories["spaces/org/x"]
    assert space.private and "add a secret HF_TOKEN" in capsys.readouterr().out
    count, space.private = len(space.messages), False
    assert cli.main([*command, "--update"]) == 2
    assert "is public" in capsys.readouterr().err
    assert len(space.messages) == count


def test_the_space_of_somebody_else_is_kept(adapted: Path, text: str, hub: LoopbackHub) -> None:
    other = hub.repositories["spaces/org/x"] = Repository()
    other.commit("main", {"app.py": b"print(1)"}, "My own app")
    assert cli.main(["publish", str(adapted), "org/x", "--space", "--space_corpus", text]) == 2
    assert set(hub.repositories) == {"spaces/org/x"}, "the model was not published"
    assert cli.main(["publish", str(adapted), "org/x", "--space", "--space_corpus", text, "--update"]) == 0
    assert b"revela_hub" in (other.files("main") or {})["app.py"]


@pytest.mark.parametrize("kind", ["spaces", "models"])
def test_the_same_command_resumes_an_upload_that_stopped(kind: str, adapted: Path, text: str, hub: LoopbackHub) -> None:
    def stop(request: str) -> None:
        if request == f"POST /api/{kind}/org/x/commit/main":
            hub.before_request = lambda request: None
            raise ConnectionError

    hub.before_request = stop
    command = ["publish", str(adapted), "org/x", "--space", "--space_corpus", text]
    assert cli.main(command) != 0 and cli.main(command) == 0  # was: the second time needed --update
    assert "app.py" in (hub.repositories["spaces/org/x"].files("main") or {})
    assert "config.json" in (hub.repositories["org/x"].files("main") or {})


def test_an_unchanged_base_model_is_published_if_its_settings_bring_a_gain(
    adapted: Path, text: str, hub: LoopbackHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verdict, status in (("NO DIFFERENCE", 2), ("BETTER", 0)):
        (adapted / "retriever" / "hybrid.json").write_text(json.dumps(adapt_report(verdict, trained=False)))
        assert cli.main(["publish", str(adapted), "org/x", "--dry_run"]) == status
    assert "+0.050 [+0.030, +0.070], not significant with 182" in capsys.readouterr().err and not hub.repositories
    assert cli.main(["publish", str(adapted), "org/x"]) == 0
    capsys.readouterr()
    found = []
    for words in ([str(adapted)], ["org/x"], ["org/x", "--mode", "dense"]):  # the settings travel
        assert cli.main(["search", *words, "the sea", "--corpus", text, "--cache_dir", str(tmp_path / "cache")]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != found[2]
