"""Numbered vectors: the input of every index, in memory or in the shards of a `VectorStore`.

The places of an index's vectors are kept in its store, in a folder `layout-<hash of the texts>` of files that are mapped into
memory, so that opening an index of any size reads neither its vectors nor their hashes:

    shards.npy, places.npy   for each text, its shard and its position in the shard
    shards.json              the names and sizes of the shards

Letters in names: N texts, D the dimension of the vectors, R requested rows.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError, first_line
from revela_hub.retrieval.disk import checksum, mapped, write_array
from revela_hub.whole_files import whole_path, writing

CHECKED_ROWS = 16
"""Vectors whose text hashes are compared when a layout is opened."""


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
        files: The shards.
        shards_N: The shard of each vector.
        places_N: Its position in the shard.
        dimension: D; of longer vectors on disk, the first D components are returned.
        normalize: Whether vectors are returned with unit length, after truncation.
        key: A hash that changes with the model and the texts.
        reused: The number of vectors that existed when the store was opened.
    """

    files: Sequence[Path]
    shards_N: NDArray[np.int32]
    places_N: NDArray[np.int32]
    dimension: int
    normalize: bool
    key: str
    reused: int = 0

    def __len__(self) -> int:
        return len(self.shards_N)

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """See `NumberedVectors`."""
        return self.take(np.arange(start, min(stop, len(self))))

    def take(self, rows_R: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `NumberedVectors`."""
        stored_RD = self.records(rows_R)["vector"][:, : self.dimension]
        vectors_RD = np.array(stored_RD, dtype=np.float32, order="C")
        if self.normalize:  # a zero vector stays zero
            lengths_R = np.sqrt(np.einsum("rd,rd->r", vectors_RD, vectors_RD))  # without a copy, unlike np.linalg.norm
            vectors_RD /= np.maximum(lengths_R, 1e-12)[:, None]
        return vectors_RD

    def records(self, rows_R: NDArray[np.int64]) -> NDArray[Any]:
        """Return the records of these vectors, with the hashes of their texts."""
        shards_R, places_R = self.shards_N[rows_R], self.places_N[rows_R]
        order_R, runs = None, _runs(shards_R, places_R)
        if len(runs) > len(rows_R) // 64:  # not mostly consecutive: each shard is opened once
            order_R = np.lexsort((places_R, shards_R))
            shards_R, places_R = shards_R[order_R], places_R[order_R]
            runs = _runs(shards_R, places_R)
        records_R = np.empty(len(rows_R), dtype=self._layout if len(rows_R) else [("vector", "<f4", (self.dimension,))])
        first = 0
        while first < len(runs):
            shard, last = shards_R[runs[first]], first + 1
            while last < len(runs) and shards_R[runs[last]] == shard:
                last += 1
            bounds = [*runs[first:last], runs[last] if last < len(runs) else len(rows_R)]
            self._read_shard(self.files[int(shard)], places_R, bounds, records_R)
            first = last
        if order_R is None:
            return records_R
        found_R = np.empty_like(records_R)
        found_R[order_R] = records_R
        return found_R

    @staticmethod
    def _read_shard(path: Path, places_R: NDArray[np.int32], bounds: list[int], records_R: NDArray[Any]) -> None:
        """Read records of a shard: between two bounds, their positions are consecutive."""
        size, content = records_R.dtype.itemsize, records_R.view(np.uint8).data
        try:
            # Opened each time: a process may have only 1,024 open files. Not mapped: a file that is cut meanwhile would kill
            # the process.
            with path.open("rb", buffering=0) as stream:
                header = stream.read(10)  # of the .npy format: its length is in the last two bytes
                start = len(header) + int.from_bytes(header[8:], "little")
                for begin, end in pairwise(bounds):
                    stream.seek(start + int(places_R[begin]) * size)
                    if stream.readinto(content[begin * size : end * size]) != (end - begin) * size:
                        raise EOFError("the file is too short")
        except (OSError, EOFError) as error:
            raise _unreadable(path, error) from error

    @cached_property
    def _layout(self) -> np.dtype[Any]:
        """The type of the records, the same for all shards."""
        try:
            return mapped(self.files[0]).dtype
        except (OSError, ValueError, EOFError) as error:
            raise _unreadable(self.files[0], error) from error

    def write_layout(self, texts: str) -> None:
        """Write the places of the vectors of texts, by the fingerprint of the texts, to their store."""
        folder = self.files[0].parent
        shards = {"names": [file.name for file in self.files], "sizes": [file.stat().st_size for file in self.files]}
        option = "--output_dir"
        with whole_path(_layout_folder(folder, texts), option) as temporary, writing(folder, option):
            temporary.mkdir()
            for name, array in (("shards", self.shards_N), ("places", self.places_N)):
                with (temporary / f"{name}.npy").open("wb") as stream:
                    write_array(stream, array)
            (temporary / "shards.json").write_text(json.dumps(shards) + "\n", encoding="utf-8")

    @classmethod
    def from_layout(
        cls,
        folder: Path,
        texts: str,
        digests_N2: NDArray[np.uint64],
        *,
        normalize: bool,
        truncate_dim: int | None,
        key: str,
    ) -> "Vectors | None":
        """Return the vectors of texts with this fingerprint and these hashes, without reading them, from the store in a folder.

        The names and sizes of all shards, and the hashes of 16 texts, are compared: None if there is no layout that fits.
        """
        layout = _layout_folder(folder, texts)
        try:
            shards = json.loads((layout / "shards.json").read_text(encoding="utf-8"))
            shards_N, places_N = (mapped(layout / f"{name}.npy") for name in ("shards", "places"))
            fits = [(folder / name).stat().st_size for name in shards["names"]] == shards["sizes"]
            if not fits or not shards_N.shape == places_N.shape == (len(digests_N2),):
                return None
            files = tuple(folder / name for name in shards["names"])
            vectors = cls(files, shards_N, places_N, 0, normalize, key)
            dimension = vectors._layout["vector"].shape[0]
            rows = np.linspace(0, len(vectors) - 1, min(CHECKED_ROWS, len(vectors))).astype(np.int64)
            if (vectors.records(rows)["digest"] != digests_N2[rows]).any():
                return None
        except (OSError, ValueError, KeyError, TypeError, EOFError, IndexError, UserError):
            return None
        return cls(files, shards_N, places_N, truncated_dimension(dimension, truncate_dim), normalize, key)


def _runs(shards_R: NDArray[np.int32], places_R: NDArray[np.int32]) -> list[int]:
    """Return where each run of consecutive positions in a shard begins."""
    breaks = (shards_R[1:] != shards_R[:-1]) | (places_R[1:] != places_R[:-1] + 1)
    return [0, *(np.flatnonzero(breaks) + 1).tolist()] if len(shards_R) else []


def _layout_folder(folder: Path, texts: str) -> Path:
    return folder / f"layout-{texts}"


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read ({first_line(error)}): run the command again to encode it again")


def truncated_dimension(dimension: int, truncate_dim: int | None) -> int:
    """Return the dimension of truncated vectors."""
    if truncate_dim is not None and dimension and truncate_dim > dimension:
        raise UserError(
            f"the model's vectors have {dimension} dimensions, fewer than the {truncate_dim} requested: lower the number"
        )
    return truncate_dim or dimension
