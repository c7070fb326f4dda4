"""The record of a method: what the command line, cards, checks, export and publishing need to know about it.

Each method keeps its record in `trainers/<method>/__init__.py`; `trainers/methods.py` lists them. Records hold plain values, and
names of functions and files, so that reading them imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from revela_hub.hub_cards.verify.contents import read_json

Part = str
"""What can be published of a checkpoint: `retriever`, `sparse` (its sparse form), `lm`, or `model` (all of it with its code)."""


@dataclass(frozen=True)
class Paper:
    """A paper, as a card cites it.

    Attributes:
        title: of the paper.
        authors: full names, joined by " and ".
        arxiv: id.
        year: of the first version.
        does: completes "a retriever that was ...".
    """

    title: str
    authors: str
    arxiv: str
    year: int
    does: str

    @property
    def bibtex(self) -> str:
        """The BibTeX entry."""
        word = self.title.split()[0].lower().strip(":").replace("-", "")
        key = f"{self.authors.partition(' and ')[0].split()[-1].lower()}{self.year}{word}"
        return (
            f"@article{{{key},\n  title = {{{self.title}}},\n  author = {{{self.authors}}},\n"
            f"  journal = {{arXiv preprint arXiv:{self.arxiv}}},\n  year = {{{self.year}}}\n}}"
        )


@dataclass(frozen=True)
class Command:
    """A command of the method.

    Attributes:
        module: full name of the module with `Arguments` and `run`.
        summary: one line for the list of commands.
    """

    module: str
    summary: str


@dataclass(frozen=True)
class Method:
    """A method of the package.

    Attributes:
        name: key in `METHODS` and in model cards.
        title: name for people.
        paper: the paper.
        commands: name -> command.
        model_type: of the `config.json` of its checkpoints; empty if they are plain sentence-transformers folders.
        config_folder: subfolder of a checkpoint that holds that file.
        parts: what can be published of a checkpoint, the default first.
        folders: folder that `export` writes -> the part in it.
        loader: full name of the function that loads a checkpoint's folder.
        assembler: full name of the function `(loaded, checkpoint, folder, assembly) -> Assembled`, which writes a part of what
            the loader returned.
        adapter_only: whether the retriever's LoRA adapter can be published alone.
        usage: Jinja template of the card's section on usage, for parts that sentence-transformers does not load.
        vectors: Python file with a function `vectors(model, tokenizer, kind, texts)` for `kind` query and document, for the
            check of parts that sentence-transformers does not load. It runs in the verifying process, so it imports torch
            and nothing of ours.
        encoder: full name of the function `(folder, device) -> encoder`, if sentence-transformers cannot encode with it. The
            encoder has a method `warnings() -> list[str]`.
        states: full name of the module with `check_states(encoder)` and `store_index_states(encoder, store, ...)`, if an index
            can store what the model reads of its passages.
        answerer: full name of the function `(model, index, *, k, device) -> answerer`, if the model answers questions.
        neutral_settings: arguments of its trainer that do not affect the trained weights.
    """

    name: str
    title: str
    paper: Paper
    commands: Mapping[str, Command]
    model_type: str = ""
    config_folder: str = ""
    parts: tuple[Part, ...] = ()
    folders: Mapping[str, Part] = field(default_factory=lambda: MappingProxyType({}))
    loader: str = ""
    assembler: str = ""
    adapter_only: bool = False
    usage: Path | None = None
    vectors: Path | None = None
    encoder: str = ""
    states: str = ""
    answerer: str = ""
    neutral_settings: frozenset[str] = frozenset()


def vectors_of(folder: Path, methods: Mapping[str, Method]) -> Path | None:
    """The file that makes the vectors of a model, by the `model_type` in its config.json; None for most models."""
    kind = read_json(folder / "config.json", {}).get("model_type")
    return next((method.vectors for method in methods.values() if kind and method.model_type == kind), None)
