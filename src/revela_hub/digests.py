"""Digests of files, for recognising the same content under another path."""

import hashlib
import os
from pathlib import Path
from typing import Any

from revela_hub.paths import local_path

HASHED_WHOLE = 256 * 2**20
"""Size in bytes up to which a file is hashed completely; of larger files, evenly spaced blocks are hashed."""
BLOCKS, BLOCK = 1024, 2**16


def add_file(digest: Any, file: Path) -> None:
    """Add a file's content to a digest of `hashlib`."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= HASHED_WHOLE:
            while block := stream.read(2**20):
                digest.update(block)
            return
        for number in range(BLOCKS):
            stream.seek(number * (size - BLOCK) // (BLOCKS - 1))
            digest.update(stream.read(BLOCK))


def content_digest(path: Path) -> str:
    """Return a hexadecimal digest of a file or of a folder's files, which a move does not change; of an empty folder, of its path."""
    path = local_path(path).resolve()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if _is_content(file, path))
    digest = hashlib.sha256(b"" if files else os.fsencode(path))
    for file in files:
        digest.update(os.fsencode(f"{file.relative_to(path).as_posix()} {file.stat().st_size}\n"))
        add_file(digest, file)
    return digest.hexdigest()


def _is_content(file: Path, folder: Path) -> bool:
    """Whether a file counts as content: not hidden, no README, licence or arguments, not a model's weights for other programs."""
    parts = file.relative_to(folder).parts
    return (
        file.is_file()
        and file.name not in ("README.md", "LICENSE", "training_args.bin")
        and parts[0] not in ("onnx", "openvino")
        and not any(part.startswith(".") for part in parts)
    )
