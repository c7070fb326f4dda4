"""The command line `revela-hub COMMAND ...`: finds the command's module, reads its arguments and reports errors.

The commands of a method are listed in its record; the others are modules of `revela_hub.cli.commands`. Each module has a
docstring (its help text), a dataclass `Arguments`, a function `run(arguments)` and, for arguments without a name, a tuple
`POSITIONALS` of fields of that dataclass. The modules of commands that do not train import torch in functions only, so that
their help takes a fraction of a second.

Every error is one line on stderr, and `--debug` shows its traceback. Exit status: 0 for success, 2 for an error that the user
can fix, 130 after Ctrl-C, 1 for anything else.
"""

import importlib
import os
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

import revela_hub
from revela_hub.errors import UserError, did_you_mean, explain
from revela_hub.files import cache_folder
from revela_hub.hub_cards.method import Command
from revela_hub.interrupts import status_of
from revela_hub.trainers.methods import METHODS

if TYPE_CHECKING:
    from revela_hub.cli.parser import CommandParser

PROGRAM = "revela-hub"
PACKAGE = "revela_hub.cli.commands"
DEBUG = " (--debug shows the traceback)"
METHOD_COMMANDS = {name: command for method in METHODS.values() for name, command in method.commands.items()}
BASELINES = [name for name, command in METHOD_COMMANDS.items() if command.summary.endswith("(baseline)")]
TRAINING = [name for name in METHOD_COMMANDS if name.startswith("train ") and name not in BASELINES]
# The commands in the order of the help text, with the headings above them.
GROUPS: dict[str, dict[str, str]] = {
    "search your text": {
        "quickstart": "demonstration: run adapt with small models from this repository, on a CPU",
        "adapt": "improve search over your text without labels, and measure whether it helped",
        "search": "search your files with a retriever or BM25",
        "index": "build a passage index for search and answer",
        "encode": "encode a corpus, or a shard of it; resumable",
        **{name: "" for name in METHOD_COMMANDS if name not in {*TRAINING, *BASELINES}},  # answer
        "demo": "open a page in the browser that searches with a model",
        "evaluate": "evaluate retrievers or BM25 on a retrieval task",
    },
    "train": dict.fromkeys(TRAINING, ""),
    "training data": {
        "probe": "make an evaluation set from raw text, without labels",
        "mine": "mine hard negatives with a retriever or BM25",
        "pseudo-queries": "generate queries for the spans of a text with a doc2query model",
        "synthesize": "generate training pairs with a language model",
    },
    "share": {
        "export": "convert a checkpoint to a sentence-transformers folder",
        "check": "verify that a model loads and embeds correctly",
        "publish": "verify a model and upload it to the Hugging Face Hub",
    },
    "baselines": dict.fromkeys(BASELINES, ""),
}
COMMANDS = {
    name: METHOD_COMMANDS.get(name) or Command(f"{PACKAGE}.{name.replace('-', '_')}", summary)
    for group in GROUPS.values()
    for name, summary in group.items()
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status; print an error in one line.

    Args:
        argv: The arguments after the program's name (default: those of the process).
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: `>&-`
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))
    words = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in words
    try:
        _dispatch([word for word in words if word != "--debug"])
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        sys.stderr.write(f"{PROGRAM}: {str(error) or 'interrupted'}\n")
        return status_of(error)
    except BrokenPipeError:
        # The reader of the output has exited (`| head`). Python would raise again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        line, status = explain(error)
        trace = "".join(traceback.format_exception(error))
        with suppress(OSError, RuntimeError):
            log = cache_folder("last-error.log")
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(trace, encoding="utf-8", errors="backslashreplace")
        sys.stderr.write(f"{trace if debug else ''}{PROGRAM}: error: {line}{'' if debug else DEBUG}\n")
        return status
    return 0


def _dispatch(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return
    if argv[0] in ("-V", "--version"):
        sys.stdout.write(f"{PROGRAM} {revela_hub.__version__}\n")
        return
    name, rest = _command_name(argv)
    if not name:
        return
    # Imported here because the list of commands does not need them.
    from revela_hub.cli.parser import build_arguments
    from revela_hub.output import accept_any_text, quiet

    parser = parser_of(name)
    values = parser.read(rest)
    if values is None:
        return
    accept_any_text()
    with quiet(parser.quiet):
        command = importlib.import_module(COMMANDS[name].module)
        if values.get("plan"):
            from revela_hub.planning.plan import plan

            sys.stdout.write(f"{plan(name, command, values)}\n")
        else:
            command.run(build_arguments(command.Arguments, values))


def parser_of(name: str) -> "CommandParser":
    """Return the parser of a command, such as "train pairs"."""
    from revela_hub.cli.parser import CommandParser

    command = importlib.import_module(COMMANDS[name].module)
    positionals = getattr(command, "POSITIONALS", ())
    return CommandParser(command.Arguments, f"{PROGRAM} {name}", command.__doc__ or "", positionals)


def _command_name(argv: list[str]) -> tuple[str, list[str]]:
    """Return the command that `argv` names, of one or two words, and its arguments; an empty name after printing help."""
    name = " ".join(argv[: 2 if argv[0] == "train" else 1])
    if name in ("train", "train -h", "train --help"):
        sys.stdout.write(_overview("train "))
        return "", []
    if name not in COMMANDS:
        close = did_you_mean(name, COMMANDS) or f"choose one of {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {name!r}: {close} (see {PROGRAM} --help)")
    return name, argv[len(name.split()) :]


def _overview(prefix: str = "") -> str:
    """Return the list of commands whose names start with `prefix`."""
    description = (revela_hub.__doc__ or "").partition("\n\n")[0]
    start = f"Without labels, start with {PROGRAM} adapt PATH; with query-passage pairs, with {PROGRAM} train pairs."
    lines = [f"usage: {PROGRAM} [--help] [--version] {prefix}COMMAND ...\n", f"{description}\n", start]
    for title, group in GROUPS.items():
        if names := [name for name in group if name.startswith(prefix)]:
            lines.append(f"\n{title}:")
            lines += [f"  {name:<{max(map(len, COMMANDS))}}  {COMMANDS[name].summary}" for name in names]
    lines.append(f"\nRun {PROGRAM} COMMAND --help for the options of a command. They can also be in a YAML file")
    lines.append("(--config FILE); command-line options override the file.\n")
    return "\n".join(lines)
