"""The records of the methods: all that they name exists, no other file names a method, and a sixth method needs one folder."""

import ast
import importlib
import re
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name

import pytest

from revela_hub.hub_cards.method import Method
from revela_hub.trainers.methods import METHODS

REPOSITORY = Path(__file__).resolve().parents[1]
NAMES = {
    **{name: name.replace("_", "_?") for name in METHODS},
    "revela": r"revela(?![-_]?hub)",  # the package has its name from it
    "ra_it": r"\bra_?it\b",
    "ra_dit": r"\bra_?dit\b",
}
# Files outside a method's folder that may name it, with the reason.
EXCEPTIONS = {
    "trainers/methods.py": "the list",
    "src/revela_hub/cli/commands/quickstart.py": "a demonstration of two methods",
    "src/revela_hub/adaptation/": "tries several methods and keeps the best",
    "trainers/baselines/": "RA-IT and RA-DIT are compared with ImpRAG on its data, with its layers",
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_what_a_record_names_exists(method: Method) -> None:
    for name in (method.assembler, method.encoder, method.states, method.answerer):
        assert not name or resolve_name(name)
    for file in (method.usage, method.vectors):
        assert file is None or file.is_file()
    for command in method.commands.values():
        module = importlib.import_module(command.module)
        assert module.__doc__ and module.Arguments and module.run
    training = next(iter(method.commands.values()))
    arguments = {entry.name for entry in fields(importlib.import_module(training.module).Arguments)}
    assert method.models and {*method.models, *method.data, *method.files, *method.neutral_settings} <= arguments
    assert set(method.folders.values()) <= set(method.parts)
    assert method.paper.arxiv in method.paper.bibtex and method.paper.bibtex.startswith("@article{")


def words(tree: ast.Module) -> set[str]:
    """Return the names in the code of a module: identifiers, imports, and texts of one word; not its docstrings and messages."""
    found: set[str] = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname", "module"):
            if isinstance(value := getattr(node, field, None), str):
                found.add(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.-]+", node.value):
            found.add(node.value)
    return found


def own(method: str, file: str) -> bool:
    """Whether a file is one of the method's three places, or may name it."""
    folder = METHODS[method].commands[next(iter(METHODS[method].commands))].module.split(".")[2]
    return file.startswith((f"trainers/{folder}/", "modeling/", *EXCEPTIONS))


def test_nobody_else_names_a_method() -> None:
    folders = ("src", "data", "retrieval", "trainers", "evaluation", "hub_cards")
    files = [file for folder in folders for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    assert len(files) > 100
    found = [
        f"{file.relative_to(REPOSITORY)}: {word}"
        for file in files
        for word in sorted(words(ast.parse(file.read_text(encoding="utf-8"))))
        for method, pattern in NAMES.items()
        if re.search(pattern, word, re.IGNORECASE) and not own(method, str(file.relative_to(REPOSITORY)))
    ]
    assert found == []
