"""Texts on disk: as many as there are, in an Arrow file that is read through a memory map, each of them once.

What is held in memory is a few numbers for each text. Texts that differ in white space only are the same text here: a
negative must not be the positive with other line breaks, and the title of a passage is joined to it by a space in one data
set and by a line break in the next.

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
    """Numbered texts: those of a file (`Texts`), or of a list (`TextList`)."""

    fingerprint: str
    """Changes when any of the texts does, or their order."""
    digests_N2: NDArray[np.uint64]
    """The hash of each text, of 128 bits: what its vector is found by."""

    def __len__(self) -> int: ...

    def read(self, rows: Iterable[int]) -> list[str]:
        """The texts of these numbers."""
        ...


class TextList:
    """A list of texts as a `TextSource`; the same text may come twice."""

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
        """Numbers the texts from `start` to before `stop` anew."""
        self._texts, self._start = texts, start
        self.digests_N2 = texts.digests_N2[start:stop]
        self.fingerprint = f"{texts.fingerprint}[{start}:{stop}]"

    def __len__(self) -> int:
        return len(self.digests_N2)

    def read(self, rows: Iterable[int]) -> list[str]:
        """See `TextSource`."""
        return self._texts.read(self._start + row for row in rows)


class Texts:
    """The distinct texts of a file, numbered in the order in which they were first met.

    Args:
        path: The Arrow file; its numbers lie beside it.

    Raises:
        UserError: The file, or its numbers, cannot be read.
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
                raise ValueError("its numbers are those of other texts")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, pa.ArrowInvalid) as error:
            raise UserError(f"{path} cannot be read ({error}): delete its folder, and make it again") from error
        self.fingerprint = path.stem.removeprefix("texts-")
        # Of each text the line on which it first stands: texts are numbered in that order.
        self._lines_N = np.flatnonzero(np.diff(np.maximum.accumulate(self.rows_L), prepend=-1))
        self._order_N: NDArray[np.int64] | None = None  # of the keys

    def __len__(self) -> int:
        return len(self._lines_N)

    def read(self, rows: Iterable[int]) -> list[str]:
        """See `TextSource`."""
        return self.column("text", [int(self._lines_N[row]) for row in rows])

    def column(self, name: str, lines: Iterable[int]) -> list[Any]:
        """What these lines of the file have in a column."""
        column = self._table.column(name)
        places = (divmod(line, LINES_PER_BATCH) for line in lines)
        return [column.chunk(batch)[line].as_py() for batch, line in places]

    def lines_of(self, row: int) -> list[int]:
        """The lines on which a text stands."""
        begin, end = np.searchsorted(self._repeated_M[0], [row, row + 1])
        return [int(self._lines_N[row]), *map(int, self._repeated_M[1][begin:end])]

    @cached_property
    def _repeated_M(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The M lines whose text stands on an earlier one: the texts, ascending, and the line of each."""
        lines_M = np.delete(np.arange(len(self.rows_L)), self._lines_N)
        order_M = np.argsort(self.rows_L[lines_M], kind="stable")
        return self.rows_L[lines_M][order_M], lines_M[order_M]

    def find(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The number of the text with each of these keys, -1 where there is none."""
        if self._order_N is None:
            self._order_N = np.argsort(self.keys_N)
        places = np.searchsorted(self.keys_N, keys, sorter=self._order_N)
        rows: NDArray[np.int64] = self._order_N[np.minimum(places, len(self) - 1)]
        return np.where(self.keys_N[rows] == keys, rows, -1)


def write_texts(texts: Iterable[str | Mapping[str, Any]], folder: Path, schema: pa.Schema = TEXT) -> Texts:
    """Writes texts to a folder, under a name made from what they are.

    Args:
        texts: Is read once, and never held in memory as a whole; mappings where the schema has more than a text.
        folder: Where the file is kept.
        schema: The file's columns, one of them `text`.

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
    """A hash of 64 bits: that any two of ten million texts share one by chance happens in one of 400,000 collections."""
    words = " ".join(text.split())
    return int.from_bytes(hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _digest(text: str) -> tuple[int, int]:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
