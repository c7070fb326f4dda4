"""Folders that the program writes: kept apart from the user's files, and not read as text by the next run.

A folder is ours if it holds a file `.revela-hub`. A folder is marked when it is new or empty; a folder with other files in
it is rejected, so that nothing of the user's is ever replaced or deleted, and readers skip marked folders that they meet
below a folder of text (a marked folder that is named outright is read).
"""

import os
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path

from revela_hub.data.sources.source import Source
from revela_hub.errors import UserError

MARKER = ".revela-hub"

_EXPLANATION = "revela-hub wrote this folder: it may replace files in it, and does not read it as text.\n"


def is_ours(folder: Path) -> bool:
    """Whether the program marked the folder as its own."""
    return os.path.isfile(folder / MARKER)  # Path.is_file raises where the folder may not be entered


def names_in(folder: Path) -> set[str]:
    """The names in a folder, without hidden files such as `.DS_Store` or `.git`, which nothing here reads or replaces."""
    return {name for name in os.listdir(folder) if not name.startswith(".")}


def _of_others(folder: Path) -> bool:
    """Whether a folder holds anything but folders of ours, such as cached rows beside cached vectors."""
    return not all(is_ours(folder / name) for name in names_in(folder))


def check_free(folder: Path, option: str, known: Callable[[Path], bool] = lambda _: False) -> None:
    """Refuses a folder that holds files of the user; writes nothing.

    Args:
        folder: May be missing.
        option: Where the user chose it, for the message.
        known: Whether an unmarked folder is one that an earlier version wrote.

    Raises:
        UserError: It is a file, or holds files and is not marked.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{option} {folder} is a file, not a folder: choose another place with {option}")
    if folder.is_dir() and not is_ours(folder) and _of_others(folder) and not known(folder):
        raise UserError(
            f"{option} {folder} holds files that revela-hub did not write, and they could be replaced: give a new folder"
        )


def claim(folder: Path, option: str, known: Callable[[Path], bool] = lambda _: False) -> Path:
    """Makes a folder, if it is missing, and marks it as ours.

    Raises:
        UserError: As `check_free`.
        OSError: The folder cannot be made or written to.
    """
    check_free(folder, option, known)
    folder.mkdir(parents=True, exist_ok=True)
    if not is_ours(folder):
        (folder / MARKER).write_text(_EXPLANATION, encoding="utf-8")
    return folder


def check_apart(sources: Iterable[Source], output: Path, option: str = "--output_dir") -> None:
    """Refuses an output that the next run would read as data.

    Raises:
        UserError: The output lies in one of the sources.
    """
    for source in sources:
        folder = Path(source.path).expanduser()
        if source.is_dataset or not folder.is_dir() or not output.resolve().is_relative_to(folder.resolve()):
            continue
        parts = output.resolve().relative_to(folder.resolve()).parts
        if not any(fnmatch(part, pattern) for part in parts for pattern in source.exclude):
            remedy = f", or leave it out: --exclude {parts[0]}" if parts and option == "--output_dir" else ""
            raise UserError(f"{option} {output} lies in the data, {folder}: give another one{remedy}")
