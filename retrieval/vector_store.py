"""Vectors of texts on disk, written block by block and read through a memory map.

A store belongs to one model and one collection of texts, and is a folder with

    manifest.json              what it belongs to
    000000.<checksum>.npy      (BLOCK_SIZE, D), the vectors of the texts 0, 1, ...; the last block has fewer

A block appears under its name only when it is complete, so an interrupted run goes on with the first block that is not
there. A block whose content does not fit its checksum is deleted with a warning and encoded again.

Not `search.cache.VectorCache`, which finds vectors by the hash of their text: it holds 150 bytes of memory per text, and
its shards have no order in which they could be searched without being loaded.

Letters in names: N texts of a block, D the vectors' dimension, R rows asked for.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from revela_hub.errors import UserError
from revela_hub.retrieval.disk import key_of, make_folder, whole_file
from revela_hub.retrieval.texts import Texts

logger = logging.getLogger(__name__)

BLOCK_SIZE = 1024
"""Vectors per file: what an interruption can cost."""


class VectorStore:
    """The vectors of `texts`, those that are not on disk yet encoded.

    Args:
        folder: Where stores are kept; this one gets a folder of its own in it.
        texts: The texts, in the order of the vectors.
        encode: Texts to vectors (N, D), float32.
        identity: What the vectors depend on besides the texts: model, prompt, normalisation.
        dtype: "float32", or "float16" for half the space and three significant digits.
        description: For the progress bar; None shows none.

    Raises:
        UserError: The disk is full, the folder cannot be written to, or the vectors do not fit the type.
    """

    def __init__(
        self,
        folder: Path,
        texts: Texts,
        encode: Callable[[list[str]], NDArray[np.float32]],
        *,
        identity: str,
        dtype: str = "float32",
        description: str | None = None,
    ) -> None:
        """Encodes and writes what is missing."""
        manifest = {
            "model": identity,
            "texts": texts.fingerprint,
            "number": len(texts),
            "dtype": dtype,
            "block_size": BLOCK_SIZE,
        }
        self.key = key_of(manifest)
        self.folder = make_folder(folder / f"vectors-{self.key}")
        self._size = len(texts)
        self._dtype = np.dtype(dtype)
        self._files = self._whole_blocks()
        self.reused = sum(self._length(number) for number in self._files)
        if not (self.folder / "manifest.json").is_file():
            with whole_file(self.folder / "manifest.json") as stream:
                stream.write(json.dumps(manifest, indent=2).encode())
        self._fill(texts, encode, description)

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        """The vectors from `start` to before `stop`, (stop - start, D)."""
        return self.take(np.arange(start, stop))

    def take(self, rows_R: NDArray[np.int64]) -> NDArray[np.float32]:
        """The vectors of these numbers, (R, D)."""
        blocks_R = rows_R // BLOCK_SIZE
        vectors_RD: NDArray[np.float32] | None = None
        for number in np.unique(blocks_R).tolist():
            # Opened anew each time: a memory map is a file that stays open, and a process may have 1,024 of them.
            block_ND = np.load(self._files[number], mmap_mode="r", allow_pickle=False)
            if vectors_RD is None:
                vectors_RD = np.empty((len(rows_R), block_ND.shape[1]), dtype=np.float32)
            chosen_R = blocks_R == number
            vectors_RD[chosen_R] = block_ND[rows_R[chosen_R] - number * BLOCK_SIZE]
        return np.empty((0, 0), dtype=np.float32) if vectors_RD is None else vectors_RD

    def _length(self, number: int) -> int:
        return min(BLOCK_SIZE, self._size - number * BLOCK_SIZE)

    def _whole_blocks(self) -> dict[int, Path]:
        """The blocks that are there, and are what was written."""
        files: dict[int, Path] = {}
        for path in sorted(self.folder.glob("*.npy")):
            number, checksum = path.name.split(".")[:2]
            try:
                block_ND = np.load(path, mmap_mode="r", allow_pickle=False)
                if block_ND.shape[0] != self._length(int(number)) or block_ND.dtype != self._dtype:
                    raise ValueError(f"{block_ND.dtype} of shape {block_ND.shape}")
                if _checksum(block_ND) != checksum:
                    raise ValueError("its checksum is wrong")
            except (ValueError, EOFError) as error:
                logger.warning("%s is damaged (%s): its texts are encoded again", path, error)
                path.unlink(missing_ok=True)
                continue
            files[int(number)] = path
        return files

    def _fill(self, texts: Texts, encode: Callable[[list[str]], NDArray[np.float32]], description: str | None) -> None:
        missing = [number for number in range(-(-self._size // BLOCK_SIZE)) if number not in self._files]
        total = sum(self._length(number) for number in missing)
        with tqdm(total=total, desc=description, unit=" texts", disable=description is None or not total) as bar:
            for number in missing:
                start = number * BLOCK_SIZE
                block_ND = self._converted(encode(texts.read(range(start, start + self._length(number)))))
                path = self.folder / f"{number:06d}.{_checksum(block_ND)}.npy"
                with whole_file(path) as stream:
                    # Not numpy.save, and not a memory map that is written to: where the disk is full, one raises an
                    # OSError without its number, and the other ends the process.
                    np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(block_ND))
                    stream.write(block_ND.data)
                self._files[number] = path
                bar.update(len(block_ND))

    def _converted(self, vectors_ND: NDArray[np.float32]) -> NDArray[Any]:
        with np.errstate(over="ignore"):
            block_ND = np.ascontiguousarray(vectors_ND, dtype=self._dtype)
        if not np.isfinite(block_ND).all():
            raise UserError(f"the model's vectors have numbers too large for {self._dtype}; store them as float32")
        return block_ND


def _checksum(block_ND: NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(block_ND).data, digest_size=16).hexdigest()
