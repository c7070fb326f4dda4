"""Vectors of texts on disk: encoded once, found by the hash of their text, read in parts, so that they may exceed memory.

A store belongs to one model, with its prompt and everything else that affects a vector, and is a folder of shards:

    vectors-<number>-<random>.npy   (n, D) the model's output, not normalised; float32, or float16 for half the space
    digests-<number>-<random>.npy   (n, 2) the hashes of the n texts, uint64; written last

Shards get their name when they are complete, and are never changed. So an interrupted run resumes, an unchanged text is not
encoded again even if it moves to another file, and several processes or machines can fill one store. Nothing is deleted: to
empty a store, delete its folder.

Letters in names: N texts, M stored vectors, D their dimension, R requested rows.
"""

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from revela_hub.errors import UserError
from revela_hub.files import atomic, checksum, key_of
from revela_hub.retrieval.texts import TextSource

logger = logging.getLogger(__name__)

FIRST_SHARD, SHARD_SIZE = 32, 32_768
"""Vectors in the first shard of a run, and the maximum, to which shards double: an interruption loses at most one shard."""
SHARD_SECONDS = 30.0
"""Shards stop growing when one takes this long."""

Encode = Callable[[list[str], Callable[[int], object]], NDArray[np.float32]]


class NumberedVectors(Protocol):
    """The input of an index: `Vectors` on disk, or `VectorsInMemory`."""

    @property
    def dimension(self) -> int:
        """D."""
        ...

    @property
    def key(self) -> str:
        """A hash of the vectors."""
        ...

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return the vectors from `start` up to, but not including, `stop`: (stop - start, D)."""
        ...

    def take(self, rows_R: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors with these numbers, (R, D)."""
        ...


