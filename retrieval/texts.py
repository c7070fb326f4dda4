"""Texts on disk: an Arrow file of any size, read through a memory map, with duplicates removed.

Memory holds only a few numbers per text. Texts that differ in white space only count as duplicates: a negative must not be
the positive with different line breaks, and data sets differ in whether a space or a line break follows a passage's title.

Letters in names: L lines of the file (texts as given), N distinct texts.
"""

import hashlib
import uuid
import zipfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from revela_hub.data.sources.unicode import without_surrogates
from revela_hub.errors import UserError
from revela_hub.retrieval.disk import whole_file

LINES_PER_BATCH = 1024

TEXT = pa.schema([("text", pa.large_string())])


class TextSource(Protocol):
    """Numbered texts, from a file (`Texts`) or a list (`TextList`)."""

    fingerprint: str
    """Changes with any of the texts and with their order."""
    digests_N2: NDArray[np.uint64]
    """A 128-bit hash of each text, the key of its vector."""

    def __len__(self) -> int: ...

    def read(self, rows: Iterable[int]) -> list[str]:
        """Return the texts with these numbers."""
        ...


class TextList:
    """A list of texts as a `TextSource`; it may contain duplicates."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Hashes the texts."""
        self.texts = texts
        self.digests_N2 = np.array([_digest(text) for text in texts], dtype="<u8").reshape(-1, 2)
        self.fingerprint = hashlib.blake2b(self.digests_N2.tobytes(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, rows: Iterable[int]) -> list[str]:
        """See `TextSource`."""
        return [self.texts[row] for row in rows]


class Rows:
    """A range of another source's texts, as a `TextSource`."""

    def __init__(self, texts: TextSource, start: int, stop: int) -> None:
        """Renumbers the texts from `start` up to, but not including, `stop`."""
        self._texts, self._start = texts, start
        self.digests_N2 = texts.digests_N2[start:stop]
        self.fingerprint = f"{texts.fingerprint}[{start}:{stop}]"

    def __len__(self) -> int:
        return len(self.digests_N2)

    def read(self, rows: Iterable[int]) -> list[str]:
        """See `TextSource`."""
        return self._texts.read(self._start + row for row in rows)


class Texts:
    """The distinct texts of a file, numbered in the order of their first appearance.

    Args:
        path: The Arrow file; a .npz file of numbers with the same name is next to it.

    Raises:
        UserError: One of the two files cannot be read.
    """

    def __init__(self, path: Path) -> None:
        """Maps the file into memory."""
        self.path = path
        try:
            with np.load(path.with_suffix(".npz"), allow_pickle=False) as numbers:
                self.rows_L: NDArray[np.int64] = numbers["rows"]
                self.keys_N: NDArray[np.uint64] = numbers["keys"]
                self.digests_N2: NDArray[np.uint64] = numbers["digests"]
            # Neither reads the file: the columns are views of the memory map.
            self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            if len(self._table) != len(self.rows_L) or len(self.keys_N) != len(self.digests_N2):
                raise ValueError("the .npz file belongs to other texts")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, pa.ArrowInvalid) as error:
            raise UserError(f"{path} cannot be read ({error}): delete its folder, and build it again") from error
        self.fingerprint = path.stem.removeprefix("texts-")
        # The line on which each text first appears, which is the order of their numbers.
        self._lines_N = np.flatnonzero(np.diff(np.maximum.accumulate(self.rows_L), prepend=-1))
        self._order_N: NDArray[np.int64] | None = None  # the sorting order of the keys

    def __len__(self) -> int:
        return len(self._lines_N)

    def read(self, rows: Iterable[int]) -> list[str]:
        """See `TextSource`."""
        return self.column("text", [int(self._lines_N[row]) for row in rows])

    def column(self, name: str, lines: Iterable[int]) -> list[Any]:
        """Return the values of a column on these lines of the file."""
        column = self._table.column(name)
        places = (divmod(line, LINES_PER_BATCH) for line in lines)
        return [column.chunk(batch)[line].as_py() for batch, line in places]

    def lines_of(self, row: int) -> list[int]:
        """Return the lines that hold a text."""
        begin, end = np.searchsorted(self._repeated_M[0], [row, row + 1])
        return [int(self._lines_N[row]), *map(int, self._repeated_M[1][begin:end])]

    @cached_property
    def _repeated_M(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The M lines that repeat an earlier text: the numbers of the texts, ascending, and the lines."""
        lines_M = np.delete(np.arange(len(self.rows_L)), self._lines_N)
        order_M = np.argsort(self.rows_L[lines_M], kind="stable")
        return self.rows_L[lines_M][order_M], lines_M[order_M]

    def find(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the number of the text with each of these keys, -1 for an unknown key."""
        if self._order_N is None:
            self._order_N = np.argsort(self.keys_N)
        places = np.searchsorted(self.keys_N, keys, sorter=self._order_N)
        rows: NDArray[np.int64] = self._order_N[np.minimum(places, len(self) - 1)]
        return np.where(self.keys_N[rows] == keys, rows, -1)


def write_texts(texts: Iterable[str | Mapping[str, Any]], folder: Path, schema: pa.Schema = TEXT) -> Texts:
    """Write texts to a folder, in a file named after a hash of their content.

    Args:
        texts: The texts, read once and never held in memory together; mappings if the schema has more columns than `text`.
        folder: The folder.
        schema: The columns of the file, one of them `text`.

    Raises:
        UserError: The disk is full, or the folder cannot be written to.
    """
    keys, digests = array("Q"), array("Q")
    whole = hashlib.blake2b(digest_size=16)
    unnamed = folder / f"texts-{uuid.uuid4().hex}.arrow"
    source = _records(texts)
    with whole_file(unnamed) as stream, pa.ipc.new_file(stream, schema) as writer:
        while batch := list(islice(source, LINES_PER_BATCH)):
            for record in batch:
                keys.append(_key(record["text"]))
                digests.extend(_digest(record["text"]))
            whole.update(memoryview(digests)[-2 * len(batch) :])
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
    path = unnamed.replace(folder / f"texts-{whole.hexdigest()}.arrow")
    distinct, first_L, inverse_L = np.unique(np.array(keys, dtype="<u8"), return_index=True, return_inverse=True)
    order = np.argsort(first_L)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    digests_L2 = np.array(digests, dtype="<u8").reshape(-1, 2)
    with whole_file(path.with_suffix(".npz")) as stream:
        np.savez(stream, rows=rank[inverse_L.reshape(-1)], keys=distinct[order], digests=digests_L2[first_L[order]])
    return Texts(path)


def _records(texts: Iterable[str | Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for text in texts:
        record = {"text": text} if isinstance(text, str) else text
        yield record if record["text"].isascii() else {**record, "text": without_surrogates(record["text"])}


def _key(text: str) -> int:
    """Hash a text to 64 bits; among ten million texts, a collision occurs with a probability of 1 in 400,000."""
    words = " ".join(text.split())
    return int.from_bytes(hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _digest(text: str) -> tuple[int, int]:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
