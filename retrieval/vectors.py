"""Vectors of texts on disk: encoded once, found by the hash of their text, read through memory maps.

A store belongs to one model, including its prompt and everything else that affects a vector, and is a folder of shards. A
shard is an `.npy` file of records, written once, never changed, and named after its checksum:

    digest   uint64 (2,)   the hash of the text
    vector   (D,)          the model's output, not normalised; float32, or float16 for half the space

Therefore an interrupted run resumes, an unchanged text is not encoded again even if it moves to another file, and several
processes or machines can fill one store. Shards are written atomically. A shard that does not match its checksum is deleted
with a warning, and its texts are encoded again. Nothing else is deleted: to empty a store, delete its folder.

Each shard is read and compared with its checksum once. `checked.npz` then stores its size, modification time and digests, so
that the next process opens the store without reading the vectors; a shard with a different size or time is checked again. To
check all shards again, delete `checked.npz`.

Letters in names: N texts, M stored vectors, D their dimension.
"""

import contextlib
import json
import logging
import re
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from revela_hub.errors import UserError
from revela_hub.retrieval.disk import checksum, key_of, make_folder, write_array
from revela_hub.retrieval.stored_vectors import Vectors, truncated_dimension
from revela_hub.retrieval.texts import TextSource
from revela_hub.whole_files import whole_file, write_text

logger = logging.getLogger(__name__)

FIRST_SHARD, SHARD_SIZE = 32, 8192
"""Vectors in the first shard of a run, and the maximum, to which shards double: an interruption loses at most one shard."""
SHARD_SECONDS = 30.0
"""Shards stop growing when one takes this long."""

CHECKED_FILE = "checked.npz"
_NAME = re.compile(r"[0-9a-f]{32}\.npy")
_STAMP = ("names", "sizes", "times")


class _Stamp(NamedTuple):
    """The properties that show that a shard has not changed since it was compared with its checksum."""

    name: str
    size: int
    changed: int

    @classmethod
    def of(cls, path: Path) -> "_Stamp":
        status = path.stat()
        return cls(path.name, status.st_size, status.st_mtime_ns)


Encode = Callable[[list[str], Callable[[int], object]], NDArray[np.float32]]


