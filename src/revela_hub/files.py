"""Paths as users write them, the cache folder, and files that appear under their name only when they are complete."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home folder for `~`.

    `Path.expanduser` raises an error for other names with a tilde, such as `~$report.docx`; these are returned unchanged.
    """
    return Path(os.path.expanduser(path))


def cache_folder(name: str) -> Path:
    """Return one of this package's cache folders, below $XDG_CACHE_HOME or ~/.cache, without creating it."""
    return local_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "revela-hub" / name


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, and rename it to `path` when the block ends without an exception.

    An existing file or folder of that name stays until then, and is replaced as a whole. Several threads, processes and
    machines may write the same path: each uses its own temporary name, and the last one to finish wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        if temporary.is_dir():
            if path.exists():  # a folder cannot be renamed to one that is not empty
                path.rename(old := path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp"))
                shutil.rmtree(old, ignore_errors=True)
            temporary.rename(path)
        else:
            temporary.replace(path)
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Remove a file or folder of ours, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file as a whole."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
