"""The records of the methods: all that they name exists, and no other file names a method, in its code, comments or messages."""

import importlib
import re
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name

import pytest

from revela_hub.cli.main import COMMANDS
from revela_hub.hub_cards.method import Method
from revela_hub.trainers.methods import METHODS

REPOSITORY = Path(__file__).resolve().parents[1]
NAMES = {
    **{name: name.replace("_", "[-_ ]?") for name in METHODS},
    "revela": r"revela(?![-_]?hub)",  # the package has its name from it
    "nvembed": "nv[-_ ]?embed",
    "ra_it": r"\bra[-_ ]?it\b",
    "ra_dit": r"\bra[-_ ]?dit",
}
# A paper that is cited, and an existing command, such as `revela-hub train pairs`.
CITATION = re.compile(r"arXiv|section|equation|Revela's (paper|authors)")
COMMAND = re.compile(r"\btrain (?P<name>[\w-]+)")
# Files outside a method's folder that may name methods, with the reason.
EXCEPTIONS = {
    "trainers/methods.py": "the list",
    "trainers/__init__.pyi": "public names",
    "src/revela_hub/__init__.pyi": "public names",
    "modeling/__init__.py": "public names",
    "src/revela_hub/cli/commands/quickstart.py": "a demonstration of two methods",
    "src/revela_hub/cli/commands/adapt.py": "tries several methods and keeps the best",
    "src/revela_hub/adaptation/adapt.py": "as above",
    "hub_cards/peft_adapters.py": "a bare adapter becomes a retriever with Revela's pooling and prompts",
    "src/revela_hub/cli/commands/export.py": "as above",
    "retrieval/encoder.py": "as above: the error that names the command",
    "src/revela_hub/adaptation/candidates.py": "as above",
    "trainers/baselines/": "RA-IT and RA-DIT are compared with ImpRAG on its data, with its layers",
}
# The parts of a method's model that do not have its name.
MODELING = {
    "expert_encoders": "cot_mote",
    "in_batch_attention": "revela",
    "passage_attention": "imprag",
    "reading_decoder": "imprag",
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_what_a_record_names_exists(method: Method) -> None:
    for name in (method.assembler, method.encoder, method.answerer):
        assert not name or resolve_name(name)
    for file in (method.usage, method.vectors):
        assert file is None or file.is_file()
    for command in method.commands.values():
        module = importlib.import_module(command.module)
        assert module.__doc__ and module.Arguments and module.run
    training = next(iter(method.commands.values()))
    arguments = {entry.name for entry in fields(importlib.import_module(training.module).Arguments)}
    assert method.models and {*method.models} <= arguments
    assert set(method.folders.values()) <= set(method.parts)
    assert method.paper.arxiv in method.paper.bibtex
    assert method.paper.bibtex.startswith("@inproceedings{" if method.paper.venue else "@article{")


def named(text: str) -> set[str]:
    """Return the methods that a line names, other than as a paper or a command."""
    if CITATION.search(text):
        return set()
    text = COMMAND.sub(lambda found: "" if f"train {found['name']}" in COMMANDS else found[0], text)
    return {method for method, pattern in NAMES.items() if re.search(pattern, text, re.IGNORECASE)}


def own(method: str, file: str) -> bool:
    """Whether a file is one of the method's three places, or may name it."""
    folder = METHODS[method].commands[next(iter(METHODS[method].commands))].module.split(".")[2]
    if file.startswith("modeling/"):
        part = Path(file).stem
        return method in (MODELING.get(part), part.partition("_")[2]) or file in EXCEPTIONS
    return file.startswith((f"trainers/{folder}/", *EXCEPTIONS))


def test_nobody_else_names_a_method() -> None:
    folders = ("src", "data", "retrieval", "trainers", "evaluation", "hub_cards", "modeling")
    files = [file for folder in folders for file in sorted((REPOSITORY / folder).rglob("*.*"))]
    files = [file for file in files if file.suffix in (".py", ".pyi", ".j2", ".yaml")]
    assert len(files) > 100
    found = [
        f"{name}:{number} names {method}"
        for file in files
        for name in [str(file.relative_to(REPOSITORY))]
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        for method in sorted(named(text))
        if not own(method, name)
    ]
    assert found == []
