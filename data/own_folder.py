"""Marking folders that the program writes, to protect the user's files and to avoid reading our output as text.

A folder is ours if it contains the file `.revela-hub`. Only new and empty folders are marked; a folder with other files is
rejected, so the user's files are never replaced or deleted. Readers skip marked folders, and others that we wrote, below a folder
of text, but read one that is named explicitly.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from revela_hub.data.sources.source import Source
from revela_hub.errors import UserError
from revela_hub.paths import local_path

MARKER = ".revela-hub"

# Files in the folders that we write without the mark, because other commands must not replace their content.
_CONTENTS = (
    ("run.json", "trainer_state.json"),  # a training run
    ("trainer_state.json", "scheduler.pt"),  # a checkpoint
    (".revela_hub",),  # an exported model
)

_EXPLANATION = "revela-hub created this folder: it may replace files in it, and does not read it as text.\n"


def is_ours(folder: Path) -> bool:
    """Return whether the program marked the folder as its own."""
    return os.path.isfile(folder / MARKER)  # Path.is_file raises where the folder may not be entered


def written_by_us(path: Path) -> bool:
    """Return whether a path is a folder that the program wrote, marked or not."""
    return os.path.isdir(path) and (
        is_ours(path) or any(all(os.path.exists(path / name) for name in names) for names in _CONTENTS)
    )


def expanded(cache: str | Path) -> Path:
    """Return a cache folder with the home folder for `~`.

    Raises:
        UserError: There is no home folder, as in a container whose user has no name.
    """
    folder = local_path(cache)
    if folder.parts[:1] == ("~",):
        raise UserError("there is no home folder for the cache: set HOME", cache_dir="or use --cache_dir FOLDER")
    return folder


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder without hidden files (`.DS_Store`, `.git`), which are never read or replaced."""
    return {name for name in os.listdir(folder) if not name.startswith(".")}


def check_free(folder: Path, option: str) -> None:
    """Check that a folder, if it exists, does not hold the user's files; writes nothing. The message names the option that sets it."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{option} {folder} is a file, not a folder: choose another folder with {option}")
    if not folder.is_dir():
        return
    names = names_in(folder)  # listed first: another process may mark the folder and write to it meanwhile
    if not is_ours(folder) and not all(is_ours(folder / name) for name in names):  # a cache may hold folders of ours
        raise UserError(
            f"{option} {folder} contains files that revela-hub did not write and might replace: use a new folder"
        )


def claim(folder: Path, option: str) -> Path:
    """Create a folder if it is missing, and mark it as ours.

    Raises:
        UserError: As `check_free`.
        OSError: The folder cannot be created or written to.
    """
    check_free(folder, option)
    folder.mkdir(parents=True, exist_ok=True)
    if not is_ours(folder):
        (folder / MARKER).write_text(_EXPLANATION, encoding="utf-8")
    return folder


def check_apart(sources: Iterable[Source], output: Path, option: str = "--output_dir") -> None:
    """Check that the output is not inside the data, where the next run would read it."""
    for source in sources:
        folder = local_path(source.path)
        if source.is_dataset or not folder.is_dir() or not output.resolve().is_relative_to(folder.resolve()):
            continue
        inside = output.resolve().relative_to(folder.resolve())
        if not any(source.excluding(folder / part, part) for part in (inside, *inside.parents)):
            parts = inside.parts
            remedy = f", or exclude it: --exclude {parts[0]}" if parts and option == "--output_dir" else ""
            raise UserError(f"{option} {output} is inside the data folder {folder}: choose another one{remedy}")
