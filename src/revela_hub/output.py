"""Notes and progress bars of commands, on standard error and switched off by `--quiet`."""

import io
import itertools
import os
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

QUIET = "TQDM_DISABLE"  # this variable also turns off the progress bars of libraries


@contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Turn off notes, progress bars and the libraries' warnings if wanted; enter this before the libraries are imported.

    Without a terminal, the libraries' progress bars are always off, because they would fill a log. The environment variables
    are restored at the end.
    """
    bars = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    settings = bars | {QUIET: "1", "TRANSFORMERS_VERBOSITY": "error"}
    before = {name: os.environ.get(name) for name in settings}
    # Recipes and peft use the old name of activation_checkpointing, which all supported versions of transformers know.
    warnings.filterwarnings("ignore", r".*gradient_checkpointing", FutureWarning)
    os.environ |= settings if wanted else {} if sys.stderr.isatty() else bars
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def accept_any_text() -> None:
    r"""Escape characters that the encoding of the output does not support, e.g. `\udcff` in a file name.

    Bytes of standard input that are not in its encoding become U+FFFD.
    """
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(io.UnsupportedOperation):  # a program that calls `main` has read from it
                stream.reconfigure(errors=errors)


def is_utf8() -> bool:
    """Return whether standard output takes any text; JSON of other encodings is ASCII, because `accept_any_text` escapes otherwise."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def is_quiet() -> bool:
    """Return whether `quiet` is active in this process or was when this process was started."""
    return os.environ.get(QUIET) == "1"


def progress_bar(rows: Iterable[Any] | None = None, *, show: bool, **options: Any) -> "tqdm[Any]":
    """Return tqdm's bar on standard error; without a terminal, work of more than 30 seconds prints a line every 30 seconds."""
    from tqdm.auto import tqdm

    if not sys.stderr.isatty():
        options |= {"mininterval": 30, "delay": 30, "file": _Lines()}
    return tqdm(rows, disable=not show, **options)


class _Lines(io.TextIOBase):
    counts = ""

    def write(self, text: str) -> int:
        # tqdm returns to the start of its line before each state, and when it is done, it repeats the last one and ends it.
        if (line := text.strip()) and (counts := line.partition(" [")[0]) != self.counts:
            self.counts = counts
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        return len(text)


def note(text: object) -> None:
    """Print a line on standard error, unless it is empty or the command is quiet."""
    if str(text) and not is_quiet():
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def typed_lines(prompt: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of the non-empty lines of standard input, with a prompt on a terminal."""
    for number in itertools.count(1):
        if sys.stdin.isatty():
            sys.stderr.write(f"{prompt}> ")
            sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            return
        if text := line.removeprefix("\ufeff").strip():  # Windows writes a byte order mark into pipes
            yield number, text


def command_line(*words: object) -> str:
    """Return a command of this program, quoted for a shell.

    >>> command_line("search", "my models/retriever", "a query", "--corpus", "src")
    "revela-hub search 'my models/retriever' 'a query' --corpus src"
    """
    return shlex.join(["revela-hub", *map(str, words)])


def clock(seconds: float) -> str:
    """Format a duration: `40 s`, `12 min`, `3 h 05 min`, `52 h 20 min`."""
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"
