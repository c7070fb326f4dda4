"""Files and folders that are written as a whole, and one clear error when the disk is full or read-only.

Everywhere, `option` is the command-line option that sets the folder, for messages.
"""

import contextlib
import errno
import glob
import io
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from revela_hub.errors import DISK_FULL, UserError, causes, os_error


@contextlib.contextmanager
def whole_file(path: Path, option: str = "--cache_dir") -> Iterator[IO[bytes]]:
    """Opens a file for atomic writing: it gets its name when the block ends without an exception.

    Raises:
        UserError: The disk is full, or the folder cannot be written to. An existing file is left untouched.
    """
    with whole_path(path, option) as temporary, io.BufferedWriter(_Output(temporary, option)) as stream:
        yield stream  # an OSError raised by the block comes from its input, not from this file


@contextlib.contextmanager
def whole_path(path: Path, option: str = "--cache_dir", *, only_writer: bool = False) -> Iterator[Path]:
    """Yields a temporary path for a file or folder, and renames it to `path` when the block ends without an exception.

    Several threads, processes and machines may write the same path: each uses its own temporary name, and the last one
    to finish replaces the others' files. An existing folder is replaced, so it must not hold anything else.
    With `only_writer`, nothing else writes the path, so what killed processes have left of it is removed.

    Raises:
        UserError: The disk is full, or the folder cannot be written to. Existing files are left untouched.
    """
    # Not tempfile: its files are readable by one user only, and the cache may be shared. Not the process id: threads
    # share it, and so may machines that write to the same disk.
    temporary = _temporary_name(path)
    if only_writer:
        for left in sorted(path.parent.glob(f"{glob.escape(path.name)}.*")):
            if is_temporary(left):
                remove(left)
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
        remove(temporary)


def write_text(path: Path, text: str, option: str = "--cache_dir") -> None:
    """Write a text file as a whole: an interrupted call leaves the earlier file."""
    with whole_file(path, option) as stream:
        stream.write(text.encode())


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


def is_temporary(path: Path) -> bool:
    """Whether a file or folder has a temporary name of `whole_path`; others may be the user's."""
    return re.fullmatch(r".+\.[0-9a-f]{32}\.tmp", path.name) is not None


def _replace_folder(new: Path, path: Path) -> None:
    while True:
        try:
            new.rename(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        old = _temporary_name(path)
        with contextlib.suppress(FileNotFoundError):  # another process moved it
            path.rename(old)
        remove(old)


def remove(path: Path) -> None:
    """Removes a file or folder of ours, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


class _Output(io.FileIO):
    """A file whose write errors become `UserError`s."""

    def __init__(self, path: Path, option: str) -> None:
        self._place = path.parent, option
        with writing(*self._place):
            super().__init__(path, "wb")

    def write(self, block: Any) -> int:
        with writing(*self._place):
            return super().write(block)


@contextlib.contextmanager
def writing(folder: Path, option: str = "--cache_dir") -> Iterator[None]:
    """Turns every OSError of a block that only writes into a `UserError` about the folder."""
    try:
        yield
    except OSError as error:
        raise cannot_write(folder, error, option) from error


@contextlib.contextmanager
def naming_full_disk(folder: Path, option: str) -> Iterator[None]:
    """Name the folder in errors of a full disk that name no file: those of torch, safetensors and `Path.write_text`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        for cause in causes(error):
            if os_error(cause) in DISK_FULL and not getattr(cause, "filename", None):
                raise UserError(
                    f"the disk is full at {folder}: free some space and run the command again, or choose another folder with {option}"
                ) from error
        raise


def cannot_write(folder: Path, error: OSError, option: str) -> UserError:
    """Return the `UserError` for an OSError while writing to a folder."""
    name = option.strip("-").replace("-", "_")
    if error.errno in DISK_FULL or "requested and" in str(error):  # numpy's "10 requested and 4 written" has no errno
        return UserError(
            f"the disk is full at {folder}: free some space and run the command again, completed work is reused",
            **{name: f"or move the folder to another disk and pass it with {option}"},
        )
    return UserError(
        f"cannot write to {folder}: {error.strerror or error}", **{name: f"choose another folder with {option}"}
    )
