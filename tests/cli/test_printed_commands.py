"""The next commands that commands print are parsed by the command that they name, and the cheap ones are run."""

import ast
import importlib
import re
import shlex
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from parsed_arguments import parse_arguments

from revela_hub.cli import main as cli

TEXT = "--data text"
TRAINED = {
    "train revela": f"--retriever r --lm l {TEXT}",
    "train contriever": f"--retriever r {TEXT} --trust_remote_code true",
    "train replug": f"--retriever r --lm l {TEXT}",
    "train nvembed": "--backbone b --mixture m.yaml --stage 1",
    "train retromae": f"--encoder e {TEXT}",
    "train cot-mote": f"--encoder e {TEXT}",
    "train imprag": "--backbone b --data q.jsonl --corpus docs 'more docs'",
    "train ra-it": "--backbone b --data q.jsonl --corpus docs",
    "train ra-dit": "--reader m --retriever r --data q.jsonl --corpus docs 'more docs'",
}


def printed(out: str) -> list[list[str]]:
    """The words of each command in the output, after `revela-hub`."""
    return [shlex.split(line.split("revela-hub ", 1)[1]) for line in out.splitlines() if "revela-hub " in line]


def read(words: list[str]) -> dict[str, Any]:
    """Parse a printed command. A text with spaces may only be in a list of paths."""
    name, rest = cli._command_name(words)
    values = cli.parser_of(name).read(rest)
    assert values is not None
    return values


@pytest.mark.parametrize("name", TRAINED)
def test_what_a_training_run_prints_at_its_end(
    name: str,
    tmp_path: Path,
    retriever_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = importlib.import_module(cli.COMMANDS[name].module)
    words = [*shlex.split(TRAINED[name]), "--output_dir", "my runs/one", "--report_to", "none", "--use_cpu", "true"]
    arguments = parse_arguments(command.Arguments, words, program=name)
    assert arguments is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "train", lambda *_: Path("my runs/one"))
    command.run(arguments)
    shown = printed(capsys.readouterr().out)
    assert shown or name == "train retromae"
    for given in shown:
        values = read(given)
        assert values.get("query") in (None, "your query")
        assert values.get("prompt") in (None, "your prompt")
        assert values.get("corpus") in (None, ["PATH"], ["docs", "more docs"])
    if shown and shown[0][0] == "search":
        shutil.copytree(retriever_folder, shown[0][1])
        (tmp_path / "PATH").write_text("Rivers carry sediment to the sea.")
        assert cli.main([*shown[0], "--cache-dir", "cache"]) == 0
        assert "PATH:1-1" in capsys.readouterr().out


def test_what_adapt_prints_at_its_end(
    tmp_path: Path, retriever_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from revela_hub.cli.commands import adapt

    monkeypatch.chdir(tmp_path)
    output = Path("my output")
    adapt.print_commands(adapt.Arguments(data=["my code"], exclude=["vendor/"], kind="code", output_dir="my output"))
    search, publish = printed(capsys.readouterr().out)
    given = read(search)
    assert (given["corpus"], given["exclude"], given["kind"]) == (["my code"], ["vendor/"], "code")
    assert read(publish)["checkpoint"] == "my output"
    shutil.copytree(retriever_folder, output / "retriever")
    (output / "retriever" / "hybrid.json").write_text('{"bm25_weight": 0.3}')
    Path("my code").mkdir()
    Path("my code/dates.py").write_text("def parse(text):\n    return date(text)\n")
    assert cli.main([*search, "--cache-dir", "cache"]) == 0
    assert "dates.py:1-2" in capsys.readouterr().out
    assert cli.main([*publish, "--dry_run"]) == 0
    assert "nothing was uploaded to OWNER/NAME" in capsys.readouterr().out


@cache
def known(command: str) -> set[str]:
    """The options of a command as its help text shows them: neither old names nor dashes."""
    return set(cli.parser_of(command)._option_string_actions)


def test_the_commands_in_messages_are_known_with_these_options() -> None:
    """Of every text in the sources that names a command: `revela-hub publish X --dry-run`."""
    root = Path(__file__).resolve().parents[2]
    folders = ("src", "data", "retrieval", "evaluation", "hub_cards", "trainers", "modeling")
    names = "|".join(sorted(cli.COMMANDS, key=len, reverse=True))
    seen = 0
    for file in (file for folder in folders for file in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.Constant | ast.JoinedStr):
                continue
            parts = [part.value for part in getattr(node, "values", [node])]
            text = "".join(part if isinstance(part, str) else "X" for part in parts)
            for command, rest in re.findall(rf"revela-hub ({names})\b((?: [^`()\n;,]+)?)", text):
                seen += 1
                options = set(re.findall(r"(?<!\S)--[a-z][\w-]*", rest))
                assert not options or options <= known(command), f"{file}: revela-hub {command}{rest}"
    assert seen > 20
