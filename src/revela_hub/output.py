"""What a command says on the way, beside its results: on standard error, and not at all with `--quiet`."""

import io
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

QUIET = "TQDM_DISABLE"  # the variable that turns off the bars of the libraries, too


@contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Turns off notes, progress bars and the libraries' warnings; to be entered before the libraries are imported.

    The libraries' bars are off also where nobody watches: they fill a log. Whoever calls `main` from Python finds the
    environment as it was.
    """
    bars = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    settings = bars | {QUIET: "1", "TRANSFORMERS_VERBOSITY": "error"}
    before = {name: os.environ.get(name) for name in settings}
    if wanted:
        os.environ |= settings
    elif not sys.stderr.isatty():
        os.environ |= bars
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def any_text() -> Iterator[None]:
    r"""Lets the output take what its encoding has not, as `\udcff`: the name of a file, a text on a terminal in ASCII."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    before = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            stream.reconfigure(errors=errors)


def is_quiet() -> bool:
    """Whether `quiet` is entered, here or by whoever started this process."""
    return os.environ.get(QUIET) == "1"


def shows_progress() -> bool:
    """Whether progress bars are wanted: a person watches; a bar fills a log."""
    return sys.stderr.isatty() and not is_quiet()


def note(text: object) -> None:
    """Prints a line on standard error."""
    if not is_quiet():
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def command_line(*words: object) -> str:
    """A command of this program, quoted so that a shell reads these words.

    >>> command_line("search", "my models/retriever", "a query", "--corpus", "src")
    "revela-hub search 'my models/retriever' 'a query' --corpus src"
    """
    return shlex.join(["revela-hub", *map(str, words)])
