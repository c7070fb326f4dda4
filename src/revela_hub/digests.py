"""Digests of files, for recognising the same content under another path."""

from pathlib import Path
from typing import Any

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
