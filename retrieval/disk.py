"""Files that are there whole or not at all, named by what is in them, and one clear message where there is no room."""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from revela_hub.data.own_folder import check_free, claim, names_in
from revela_hub.errors import DISK_FULL, UserError

_STALE_SECONDS = 24 * 3600  # a file that a killed process left half written


_TEMPORARY = re.compile(r".+\.[0-9a-f]{32}\.tmp")
# What earlier versions, which did not mark folders, wrote into those of indexes and caches.
_OURS = re.compile(
    r"(texts|vectors|hits|bm25|exact|flat|hnsw|ivfpq)-[0-9a-f]{16,}.*|states|milvus\.db|index\.json|.*\.tmp"
)


def key_of(*facts: object) -> str:
    """A name for what depends on these facts, and on nothing else."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def default_cache_folder(name: str) -> Path:
    """The folder for this package's caches: below $XDG_CACHE_HOME, or else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "revela-hub" / name


def make_folder(folder: Path, option: str = "--cache_dir") -> Path:
    """Makes a folder for files of `whole_file`, and removes what a killed process left half written in it.

    Args:
        folder: The folder.
        option: Where the user chose it, for the message.

    Raises:
        UserError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.tmp")):  # only those of `whole_file`: the user may have others
            with contextlib.suppress(FileNotFoundError):
                if _TEMPORARY.fullmatch(path.name) and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    _remove(path)
    except OSError as error:
        raise cannot_write(folder, error, option) from error
    return folder


def check_folder(folder: Path, option: str) -> None:
    """Looks, before the work, whether a folder may be given to `claim_folder`; nothing is left on the disk.

    Raises:
        UserError: As `claim_folder`.
    """
    check_free(folder, option, _was_ours)
    try_folder(folder, option)


def claim_folder(folder: Path, option: str = "--cache_dir") -> Path:
    """`make_folder` for an index or a cache: marked as ours, and never one that holds files of the user.

    Raises:
        UserError: It holds other files, or cannot be made.
    """
    check_free(folder, option, _was_ours)
    make_folder(folder, option)
    try:
        return claim(folder, option, _was_ours)
    except OSError as error:
        raise cannot_write(folder, error, option) from error


def _was_ours(folder: Path) -> bool:
    if folder.is_relative_to(default_cache_folder("")):
        return True
    names = names_in(folder)
    return all(map(_OURS.fullmatch, names)) and any(name.startswith(("texts-", "vectors-")) for name in names)


def try_folder(folder: Path, option: str) -> None:
    """Makes a folder and removes it again: that nothing can be written there should be said before the work, not after.

    Args:
        folder: The folder; one that is there is left as it is.
        option: Where the user chose it, for the message.

    Raises:
        UserError: It cannot be made.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder, option)
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()


@contextlib.contextmanager
def whole_file(path: Path, option: str = "--cache_dir") -> Iterator[IO[bytes]]:
    """Opens a file for writing that appears under its name when the block is left without an exception.

    Args:
        path: The file.
        option: Where the user chose its place, for the message.

    Raises:
        UserError: The disk is full, or the folder cannot be written to. A file that was there before is untouched.
    """
    with whole_path(path, option) as temporary, io.BufferedWriter(_Output(temporary, option)) as stream:
        yield stream  # an OSError in here is of what is read meanwhile, not of this file


@contextlib.contextmanager
def whole_path(path: Path, option: str = "--cache_dir") -> Iterator[Path]:
    """A name for a file or folder to write, which gets its own name when the block is left without an exception.

    Several threads, processes and machines may write the same path: each has a temporary name of its own, and the one
    that is ready last replaces what the others wrote. A folder must belong to the program alone.

    Args:
        path: Of the file or folder.
        option: Where the user chose its place, for the message.

    Raises:
        UserError: The disk is full, or the folder cannot be written to. What was there before is untouched.
    """
    # Not tempfile's: that makes files which only this user may read, in what may be a team's cache. Not the number of the
    # process: threads share it, and so may the machines that write to one disk.
    temporary = _beside(path)
    try:
        yield temporary
        with writing(path.parent, option):
            if temporary.is_dir():
                _replace_folder(temporary, path)
            else:
                with temporary.open("rb+") as stream:
                    os.fsync(stream.fileno())
                temporary.replace(path)
    finally:
        _remove(temporary)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


def _replace_folder(new: Path, path: Path) -> None:
    while True:
        try:
            new.rename(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        old = _beside(path)
        with contextlib.suppress(FileNotFoundError):  # another process moved it
            path.rename(old)
        _remove(old)


def _remove(path: Path) -> None:
    """Removes a temporary file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


class _Output(io.FileIO):
    """A file whose errors say that it cannot be written."""

    def __init__(self, path: Path, option: str) -> None:
        self._place = path.parent, option
        with writing(*self._place):
            super().__init__(path, "wb")

    def write(self, block: Any) -> int:
        with writing(*self._place):
            return super().write(block)


@contextlib.contextmanager
def writing(folder: Path, option: str = "--cache_dir") -> Iterator[None]:
    """A block that only writes: whatever the system refuses in it is said of the folder.

    Raises:
        UserError: The disk is full, or the folder cannot be written to.
    """
    try:
        yield
    except OSError as error:
        raise cannot_write(folder, error, option) from error


def cannot_write(folder: Path, error: OSError, option: str) -> UserError:
    """The mistake that an error of the operating system means."""
    name = option.strip("-").replace("-", "_")
    if error.errno in DISK_FULL:
        return UserError(
            f"the disk is full at {folder}: make room and run the command again, what was computed before is kept",
            **{name: f"or move the folder, and give its new place with {option}"},
        )
    return UserError(
        f"cannot write to {folder}: {error.strerror or error}", **{name: f"choose another place with {option}"}
    )
