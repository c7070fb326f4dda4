"""The messages that the troubleshooting page quotes are messages of the code, and its options exist."""

import ast
import re
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from revela_hub.cli import main as cli
from revela_hub.data.sources.report import counted

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SOURCES = ("src", "modeling", "data", "retrieval", "trainers", "evaluation", "hub_cards")
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| symptom")]
QUOTES = [quote for row in ROWS for quote in re.findall(r'"([^"]+)"', row[0])]


def text_of(node: ast.expr) -> str:
    """Return a string of the source, with a NUL for each value that is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    match node:
        case ast.FormattedValue(ast.Call(ast.Name("counted"), [_, ast.Constant(noun)])):
            return counted(0, str(noun))
    return "\0"


@pytest.fixture(scope="module")
def strings() -> list[str]:
    """All strings of the product but docstrings."""
    found = []
    for file in (file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in bare:
                found.append(text_of(node))
    return found


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_one_of_the_code(quote: str, strings: list[str]) -> None:
    parts = [part.strip() for part in quote.split("...") if part.strip()]
    assert len("".join(parts)) > 10
    message = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    assert any(message.search(string) for string in strings)


def test_there_are_quotes_and_rows() -> None:
    assert len(QUOTES) > 20
    assert all(len(row) == 3 for row in ROWS)


def test_the_options_exist() -> None:
    options = {option for name in cli.COMMANDS for option in cli.parser_of(name)._option_string_actions}
    fixes = " ".join(cell for row in ROWS for cell in row[1:])
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", fixes)) - {"--local-dir"}  # of `hf download`
    newer = {"--activation_checkpointing"} if Version(transformers.__version__) < Version("5.23") else set()
    assert named - options - newer - {"--version"} == set()
