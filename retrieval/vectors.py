"""Vectors of texts on disk: encoded once, found by the hash of their text, read in parts, so that they may exceed memory.

A store belongs to one model, with its prompt and everything else that affects a vector, and is a folder of shards:

    vectors-<number>-<random>.npy   (n, D) the model's output, not normalised; float32, or float16 for half the space
    digests-<number>-<random>.npy   (n,) the hashes of the n texts; written last

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError
from revela_hub.files import atomic, key_of
from revela_hub.output import progress_bar
from revela_hub.retrieval.texts import TextSource

logger = logging.getLogger(__name__)

FIRST_SHARD, SHARD_SIZE = 32, 32_768
"""Vectors in the first shard of a run, and the maximum, to which shards double: an interruption loses at most one shard."""
SHARD_SECONDS = 15.0
"""Shards stop growing when one takes this long."""

Encode = Callable[[list[str]], NDArray[np.float32]]


@dataclass(frozen=True)
class Vectors:
    """The vectors of numbered texts (N, D), on disk; read with `vectors[start:stop]` or `vectors[rows_R]`, like an array.

    Of longer vectors, the first D components are returned, then with unit length if `normalize`. Places count over all shards;
    `starts` are those of each shard's first vector, and their number M. The key is a hash of the model and the texts.
    """

    files: Sequence[Path]
    starts: NDArray[np.int64]
    places_N: NDArray[np.int64]
    dimension: int
    normalize: bool
    key: str

    def __len__(self) -> int:
        return len(self.places_N)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, D)."""
        return len(self), self.dimension

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors with these numbers, (R, D)."""
        places_R = self.places_N[rows]
        vectors_RD = np.empty((len(places_R), self.dimension), dtype=np.float32)
        order_R = np.argsort(places_R, kind="stable")
        bounds = np.searchsorted(places_R, self.starts, sorter=order_R)
        for shard in np.flatnonzero(np.diff(bounds)).tolist():
            of_shard = order_R[bounds[shard] : bounds[shard + 1]]
            # Opened each time: a process may have only 1,024 open files.
            stored_nD = np.load(self.files[shard], mmap_mode="r", allow_pickle=False)
            vectors_RD[of_shard] = stored_nD[places_R[of_shard] - self.starts[shard], : self.dimension]
        if self.normalize:  # a zero vector stays zero
            lengths_R = np.sqrt(np.einsum("rd,rd->r", vectors_RD, vectors_RD))  # without a copy, unlike np.linalg.norm
            vectors_RD /= np.maximum(lengths_R, 1e-12)[:, None]
        return vectors_RD


class VectorStore:
    """The vectors of one model, in a subfolder. The identity is all that they depend on besides the texts: model, prompt, truncation."""

    def __init__(self, folder: Path, identity: str, *, dtype: str = "float32") -> None:
        self.folder = folder / f"vectors-{key_of(identity, dtype, '64-bit digests')[:16]}"
        self._parent, self._identity, self._dtype = folder, identity, np.dtype(dtype)
        self._shards: dict[Path, NDArray[np.uint64]] = {}  # the file of the vectors -> digests (n,)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.refresh()

    def __reduce__(self) -> tuple[Any, ...]:
        # Where the store is, not what it holds.
        return partial(VectorStore, self._parent.absolute(), self._identity, dtype=self._dtype.name), ()

    def refresh(self) -> None:
        """Read which vectors other processes have added."""
        for digests in sorted(self.folder.glob("digests-*.npy")):
            path = digests.with_name(f"vectors-{digests.name.removeprefix('digests-')}")
            try:
                np.load(path, mmap_mode="r", allow_pickle=False)  # raises an error if the file is too short
                self._shards.setdefault(path, np.load(digests, allow_pickle=False))
            except (OSError, ValueError, EOFError) as error:
                logger.warning("%s is damaged (%s): its texts must be encoded again", path, error)

    def fill(
        self, texts: TextSource, encode: Encode, part: slice = slice(None), *, show_progress_bar: bool = False
    ) -> None:
        """Encode and write the missing vectors of a part of the texts, in shards that start small."""
        missing = self.missing(texts, part)
        size, start = FIRST_SHARD, 0
        with progress_bar(total=len(missing), desc="Encoding passages", unit=" texts", show=show_progress_bar) as bar:
            while start < len(missing):
                rows, began = missing[start : start + size], time.monotonic()
                self.add(texts, rows, encode)
                bar.update(len(rows))
                start += len(rows)
                if time.monotonic() - began < SHARD_SECONDS:
                    size = min(2 * size, SHARD_SIZE)

    def missing(self, texts: TextSource, part: slice = slice(None)) -> NDArray[np.int64]:
        """Return the numbers of the texts in a part that have no vector, each of several equal texts once."""
        missing = np.flatnonzero(self._find(texts.digests_N[part]) < 0) + (part.start or 0)
        return missing[np.sort(np.unique(texts.digests_N[missing], return_index=True)[1])]

    def add(self, texts: TextSource, rows: NDArray[np.int64], encode: Encode) -> None:
        """Encode the texts with these numbers, and write their vectors as one shard."""
        with np.errstate(over="ignore"):
            vectors_nD = np.asarray(encode(texts.read(rows.tolist())), dtype=self._dtype)
        if not np.isfinite(vectors_nD).all():
            raise UserError(f"the model's vectors overflow {self._dtype}; store them as float32")
        name = f"{len(self._shards):05}-{uuid.uuid4().hex[:12]}.npy"
        for kind, array in (("vectors", vectors_nD), ("digests", texts.digests_N[rows])):
            with atomic(self.folder / f"{kind}-{name}") as temporary, temporary.open("wb") as stream:
                np.save(stream, array)
        self._shards[self.folder / f"vectors-{name}"] = texts.digests_N[rows]

    def vectors(self, texts: TextSource, *, normalize: bool = False, truncate_dim: int | None = None) -> Vectors:
        """Return the vectors of these texts, in their order, or their first `truncate_dim` components."""
        places_N = self._find(texts.digests_N)
        if (absent := int((places_N < 0).sum())) > 0:
            raise UserError(
                f"{absent:,} of {len(texts):,} texts are not encoded in {self.folder}: run revela-hub index again"
            )
        key = key_of(self._identity, self._dtype.name, texts.fingerprint, normalize, truncate_dim)
        starts = np.cumsum([0, *map(len, self._shards.values())])
        first = next(iter(self._shards), None)
        dimension = 0 if first is None else int(np.load(first, mmap_mode="r", allow_pickle=False).shape[1])
        if truncate_dim and truncate_dim > dimension > 0:
            raise UserError(f"the vectors have {dimension} dimensions, fewer than {truncate_dim}: lower the number")
        return Vectors(tuple(self._shards), starts, places_N, min(truncate_dim or dimension, dimension), normalize, key)

    def _find(self, digests_N: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the place of each digest, counted over all shards; -1 if it is missing."""
        all_M = np.concatenate([np.empty(0, np.uint64), *self._shards.values()])
        if np.array_equal(all_M, digests_N):  # an index that was built at once
            return np.arange(len(all_M))
        order_M = np.argsort(all_M, kind="stable")
        at_N = np.searchsorted(all_M, digests_N, sorter=order_M)
        places_N = np.append(order_M, -1)[at_N]
        return np.where(np.append(all_M, np.uint64(0))[places_N] == digests_N, places_N, -1)