class VectorsInMemory:
    """Vectors that are used once, such as those of a model in training."""

    def __init__(self, vectors_ND: NDArray[np.float32]) -> None:
        self._vectors_ND, self.dimension = vectors_ND, vectors_ND.shape[1]
        self.key = checksum(vectors_ND)

    def __len__(self) -> int:
        return len(self._vectors_ND)

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """See `NumberedVectors`."""
        return self._vectors_ND[start:stop]

    def take(self, rows_R: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `NumberedVectors`."""
        return self._vectors_ND[rows_R]


@dataclass(frozen=True)
class Vectors:
    """The vectors of numbered texts (N, D), on disk.

    Attributes:
        files: The shards' vectors.
        starts: The place of each shard's first vector, if all shards are counted together, and at the end their number M.
        places_N: The place of each vector.
        dimension: D; of longer vectors on disk, the first D components are returned.
        normalize: Whether vectors are returned with unit length, after truncation.
        key: A hash that changes with the model and the texts.
        reused: The number of vectors that existed when the store was opened.
    """

    files: Sequence[Path]
    starts: NDArray[np.int64]
    places_N: NDArray[np.int64]
    dimension: int
    normalize: bool
    key: str
    reused: int = 0

    def __len__(self) -> int:
        return len(self.places_N)

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """See `NumberedVectors`."""
        return self._at(self.places_N[start:stop])

    def take(self, rows_R: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `NumberedVectors`."""
        return self._at(self.places_N[rows_R])

    def _at(self, places_R: NDArray[np.int64]) -> NDArray[np.float32]:
        vectors_RD = np.empty((len(places_R), self.dimension), dtype=np.float32)
        order_R = np.argsort(places_R, kind="stable")
        bounds = np.searchsorted(places_R, self.starts, sorter=order_R)
        for shard in np.flatnonzero(np.diff(bounds)).tolist():
            rows = order_R[bounds[shard] : bounds[shard + 1]]
            # Opened each time: a process may have only 1,024 open files.
            stored_nD = np.load(self.files[shard], mmap_mode="r", allow_pickle=False)
            vectors_RD[rows] = stored_nD[places_R[rows] - self.starts[shard], : self.dimension]
        if self.normalize:  # a zero vector stays zero
            lengths_R = np.sqrt(np.einsum("rd,rd->r", vectors_RD, vectors_RD))  # without a copy, unlike np.linalg.norm
            vectors_RD /= np.maximum(lengths_R, 1e-12)[:, None]
        return vectors_RD


class VectorStore:
    """The vectors of one model.

    Args:
        folder: The folder of all stores; this one uses a subfolder.
        identity: Everything that the vectors depend on besides the texts: model, prompt, truncation.
        dtype: "float32", or "float16" for half the space and three significant digits.
    """

    def __init__(self, folder: Path, identity: str, *, dtype: str = "float32") -> None:
        self.identity, self.folder = identity, store_folder(folder, identity, dtype)
        self._parent, self._dtype = folder, np.dtype(dtype)
        self._dimension: int | None = None
        self._shards: dict[Path, NDArray[np.uint64]] = {}  # the file of the vectors -> digests (n, 2)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.refresh()
        self._opened = sum(map(len, self._shards.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Where the store is, not what it holds.
        return partial(VectorStore, self._parent.absolute(), self.identity, dtype=self._dtype.name), ()

    def refresh(self) -> None:
        """Read which vectors other processes have added."""
        for digests in sorted(self.folder.glob("digests-*.npy")):
            path = digests.with_name(f"vectors-{digests.name.removeprefix('digests-')}")
            if path not in self._shards:
                self._open(path, digests)

    def _open(self, path: Path, digests: Path) -> None:
        try:
            digests_M2 = np.load(digests, allow_pickle=False)
            stored = np.load(path, mmap_mode="r", allow_pickle=False)  # raises an error if the file is too short
            if stored.dtype != self._dtype or (len(stored), 2) != digests_M2.shape:
                raise ValueError(f"{stored.dtype} {stored.shape}")
        except (OSError, ValueError, EOFError) as error:
            logger.warning("%s is damaged (%s): its texts must be encoded again", path, error)
            return
        self._add(path, digests_M2, stored.shape[1])

    def _add(self, path: Path, digests_M2: NDArray[np.uint64], dimension: int) -> None:
        if self._dimension not in (None, dimension):
            raise ValueError(
                f"{self.folder} has vectors of dimension {dimension} and {self._dimension}: "
                f"the identity {self.identity!r} is shared by two models"
            )
        self._dimension = dimension
        self._shards[path] = digests_M2

    def fill(
        self, texts: TextSource, encode: "Encode", description: str | None = None, *, part: slice = slice(None)
    ) -> None:
        """Encode and write the missing vectors, in shards that start small.

        Args:
            texts: The texts.
            encode: Encodes texts to vectors (N, D); its second argument is called with the number of encoded texts.
            description: The label of the progress bar; None hides it.
            part: Only these of the texts.
        """
        missing = self.missing(texts, part)
        size, start = FIRST_SHARD, 0
        with tqdm(total=len(missing), desc=description, unit=" texts", disable=description is None) as bar:
            while start < len(missing):
                rows, began = missing[start : start + size], time.monotonic()
                self.add(texts, rows, encode, bar.update)
                start += len(rows)
                if time.monotonic() - began < SHARD_SECONDS:
                    size = min(2 * size, SHARD_SIZE)

    def missing(self, texts: TextSource, part: slice = slice(None)) -> NDArray[np.int64]:
        """Return the numbers of the texts in a part that have no vector, each of several equal texts once."""
        missing = np.flatnonzero(self._find(texts.digests_N2[part]) < 0) + (part.start or 0)
        return missing[np.sort(np.unique(texts.digests_N2[missing], axis=0, return_index=True)[1])]

    def add(
        self,
        texts: TextSource,
        rows: NDArray[np.int64],
        encode: "Encode",
        progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Encode the texts with these numbers, and write their vectors as one shard."""
        vectors_MD, digests_M2 = encode(texts.read(rows.tolist()), progress), texts.digests_N2[rows]
        with np.errstate(over="ignore"):
            stored_MD = np.asarray(vectors_MD, dtype=self._dtype)
        if not np.isfinite(stored_MD).all():
            raise UserError(f"the model's vectors overflow {self._dtype}; store them as float32")
        name = f"{len(self._shards):05}-{uuid.uuid4().hex[:12]}.npy"
        for kind, array in (("vectors", stored_MD), ("digests", digests_M2)):
            with atomic(self.folder / f"{kind}-{name}") as temporary, temporary.open("wb") as stream:
                np.save(stream, array, allow_pickle=False)
        self._add(self.folder / f"vectors-{name}", digests_M2, stored_MD.shape[1])

    def vectors(self, texts: TextSource, *, normalize: bool = False, truncate_dim: int | None = None) -> Vectors:
        """Return the vectors of these texts, in their order, or their first `truncate_dim` components."""
        places_N = self._find(texts.digests_N2)
        if (absent := int((places_N < 0).sum())) > 0:
            raise UserError(
                f"{absent:,} of {len(texts):,} texts are not encoded in {self.folder}: run revela-hub index again"
            )
        key = key_of(self.identity, self._dtype.name, texts.fingerprint, normalize, truncate_dim)
        starts = np.cumsum([0, *map(len, self._shards.values())])
        dimension = truncated_dimension(self._dimension or 0, truncate_dim)
        reused = int((places_N < self._opened).sum())
        return Vectors(tuple(self._shards), starts, places_N, dimension, normalize, key, reused)

    def _find(self, digests_N2: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the place of each digest, counted over all shards; -1 if it is missing."""
        if not self._shards:
            return np.full(len(digests_N2), -1, dtype=np.int64)
        all_M2 = np.concatenate(list(self._shards.values()))
        if np.array_equal(all_M2, digests_N2):  # an index that was built at once
            return np.arange(len(all_M2))
        order_M = np.argsort(all_M2[:, 0], kind="stable")
        order_N = np.argsort(digests_N2[:, 0])  # ascending, a search takes a tenth of the time
        at_N = np.empty(len(digests_N2), dtype=np.int64)
        at_N[order_N] = np.searchsorted(all_M2[order_M, 0], digests_N2[order_N, 0])
        places_N = order_M[np.minimum(at_N, len(all_M2) - 1)]
        return np.where((all_M2[places_N] == digests_N2).all(axis=1), places_N, -1)


def store_folder(folder: Path, identity: str, dtype: str) -> Path:
    """Return the folder of a model's vectors."""
    return folder / f"vectors-{key_of(identity, dtype)[:16]}"


def truncated_dimension(dimension: int, truncate_dim: int | None) -> int:
    """Return the dimension of truncated vectors."""
    if truncate_dim is not None and dimension and truncate_dim > dimension:
        raise UserError(
            f"the model's vectors have {dimension} dimensions, fewer than the {truncate_dim} requested: lower the number"
        )
    return truncate_dim or dimension
