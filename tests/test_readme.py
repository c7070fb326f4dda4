"""The examples in the READMEs run unchanged, on tiny models and a few files; the parser accepts every command."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from revela_hub.cli import main as cli
from revela_hub.cli.parser import build_arguments


def test_python_of_the_readme(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    retriever_folder: Path,
) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    search, train, loaded, real, load = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ast.parse(train + loaded + real)  # its training takes a minute
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "heart.md").write_text("Vitamin D protects the heart.")
    (tmp_path / "outputs").mkdir()
    retriever_folder.rename(tmp_path / "outputs" / "docs")
    (tmp_path / "outputs" / "docs" / "hybrid.json").write_text('{"bm25_weight": 0.4, "token_weight": 0.5}')
    exec(compile(search, "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("docs/heart.md:1-1  Vitamin D protects the heart.\n")
    names: dict[str, object] = {}
    exec(compile(load.replace("my-name/my-retriever", "outputs/docs"), "README.md", "exec"), names)
    assert tuple(names["queries"].shape) == (1, 32)
    assert tuple(names["documents"].shape) == (2, 32)


ROOT = Path(__file__).resolve().parents[1]
FILES = [
    *("README.md", "CONTRIBUTING.md", "examples/*/README.md", "examples/**/*.yaml", "examples/**/*.py"),
    *("benchmarks/**/*.md", "benchmarks/**/*.py", "docs/*.md", "docs/guides/*.md", "docs/methods/*.md"),
]
PAGES = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for name in FILES for file in ROOT.glob(name)}
PAGES |= {name: importlib.import_module(row.module).__doc__ or "" for name, row in cli.COMMANDS.items()}


def lines(text: str, start: str) -> Iterator[str]:
    """The lines that begin with `start`, of code blocks, docstrings and comments, without what precedes the command."""
    for line in re.sub(r"\\\n[# ]*", " ", text).splitlines():
        if shown := re.match(rf"(?:# +|\$ +| *)(?:[A-Z_]+=\S+ )*({start}.*)", line):
            yield shown[1]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command that a page shows, after `revela-hub` or `-m revela_hub`."""
    for line in lines(text, r"(?:revela-hub|accelerate launch .*-m revela_hub) [a-z]"):
        if "COMMAND" not in line and not re.search(r" [a-z]+ \.\.\.$", line):  # options that are left out
            shown = re.split(r"revela[-_]hub ", line.partition(" < ")[0], maxsplit=1)[1]
            shown += '"' * (shown.count('"') % 2)  # a text of several lines
            yield shlex.split(re.sub(r"\$\w+", "0", shown.replace("$'", "'")), comments=True)


def bound(words: list[str]) -> dict[str, Any] | None:
    """Parse the words with the command's own parser; a text with spaces is a query or a prompt, and never a path."""
    name, rest = cli._command_name(words)
    values = cli.parser_of(name).read(rest)
    for option, value in (values or {}).items():
        swallowed = (
            [word for word in value if " " in word]
            if isinstance(value, list) and all(isinstance(word, str) for word in value)
            else []
        )
        assert not swallowed, f"--{option} takes {swallowed}: {shlex.join(words)}"
    if values is not None:  # and they go together
        command = importlib.import_module(cli.COMMANDS[name].module)
        build_arguments(command.Arguments, dict(values))
    return values


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_that_are_shown_are_read(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = list(commands(PAGES[page]))
    assert shown or not re.match(r"README|examples/.*README|[a-z -]+$", page)
    for words in shown:
        assert bound(words) is not None or words[0] == "quickstart"


def options(script: Path) -> set[str]:
    """The constants in calls of a script (`add_argument("--data")`), and its dataclasses' fields as options (HfArgumentParser)."""
    nodes = list(ast.walk(ast.parse(script.read_bytes())))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    known = {value.value for call in calls for value in call.args if isinstance(value, ast.Constant)}
    known |= {
        f"--{node.target.id}" for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    siblings = {script.with_name(f"{node.module}.py") for node in nodes if isinstance(node, ast.ImportFrom)}
    return known.union(*(options(sibling) for sibling in siblings if sibling.exists()))


@pytest.mark.parametrize("page", PAGES)
def test_the_scripts_that_are_shown_have_these_options(page: str) -> None:
    for line in lines(PAGES[page], r"python (?:benchmarks|examples|tests)/"):
        script, *words = shlex.split(line.removeprefix("python "), comments=True)
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options(ROOT / script), line
