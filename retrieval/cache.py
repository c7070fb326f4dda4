"""Vectors of passages on disk, so that no passage is encoded twice by the same model.

A cache belongs to one model and is a folder of shards, safetensors files that are written once and never changed:

    vectors   float32 (n, d)   as the model gave them, not normalised
    digests   uint8 (n, 16)    the hash of each passage's text, which is all that a vector depends on
    metadata  {"checksum": BLAKE2 of both}

So a run that is interrupted goes on where it stopped, and a file that changes costs only the passages that changed,
wherever it has been moved to. A shard appears under its name only when it is complete (written beside, then renamed),
so that several processes may use one cache. A shard that cannot be read, or whose checksum is wrong, is deleted with a
warning, and its passages are encoded again. Nothing else is deleted: to empty a cache, delete its folder.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from revela_hub.errors import UserError
from revela_hub.retrieval.passages import DIGEST_BYTES

logger = logging.getLogger(__name__)

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_STALE_SECONDS = 24 * 3600  # a file that a killed process left half written


def default_cache_folder() -> Path:
    """The folder for this package's caches: below $XDG_CACHE_HOME, or else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "revela-hub" / "passages"


class CachedVectors(NamedTuple):
    """Vectors (n, d) and, in the same order, the numbers (n,) of the passages they belong to."""

    rows: NDArray[np.int64]
    vectors: NDArray[np.float32]


class VectorCache:
    """The cache of one model.

    Args:
        folder: Where the caches of all models are.
        model: What identifies the model and everything else that a vector depends on, such as where texts are cut;
            see `revela_hub.retrieval.encoder.model_identity`.

    Raises:
        UserError: The folder cannot be made or written to.
    """

    def __init__(self, folder: str | Path, model: str) -> None:
        """Makes the model's folder where there is none."""
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", model.partition("@")[0]).strip("-.")[-48:]
        self.folder = Path(folder).expanduser() / f"{name}-{hashlib.blake2b(model.encode(), digest_size=8).hexdigest()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
        except OSError as error:
            raise UserError(
                f"cannot use the cache {self.folder}: {error.strerror}; choose another with --cache-dir"
            ) from error

    def read(self, rows: Mapping[bytes, int]) -> Iterator[CachedVectors]:
        """Yields what is there of the passages asked for, shard by shard, each passage once.

        Args:
            rows: The passages' digests, and the number of each.
        """
        found: set[bytes] = set()
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                vectors = _read_shard(path, rows, found)
            except FileNotFoundError:  # another process has found it damaged
                continue
            except OSError as error:  # not ours to delete: it may be whole
                logger.warning("%s cannot be read (%s): its passages are encoded again", path, error)
                continue
            except (ValueError, KeyError, SafetensorError) as error:
                logger.warning("%s is damaged (%s): its passages are encoded again", path, error)
                path.unlink(missing_ok=True)
                continue
            if vectors is not None:
                yield vectors

    def write(self, digests: list[bytes], vectors: NDArray[np.float32]) -> None:
        """Adds a shard.

        Args:
            digests: The hashes of n passages.
            vectors: Their vectors, (n, d).

        Raises:
            UserError: The disk is full, or the folder cannot be written to. What was there before is untouched.
        """
        keys = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(digests), DIGEST_BYTES)
        checksum = _checksum(keys, vectors)
        content = save({"digests": keys, "vectors": vectors}, metadata={"checksum": checksum})
        # Not tempfile's: that makes files which only this user may read, in what may be a team's cache.
        temporary = self.folder / f"{checksum}.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(self.folder / f"{checksum}.safetensors")
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _remove_stale(self) -> None:
        for path in self.folder.glob("*.tmp"):
            try:
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()
            except FileNotFoundError:
                continue


def _cannot_write(folder: Path, error: OSError) -> UserError:
    if error.errno not in _DISK_FULL:
        return UserError(f"cannot write to the cache {folder}: {error.strerror}; choose another with --cache-dir")
    return UserError(
        f"the disk is full at {folder}; what was encoded before is kept: make room, or move the cache and name its new "
        f"place with --cache-dir, and run again to continue"
    )


def _read_shard(path: Path, rows: Mapping[bytes, int], found: set[bytes]) -> CachedVectors | None:
    """What a shard has of `rows` that is not in `found` yet, which is updated; None where that is nothing."""
    with safe_open(path, framework="numpy") as shard:
        keys = shard.get_tensor("digests")
        if keys.ndim != 2 or keys.shape[1] != DIGEST_BYTES or keys.dtype != np.uint8:
            raise ValueError(f"digests of shape {keys.shape}")
        digests = [key.tobytes() for key in keys]
        wanted = {digest: position for position, digest in enumerate(digests) if digest in rows and digest not in found}
        if not wanted:
            return None
        vectors = shard.get_tensor("vectors")
        if vectors.ndim != 2 or len(vectors) != len(digests) or vectors.dtype != np.float32:
            raise ValueError(f"vectors of shape {vectors.shape}")
        if _checksum(keys, vectors) != (shard.metadata() or {}).get("checksum"):
            raise ValueError("its checksum is wrong")
    found.update(wanted)
    numbers = np.fromiter((rows[digest] for digest in wanted), dtype=np.int64, count=len(wanted))
    return CachedVectors(numbers, vectors[list(wanted.values())])


def _checksum(keys: NDArray[np.uint8], vectors: NDArray[np.float32]) -> str:
    digest = hashlib.blake2b(keys.tobytes(), digest_size=16)
    digest.update(np.ascontiguousarray(vectors).tobytes())
    return digest.hexdigest()
