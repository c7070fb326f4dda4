"""Folders for caches and indexes, and cache keys.

Everywhere, `option` is the command-line option that sets the folder, for messages.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.own_folder import check_free, claim, expanded
from revela_hub.whole_files import cannot_write, is_temporary, remove, writing

_STALE_SECONDS = 24 * 3600  # the age at which a temporary file must be left over from a killed process


def key_of(*values: object) -> str:
    """Return a cache key that depends on these values only."""
    return checksum(json.dumps(values).encode())


def checksum(content: bytes | NDArray[Any]) -> str:
    """Return a hash of the bytes of a file or an array, which names files."""
    whole = content if isinstance(content, bytes) else np.ascontiguousarray(content).data
    return hashlib.blake2b(whole, digest_size=16).hexdigest()


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
        for path in sorted(folder.glob("*.tmp")):
            with contextlib.suppress(FileNotFoundError):
                if is_temporary(path) and time.time() - path.stat().st_mtime > _STALE_SECONDS:
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
