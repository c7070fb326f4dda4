"""The command line `revela-hub COMMAND ...`: finds the command's module, parses its arguments, reports mistakes.

A command is a module of `revela_hub.cli.commands` with a docstring (its help text), a dataclass `Arguments`, a function
`run(arguments)` and, where it takes arguments without a name, a tuple `POSITIONALS` of fields of that dataclass. Only
the module that is asked for is imported, so that help and mistakes answer at once.

Exit status: 0, 2 for a mistake of the user (one line on stderr, no traceback), 130 after Ctrl-C, 1 for anything else.
"""

import difflib
import importlib
import os
import sys
from typing import NamedTuple

from revela_hub import __version__
from revela_hub.errors import UserError

PROGRAM = "revela-hub"


class Command(NamedTuple):
    """A row of the table of commands."""

    module: str  # in revela_hub.cli.commands
    summary: str  # one line for the list of commands


COMMANDS = {
    "quickstart": Command(
        "quickstart", "raw text on this machine to a trained, measured retriever, in minutes on a CPU"
    ),
    "train revela": Command("train_revela", "learn a retriever from raw text or code with Revela"),
    "train retromae": Command("train_retromae", "pre-train an encoder for retrieval on raw text with RetroMAE"),
    "train nvembed": Command("train_nvembed", "train a generalist embedder from a decoder with NV-Embed"),
    "mine": Command("mine", "find hard negatives for pairs with a retriever or BM25"),
    "synthesize": Command("synthesize", "have a language model write training pairs for tasks"),
    "export": Command("export", "turn a training checkpoint into a sentence-transformers folder"),
    "evaluate": Command("evaluate", "measure a retriever, or BM25, on a retrieval task"),
    "search": Command("search", "find passages in your files with a retriever"),
    "check": Command("check", "verify that a model loads and embeds as its readers will expect"),
    "publish": Command("publish", "assemble, verify and upload a model to the Hugging Face Hub"),
}

# What a missing optional package means in terms of our extras.
EXTRA_OF_MODULE = {
    "bm25s": "eval",
    "Stemmer": "eval",
    "matplotlib": "eval",
    "pytrec_eval": "eval",
    "mteb": "mteb",
    "faiss": "search",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    Args:
        argv: the arguments after the program's name; those of the process when None.
    """
    try:
        _dispatch(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except UserError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF_MODULE:
            raise
        return _fail(f"this needs the package {package}: pip install '{PROGRAM}[{EXTRA_OF_MODULE[package]}]'")
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROGRAM}: interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`). Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _fail(message: str) -> int:
    sys.stderr.write(f"{PROGRAM}: error: {' '.join(message.split())}\n")
    return 2


def _dispatch(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return
    if argv[0] in ("-V", "--version"):
        sys.stdout.write(f"{PROGRAM} {__version__}\n")
        return
    name, rest = _command_name(argv)
    if not name:
        return
    # Here and not above: the parser and the commands import much that help and mistakes can do without.
    from revela_hub.cli.parser import parse_arguments

    module = importlib.import_module(f"revela_hub.cli.commands.{COMMANDS[name].module}")
    arguments = parse_arguments(
        module.Arguments,
        rest,
        program=f"{PROGRAM} {name}",
        description=module.__doc__ or COMMANDS[name].summary,
        positionals=getattr(module, "POSITIONALS", ()),
    )
    if arguments is not None:
        module.run(arguments)


def _command_name(argv: list[str]) -> tuple[str, list[str]]:
    """The command that `argv` names, of one word or two, and its arguments; an empty name if only help was asked for."""
    first = argv[0]
    if first in COMMANDS:
        return first, argv[1:]
    methods = [name.removeprefix(f"{first} ") for name in COMMANDS if name.startswith(f"{first} ")]
    if not methods:
        raise UserError(_unknown("command", first, [name.partition(" ")[0] for name in COMMANDS], PROGRAM))
    if len(argv) == 1 or argv[1] in ("-h", "--help"):
        sys.stdout.write(_overview(f"{first} "))
        return "", []
    if argv[1] not in methods:
        raise UserError(_unknown(f"{first} command", argv[1], methods, f"{PROGRAM} {first}"))
    return f"{first} {argv[1]}", argv[2:]


def _unknown(kind: str, word: str, known: list[str], program: str) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"there are {', '.join(dict.fromkeys(known))}"
    return f"unknown {kind} {word!r}: {remedy} (see {program} --help)"


def _overview(prefix: str = "") -> str:
    """The list of the commands whose name starts with `prefix`."""
    names = [name for name in COMMANDS if name.startswith(prefix)]
    width = max(map(len, names))
    lines = "".join(f"  {name:<{width}}  {COMMANDS[name].summary}\n" for name in names)
    return (
        f"usage: {PROGRAM} [--help] [--version] {prefix}COMMAND ...\n\n"
        "Train, publish and use retrievers that learn from raw text.\n\n"
        f"commands:\n{lines}\n"
        f"{PROGRAM} COMMAND --help explains a command. Every command takes its options from a YAML file too\n"
        "(--config FILE); options on the command line go before those of the file.\n"
    )
