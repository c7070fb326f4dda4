"""The command line `revela-hub COMMAND ...`: finds the command's module, parses its arguments, reports mistakes.

The commands of a method are in its record, the others are modules of `revela_hub.cli.commands`: each has a docstring (its help text), a dataclass `Arguments`, a function
`run(arguments)` and, where it takes arguments without a name, a tuple `POSITIONALS` of fields of that dataclass. Only
the module that is asked for is imported, so that help and mistakes answer at once.

Exit status: 0, 2 for a mistake of the user (one line on stderr, no traceback), 130 after Ctrl-C, 1 for anything else.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Container
from typing import Any

from revela_hub import __version__
from revela_hub.errors import UserError, did_you_mean
from revela_hub.hub_cards.method import Command
from revela_hub.trainers.methods import METHODS

PROGRAM = "revela-hub"
OWN = "revela_hub.cli.commands"


OF_METHODS = {name: command for method in METHODS.values() for name, command in method.commands.items()}
COMMANDS = {
    "quickstart": Command(
        f"{OWN}.quickstart", "raw text on this machine to a trained, measured retriever, in minutes on a CPU"
    ),
    **{name: command for name, command in OF_METHODS.items() if name.startswith("train ")},
    "mine": Command(f"{OWN}.mine", "find hard negatives for pairs with a retriever or BM25"),
    "synthesize": Command(f"{OWN}.synthesize", "have a language model write training pairs for tasks"),
    "probe": Command(f"{OWN}.probe", "make a retrieval task out of raw text, to measure retrievers without labels"),
    "export": Command(f"{OWN}.export", "turn a training checkpoint into a sentence-transformers folder"),
    "evaluate": Command(f"{OWN}.evaluate", "measure a retriever, or BM25, on a retrieval task"),
    "encode": Command(f"{OWN}.encode", "encode a corpus, whole or a shard of it, and go on where it stopped"),
    "index": Command(f"{OWN}.index", "make a passage index on disk for search, answer and ImpRAG"),
    "search": Command(f"{OWN}.search", "find passages in your files with a retriever"),
    "check": Command(f"{OWN}.check", "verify that a model loads and embeds as its readers will expect"),
    "publish": Command(f"{OWN}.publish", "assemble, verify and upload a model to the Hugging Face Hub"),
    **{name: command for name, command in OF_METHODS.items() if not name.startswith("train ")},
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    Args:
        argv: the arguments after the program's name; those of the process when None.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    # A stream that is closed (`<&-`), which Python has as None, reads and takes nothing.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")
    options: set[str] = set()  # of the command, as soon as it is known
    return exit_status(lambda: _dispatch(words, options), options, trace="--traceback" in words)


def exit_status(action: Callable[[], None], options: Container[str], *, trace: bool) -> int:
    """Runs a command, reports on standard error how it failed, and returns the exit status.

    Args:
        action: the command.
        options: the names of its options: no other is recommended.
        trace: also print where in the program the error comes from.
    """
    try:
        action()
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        sys.stderr.write(f"{PROGRAM}: {str(error) or 'interrupted'}\n")
        return getattr(error, "status", 130)  # of a training run that was ended by another signal, with a checkpoint
    except BrokenPipeError:
        # The reader of our output has gone (`| head`). Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _fail(error, options, trace=trace)
    return 0


def _fail(error: Exception, options: Container[str], *, trace: bool) -> int:
    """Says what went wrong, in one line where it is no bug, and returns the exit status."""
    from revela_hub.cli.failures import explain

    mistake = explain(error)
    if trace or mistake is None:
        sys.stderr.write("".join(traceback.format_exception(error)))
    if mistake is None:
        sys.stderr.write(
            f"{PROGRAM}: this is a bug of {PROGRAM} {__version__}, not of yours; please report it with the lines above"
            " and the command, where you got the program from\n"
        )
        return 1
    sys.stderr.write(f"{PROGRAM}: error: {mistake.line(options)}\n")
    return 2


def _dispatch(argv: list[str], options: set[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return
    if argv[0] in ("-V", "--version"):
        sys.stdout.write(f"{PROGRAM} {__version__}\n")
        return
    name, rest = _command_name(argv)
    if not name:
        return
    # Here and not above: the parser imports what the list of commands can do without.
    from revela_hub.cli.parser import CommandParser, build_arguments
    from revela_hub.output import any_text, quiet

    program, module = f"{PROGRAM} {name}", COMMANDS[name].module
    told = _told(module)
    parser = CommandParser(told.Arguments, program, told.__doc__ or "", getattr(told, "POSITIONALS", ()))
    options.update(parser.hints)
    values = parser.read(rest)
    if values is None:
        return
    with quiet(parser.quiet), any_text():
        command = importlib.import_module(module)
        command.run(build_arguments(command.Arguments, values, program))


def _told(module: str) -> Any:
    """The command's module, or what its source says without being run: importing it may take seconds."""
    from revela_hub.cli.outline import outline

    try:
        told = outline(module)
        return sys.modules.get(module) or (told if told.Arguments else None)
    except Exception:  # a version of transformers whose source is written in some way that was not foreseen
        return importlib.import_module(module)


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
    remedy = did_you_mean(word, known) or f"there are {', '.join(dict.fromkeys(known))}"
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
