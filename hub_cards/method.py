"""Record of a training method, read by the command line, cards, `check`, `export` and `publish`.

Each method defines its record in `trainers/<method>/__init__.py`, and `trainers/methods.py` lists all records. A record holds
plain values and the names of functions and files, so importing it does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from revela_hub.hub_cards.contents import read_json

Part = str
"""A publishable part of a checkpoint: `retriever`, `sparse` (its sparse form), `lm`, or `model` (everything, with its code)."""


@dataclass(frozen=True)
class Paper:
    """A paper, as cited in model cards.

    Attributes:
        title: title.
        authors: full names, joined by " and ".
        arxiv: arXiv id.
        year: year of the publication, or of the first version on arXiv.
        does: completes the sentence "A retriever that was ...".
        venue: proceedings in which it was published; empty for one on arXiv only.
    """

    title: str
    authors: str
    arxiv: str
    year: int
    does: str
    venue: str = ""

    @property
    def bibtex(self) -> str:
        """The BibTeX entry."""
        word = self.title.split()[0].lower().strip(":").replace("-", "")
        key = f"{self.authors.partition(' and ')[0].split()[-1].lower()}{self.year}{word}"
        kind, place, note = "article", f"journal = {{arXiv preprint arXiv:{self.arxiv}}}", ""
        if self.venue:
            kind, place = "inproceedings", f"booktitle = {{{self.venue}}}"
            note = f",\n  note = {{arXiv:{self.arxiv}}}"
        return (
            f"@{kind}{{{key},\n  title = {{{self.title}}},\n  author = {{{self.authors}}},\n"
            f"  {place},\n  year = {{{self.year}}}{note}\n}}"
        )


@dataclass(frozen=True)
class Command:
    """A command: the full name of its module, which defines `Arguments` and `run`, and a line for the list of commands."""

    module: str
    summary: str


@dataclass(frozen=True)
class Method:
    """A training method.

    Attributes:
        name: key in `METHODS` and in model cards.
        title: display name.
        paper: the paper to cite.
        commands: command name -> command; the first is the training command.
        model_type: `model_type` in the `config.json` of its checkpoints; empty if they are plain sentence-transformers folders.
        config_folder: subfolder of a checkpoint that holds that file.
        parts: publishable parts of a checkpoint, the default first.
        folders: folder that a run writes and gives a card -> part in it.
        checkpoint_files: names and patterns of other files and folders in a checkpoint, besides those of the libraries.
        loader: full name of the function that loads a checkpoint folder.
        assembler: full name of the function `(loaded, checkpoint, folder, assembly) -> Assembled`, which writes one part of
            the loader's return value.
        usage: Jinja template of the card's usage section, for parts that sentence-transformers does not load.
        vectors: Python file that defines `vectors(model, tokenizer, kind, texts)` for `kind` query and document; used to check
            parts that sentence-transformers does not load. It runs in the verification process, so it may import torch but not
            this package.
        encoder: full name of the function `(folder, device) -> encoder`, if sentence-transformers cannot load the model. The
            encoder has a method `warnings() -> list[str]`.
        answerer: full name of the function `(model, index, *, num_passages, device) -> answerer`, if the model answers questions.
        models: training arguments that name a model to start from, the base model of the card first.
    """

    name: str
    title: str
    paper: Paper
    commands: Mapping[str, Command]
    model_type: str = ""
    config_folder: str = ""
    parts: tuple[Part, ...] = ("retriever",)
    folders: Mapping[str, Part] = field(default_factory=lambda: MappingProxyType({"retriever": "retriever"}))
    checkpoint_files: tuple[str, ...] = ()
    loader: str = ""
    assembler: str = ""
    usage: Path | None = None
    vectors: Path | None = None
    encoder: str = ""
    answerer: str = ""
    models: tuple[str, ...] = ()


def vectors_of(folder: Path, methods: Mapping[str, Method]) -> Path | None:
    """Return the `Method.vectors` file for the `model_type` in a folder's config.json, if any."""
    kind = read_json(folder / "config.json", {}).get("model_type")
    return next((method.vectors for method in methods.values() if kind and method.model_type == kind), None)