class VectorStore:
    """The vectors of one model.

    Args:
        folder: The folder of all stores; this one uses a subfolder.
        identity: Everything that the vectors depend on besides the texts: model, prompt, truncation.
        dtype: "float32", or "float16" for half the space and three significant digits.
        option: The command-line option that sets the folder, for messages.
    """

    def __init__(self, folder: Path, identity: str, *, dtype: str = "float32", option: str = "--cache_dir") -> None:
        self.identity = identity
        self._arguments = folder, identity, dtype, option
        self.folder = make_folder(store_folder(Path(folder), identity, dtype), option)
        self._dtype = np.dtype(dtype)
        self._option = option
        self._dimension: int | None = None
        self._shards: dict[_Stamp, NDArray[np.uint64]] = {}  # the digests in each
        self._checked = self._read_checked()
        self.refresh()
        self._opened = len(self._shards)
        if not (self.folder / "store.json").is_file():
            write_text(self.folder / "store.json", json.dumps({"model": identity, "dtype": dtype}, indent=2), option)

    def __reduce__(self) -> tuple[Any, ...]:
        folder, identity, dtype, option = self._arguments  # where the store is, not what it holds
        return partial(VectorStore, Path(folder).absolute(), identity, dtype=dtype, option=option), ()

    def refresh(self) -> None:
        """Reads which vectors other processes have added."""
        known = {stamp.name for stamp in self._shards}
        for path in sorted(self.folder.glob("*.npy")):
            if _NAME.fullmatch(path.name) and path.name not in known:
                self._open(path)
        with contextlib.suppress(UserError):  # a read-only folder is checked again next time
            self._save_checked()

    def fill(self, texts: TextSource, encode: "Encode", description: str | None = None) -> None:
        """Encodes and writes the missing vectors, in shards that start small.

        Args:
            texts: The texts.
            encode: Encodes texts to vectors (N, D); its second argument is called with the number of encoded texts.
            description: The label of the progress bar; None hides it.

        Raises:
            UserError: The disk is full, or the vectors overflow the dtype.
        """
        missing = self.missing(texts)
        size, start = FIRST_SHARD, 0
        with tqdm(total=len(missing), desc=description, unit=" texts", disable=description is None) as bar:
            while start < len(missing):
                rows, began = missing[start : start + size], time.monotonic()
                self.add(texts, rows, encode, bar.update)
                start += len(rows)
                if time.monotonic() - began < SHARD_SECONDS:
                    size = min(2 * size, SHARD_SIZE)
        self._save_checked()

    def missing(self, texts: TextSource) -> NDArray[np.int64]:
        """Return the numbers of the texts that have no vector, each of several equal texts once."""
        missing = np.flatnonzero(self._find(texts.digests_N2) < 0)
        return missing[np.sort(np.unique(texts.digests_N2[missing], axis=0, return_index=True)[1])]

    def add(
        self,
        texts: TextSource,
        rows: NDArray[np.int64],
        encode: "Encode",
        progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Encodes the texts with these numbers, and writes their vectors as one shard."""
        self._write(texts.digests_N2[rows], encode(texts.read(rows.tolist()), progress))

    def vectors(self, texts: TextSource, *, normalize: bool = False, truncate_dim: int | None = None) -> Vectors:
        """Return the vectors of these texts, in their order, or their first `truncate_dim` components."""
        places_N = self._find(texts.digests_N2)
        if (absent := int((places_N < 0).sum())) > 0:
            raise UserError(
                f"{absent:,} of {len(texts):,} texts are not encoded in {self.folder}: run revela-hub index again"
            )
        starts = np.cumsum([0, *map(len, self._shards.values())])
        shards_N = np.searchsorted(starts, places_N, side="right").astype(np.int32) - 1
        return Vectors(
            tuple(self.folder / stamp.name for stamp in self._shards),
            shards_N.astype(np.int32),
            (places_N - starts[shards_N]).astype(np.int32),
            truncated_dimension(self._dimension or 0, truncate_dim),
            normalize,
            vectors_key(self.identity, self._dtype.name, texts.fingerprint, normalize, truncate_dim),
            int((shards_N < self._opened).sum()),
        )

    def _find(self, digests_N2: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the position of each digest, counted over all shards; -1 if it is missing."""
        if not self._shards:
            return np.full(len(digests_N2), -1, dtype=np.int64)
        all_M2 = np.concatenate(list(self._shards.values()))
        order_M = np.argsort(all_M2[:, 0], kind="stable")
        order_N = np.argsort(digests_N2[:, 0])  # ascending, a search takes a tenth of the time
        at_N = np.empty(len(digests_N2), dtype=np.int64)
        at_N[order_N] = np.searchsorted(all_M2[order_M, 0], digests_N2[order_N, 0])
        places_N = order_M[np.minimum(at_N, len(all_M2) - 1)]
        return np.where((all_M2[places_N] == digests_N2).all(axis=1), places_N, -1)

    def _read_checked(self) -> dict[_Stamp, NDArray[np.uint64]]:
        """Read which shards were compared with their checksums, and their digests."""
        path = self.folder / CHECKED_FILE
        try:
            with np.load(path, allow_pickle=False) as arrays:
                self._dimension = int(arrays["dimension"])
                stamps = zip(*(arrays[name].tolist() for name in _STAMP), strict=True)
                digests = np.split(arrays["digests"], np.cumsum(arrays["counts"])[:-1])
                return dict(zip((_Stamp(*stamp) for stamp in stamps), digests, strict=True))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            logger.warning("%s is damaged (%s): comparing all vectors with their checksums", path, error)
        self._dimension = None
        return {}

    def _save_checked(self) -> None:
        """Writes which shards were checked."""
        if list(self._checked) == list(self._shards) or not self._shards or self._dimension is None:
            return
        arrays: dict[str, Any] = dict(zip(_STAMP, zip(*self._shards, strict=True), strict=True))
        counts, digests = list(map(len, self._shards.values())), np.concatenate(list(self._shards.values()))
        with whole_file(self.folder / CHECKED_FILE, self._option) as stream:
            np.savez(stream, **arrays, counts=counts, digests=digests, dimension=self._dimension)
        self._checked = dict(self._shards)

    def _open(self, path: Path) -> None:
        """Adds a shard to the store, comparing it with its checksum unless that was done before."""
        try:
            stamp = _Stamp.of(path)
            if stamp in self._checked:
                self._shards[stamp] = self._checked[stamp]
                return
            records = np.load(path, mmap_mode="r", allow_pickle=False)
            if records.ndim != 1 or records.dtype.names != ("digest", "vector") or checksum(records) != path.stem:
                raise ValueError("wrong checksum")
        except FileNotFoundError:  # another process found it damaged and deleted it
            return
        except OSError as error:  # not deleted: it may be intact
            logger.warning("%s cannot be read (%s): its texts must be encoded again", path, error)
            return
        except (ValueError, EOFError) as error:
            logger.warning("%s is damaged (%s): its texts must be encoded again", path, error)
            path.unlink(missing_ok=True)
            return
        self._add(stamp, records)

    def _add(self, stamp: _Stamp, records: NDArray[Any]) -> None:
        dimension = records.dtype["vector"].shape[0]
        if self._dimension not in (None, dimension):
            raise ValueError(
                f"{self.folder} has vectors of dimension {dimension} and {self._dimension}: "
                f"the identity {self.identity!r} is shared by two models"
            )
        self._dimension = dimension
        self._shards[stamp] = np.array(records["digest"], dtype=np.uint64)

    def _write(self, digests_N2: NDArray[np.uint64], vectors_ND: NDArray[np.float32]) -> None:
        layout = [("digest", "<u8", (2,)), ("vector", self._dtype, (vectors_ND.shape[1],))]
        records = np.empty(len(vectors_ND), dtype=layout)
        records["digest"] = digests_N2
        with np.errstate(over="ignore"):
            records["vector"] = vectors_ND
        if not np.isfinite(records["vector"]).all():
            raise UserError(f"the model's vectors overflow {self._dtype}; store them as float32")
        path = self.folder / f"{checksum(records)}.npy"
        with whole_file(path, self._option) as stream:
            write_array(stream, records)
        self._add(_Stamp.of(path), records)


def store_folder(folder: Path, identity: str, dtype: str) -> Path:
    """Return the folder of a model's vectors."""
    return folder / f"vectors-{key_of(identity, dtype)[:16]}"


def vectors_key(identity: str, dtype: str, texts: str, normalize: bool, truncate_dim: int | None) -> str:
    """Return `Vectors.key` of texts with this fingerprint."""
    return key_of(identity, dtype, texts, normalize, *filter(None, [truncate_dim]))
