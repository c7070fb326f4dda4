"""Atomic files and folders, cache keys, and one clear error when the disk is full or read-only.

Everywhere, `option` is the command-line option that sets the folder, for messages.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.own_folder import check_free, claim, expanded
from revela_hub.errors import DISK_FULL, UserError, causes, os_error

_STALE_SECONDS = 24 * 3600  # the age at which a temporary file must be left over from a killed process
_TEMPORARY = re.compile(r".+\.[0-9a-f]{32}\.tmp")


def key_of(*values: object) -> str:
    """Return a cache key that depends on these values only."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


def default_cache_folder(name: str) -> Path:
    """Return the folder for one of this package's caches, below $XDG_CACHE_HOME or ~/.cache.

    Raises:
        UserError: There is no home folder.
    """
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "revela-hub" / name


def make_folder(folder: Path, option: str = "--cache_dir") -> Path:
    """Creates a folder, and removes temporary files of killed processes from it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.tmp")):  # only those of `whole_file`: others may be the user's
            with contextlib.suppress(FileNotFoundError):
                if _TEMPORARY.fullmatch(path.name) and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    remove(path)
    except OSError as error:
        raise cannot_write(folder, error, option) from error
    return folder


def check_folder(folder: Path, option: str) -> None:
    """Check before long work whether `claim_folder` will accept a folder; leaves nothing on the disk."""
    check_free(folder, option)
    try_folder(folder, option)


def claim_folder(folder: Path, option: str = "--cache_dir") -> Path:
    """`make_folder` for an index or a cache: marks the folder as ours; never takes one that holds the user's files."""
    with writing(folder, option):
        claim(folder, option)
    return make_folder(folder, option)


def try_folder(folder: Path, option: str) -> None:
    """Check that a folder can be created or written to, so that a missing permission is reported before the work."""
    with writing(folder, option):
        place = next(path for path in (folder, *folder.parents) if path.exists())
        # Another name: the folder may be that of another process, which starts to write to it.
        Path(tempfile.mkdtemp(prefix=".revela-hub-", dir=place)).rmdir()


@contextlib.contextmanager
def whole_file(path: Path, option: str = "--cache_dir") -> Iterator[IO[bytes]]:
    """Opens a file for atomic writing: it gets its name when the block ends without an exception.

    Raises:
        UserError: The disk is full, or the folder cannot be written to. An existing file is left untouched.
    """
    with whole_path(path, option) as temporary, io.BufferedWriter(_Output(temporary, option)) as stream:
        yield stream  # an OSError raised by the block comes from its input, not from this file


@contextlib.contextmanager
def whole_path(path: Path, option: str = "--cache_dir") -> Iterator[Path]:
    """Yields a temporary path for a file or folder, and renames it to `path` when the block ends without an exception.

    Several threads, processes and machines may write the same path: each uses its own temporary name, and the last one
    to finish replaces the others' files. An existing folder is replaced, so it must not hold anything else.

    Raises:
        UserError: The disk is full, or the folder cannot be written to. Existing files are left untouched.
    """
    # Not tempfile: its files are readable by one user only, and the cache may be shared. Not the process id: threads
    # share it, and so may machines that write to the same disk.
    temporary = _temporary_name(path)
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


def write_array(stream: IO[bytes], array: NDArray[Any]) -> None:
    """Write an array as a `.npy` file to a stream of `whole_file`.

    Not numpy.save and not a writable memory map: on a full disk, the first raises an OSError without an errno, and the second
    kills the process.
    """
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
    stream.write(array.reshape(-1).view(np.uint8).data)


def mapped(path: Path) -> NDArray[Any]:
    """Map the array of a `.npy` file into memory.

    Raises:
        OSError, ValueError, EOFError: The file is missing, damaged or too short.
    """
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


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
