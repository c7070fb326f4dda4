"""Paths as users write them, cache and output folders, and files that appear under their name only when they are complete."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from revela_hub.errors import UserError

MARKER = ".revela-hub"
# Files of the folders that we write without the marker: a run, a checkpoint, an exported model.
OURS = ((MARKER,), ("run.json", "trainer_state.json"), ("trainer_state.json", "scheduler.pt"), (".revela_hub",))


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home folder for `~`; `Path.expanduser` rejects other tildes, such as `~$report.docx`."""
    return Path(os.path.expanduser(path))


def cache_folder(name: str) -> Path:
    """Return one of this package's cache folders, below $XDG_CACHE_HOME or ~/.cache, without creating it."""
    return local_path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "revela-hub" / name


def is_ours(folder: Path) -> bool:
    """Return whether this program wrote a folder, which readers skip."""
    return any(all(os.path.exists(folder / name) for name in names) for names in OURS)


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder without hidden files (`.DS_Store`, `.git`), which are never read or replaced."""
    return {path.name for path in folder.iterdir() if path.name[0] != "."}


def claim(folder: Path) -> Path:
    """Create an output or cache folder and mark it as ours; one with files of the user is a `UserError`."""
    names = names_in(folder) if folder.is_dir() else set()
    # A cache may hold folders of ours. Runs and exported models have no marker: other commands must not replace their files.
    if names and not (folder / MARKER).exists() and not all((folder / name / MARKER).exists() for name in names):
        raise UserError(f"{folder} contains files that revela-hub did not write and might replace: use a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    return folder


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, and rename it to `path` when the block ends without an exception.

    An existing file or folder of that name stays until then, and is replaced as a whole. Several threads, processes and
    machines may write the same path: each uses its own temporary name, and the last one to finish wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        yield temporary
        while True:
            try:
                temporary.replace(path)
                return
            except OSError as error:  # a folder cannot replace one that is not empty
                if not temporary.is_dir() or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            with suppress(FileNotFoundError):  # another process moved it
                remove(path.rename(_beside(path)))
    finally:
        remove(temporary)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Let the processes and threads of this machine write a file or folder one after another, with a lock file next to it.

    Unlike in a barrier of a process group, they may wait for hours.
    """
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        yield


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


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


@contextmanager
def scratch_folder(kind: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new temporary folder, which is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix=f"revela-hub-{kind}-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def key_of(*values: object) -> str:
    """Return a cache key that depends on these values only."""
    return checksum(json.dumps(values).encode())


def checksum(content: Any) -> str:
    """Return a hash of bytes or of an array, which names files."""
    return hashlib.blake2b(content if isinstance(content, bytes) else content.tobytes(), digest_size=16).hexdigest()


def content_digest(path: Path) -> str:
    """Return a digest of a file or of the files in a folder, which a move does not change; of an empty folder, of its path.

    Hidden files, README, licence, training arguments, settings of the hybrid and weights for other programs do not count. Of a file above 256 MB, 1,024
    blocks are read.
    """
    path = local_path(path).resolve()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if _is_content(file, path))
    digest = hashlib.sha256(b"" if files else os.fsencode(path))
    for file in files:
        size = file.stat().st_size
        digest.update(os.fsencode(f"{file.relative_to(path).as_posix()} {size}\n"))
        with file.open("rb") as stream:
            if size <= 2**28:
                digest.update(stream.read())
            for number in range(1024 if size > 2**28 else 0):
                stream.seek(number * (size - 2**16) // 1023)
                digest.update(stream.read(2**16))
    return digest.hexdigest()


def _is_content(file: Path, folder: Path) -> bool:
    parts = file.relative_to(folder).parts
    described = file.name in ("README.md", "LICENSE", "training_args.bin", "hybrid.json")
    ignored = described or parts[0] in ("onnx", "openvino")
    return file.is_file() and not ignored and not any(part.startswith(".") for part in parts)
