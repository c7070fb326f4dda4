"""`revela-hub check --against`: evaluation queries in training text."""

import json
from pathlib import Path

import pytest

from revela_hub.cli.main import main

LEAKED = "does vitamin c prevent the common cold"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.jsonl"
    rows = [{"_id": "a", "text": f"Asked often: {LEAKED}?"}, {"_id": "b", "text": "Rivers bend."}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(*words: object) -> int:
    try:
        return main(["check", *map(str, words)])
    except SystemExit as end:
        return int(end.code or 0)


def test_queries_in_the_text_are_counted(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queries = tmp_path / "queries.txt"
    queries.write_text(f"{LEAKED}\nwhy is the sea salty and blue\n")
    assert run("--data", text, "--against", queries) == 1
    out = capsys.readouterr().out
    assert "2 queries, 2 documents of training text" in out
    assert "50.0%" in out and LEAKED in out
    assert run("--data", text, "--against", queries, "--json") == 1
    assert json.loads(capsys.readouterr().out)["matches"][0]["document"] == "a"


def test_text_that_was_held_out_does_not_count(text: Path, tmp_path: Path) -> None:
    queries = tmp_path / "queries.txt"
    queries.write_text(f"{LEAKED}\n")
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"document": "a", "text": LEAKED}) + "\n")
    assert run("--data", text, "--against", queries, "--held_out", tmp_path) == 0


def test_text_that_was_not_read_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, queries = tmp_path / "text", tmp_path / "queries.txt"
    folder.mkdir()
    queries.write_text(f"{LEAKED}\n")
    (folder / "a.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "b.bin").write_bytes(b"\0")
    (folder / "c.txt").write_text(LEAKED)
    assert run("--data", folder, "--against", queries, "--exclude", "c.*") == 0
    assert capsys.readouterr().err == "skipped: 1 binary (.bin 1), 1 excluded; 1 file had invalid UTF-8 (replaced)\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a model folder or Hub id, or compare training text"),
        (["--against", "queries.txt"], "--against needs the training text: pass it with --data PATH"),
        (["model", "--against", "queries.txt", "--data", "x"], "leave out model"),
        (["model", "--data", "x"], "give these with --against"),
        (["bm25"], "bm25 is not a model folder, so there is nothing to check"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
