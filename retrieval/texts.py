"""Texts on disk: as many as there are, in an Arrow file that is read through a memory map, each of them once.

What is held in memory is a few numbers for each text: a hash, by which it is found, and the line on which it stands. Texts
that differ in white space only are the same text here: a negative must not be the positive with other line breaks, and
the title of a passage is joined to it by a space in one data set and by a line break in the next.
"""

import hashlib
import uuid
from array import array
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from revela_hub.retrieval.disk import key_of, whole_file

LINES_PER_BATCH = 1024

_SCHEMA = pa.schema([("text", pa.large_string())])


def text_key(text: str) -> int:
    """A hash of 64 bits: that any two of ten million texts share one by chance happens in one of 400,000 collections."""
    words = " ".join(text.split())
    return int.from_bytes(hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


class Texts:
    """Distinct texts, numbered in the order in which they were first met.

    Args:
        path: The Arrow file; a line of it is a text.
        lines_N: The line of each of the N texts.
        keys_N: The `text_key` of each.
        fingerprint: Changes when any of the texts does, or their order.
    """

    def __init__(self, path: Path, lines_N: NDArray[np.int64], keys_N: NDArray[np.uint64], fingerprint: str) -> None:
        """Opens nothing yet."""
        self.fingerprint = fingerprint
        self.keys_N = keys_N
        self._path = path
        self._lines_N = lines_N
        self._order_N: NDArray[np.int64] | None = None  # of the keys
        self._column: Any = None

    def __len__(self) -> int:
        return len(self._lines_N)

    def read(self, rows: Iterable[int]) -> list[str]:
        """The texts of these numbers."""
        if self._column is None:
            # Neither reads the file: the chunks are views of the memory map.
            self._column = pa.ipc.open_file(pa.memory_map(str(self._path))).read_all().column("text")
        places = (divmod(int(self._lines_N[row]), LINES_PER_BATCH) for row in rows)
        return [self._column.chunk(batch)[line].as_py() for batch, line in places]

    def find(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The number of the text with each of these keys, -1 where there is none."""
        if not len(self):
            return np.full(len(keys), -1, dtype=np.int64)
        if self._order_N is None:
            self._order_N = np.argsort(self.keys_N)
        places = np.searchsorted(self.keys_N, keys, sorter=self._order_N)
        rows: NDArray[np.int64] = self._order_N[np.minimum(places, len(self) - 1)]
        return np.where(self.keys_N[rows] == keys, rows, -1)

    def subset(self, rows: NDArray[np.int64]) -> "Texts":
        """Some of the texts, numbered anew."""
        rows_key = hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()
        return Texts(self._path, self._lines_N[rows], self.keys_N[rows], key_of(self.fingerprint, rows_key))


def write_texts(texts: Iterable[str], folder: Path) -> tuple[Texts, NDArray[np.int64]]:
    """Writes texts to a folder, under a name made from what they are.

    Args:
        texts: Is read once, and never held in memory as a whole.
        folder: Where the file is kept.

    Returns:
        The distinct texts, and for each text that was given its number among them.

    Raises:
        UserError: The disk is full, or the folder cannot be written to.
    """
    keys = array("Q")
    digest = hashlib.blake2b(digest_size=16)
    unnamed = folder / f"texts-{uuid.uuid4().hex}.arrow"
    source = iter(texts)
    with whole_file(unnamed) as stream, pa.ipc.new_file(stream, _SCHEMA) as writer:
        while batch := [_unicode(text) for text in islice(source, LINES_PER_BATCH)]:
            keys.extend(map(text_key, batch))
            for text in batch:
                digest.update(text.encode() + b"\0")
            writer.write_batch(pa.record_batch([pa.array(batch, pa.large_string())], schema=_SCHEMA))
    fingerprint = digest.hexdigest()
    path = unnamed.replace(folder / f"texts-{fingerprint}.arrow")
    distinct, first, inverse = np.unique(np.array(keys, dtype=np.uint64), return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return Texts(path, first[order], distinct[order], fingerprint), rank[inverse.reshape(-1)]


def _unicode(text: str) -> str:
    """Replaces lone surrogates, which JSON can have, and which neither Arrow nor a tokenizer takes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
