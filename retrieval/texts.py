"""Texts on disk: an Arrow file of any size, read through a memory map, with duplicates removed.

Memory holds only a few numbers per text. Texts that differ in white space only count as duplicates: a negative must not be
the positive with different line breaks, and data sets differ in whether a space or a line break follows a passage's title.

Letters in names: L lines of the file (texts as given), N distinct texts.
"""

import hashlib
import uuid
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from revela_hub.data.sources.unicode import without_surrogates
from revela_hub.errors import UserError
from revela_hub.retrieval.disk import checksum, write_array
from revela_hub.whole_files import whole_file

LINES_PER_BATCH = 1024

TEXT = pa.schema([("text", pa.large_string())])


class TextSource(Protocol):
    """Numbered texts, from a file (`TextFile`) or a list (`TextList`)."""

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
        self.texts = texts
        self.digests_N2 = np.array([_digest(text) for text in texts], dtype="<u8").reshape(-1, 2)
        self.fingerprint = checksum(self.digests_N2)

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, rows: Iterable[int]) -> list[str]:
        """See `TextSource`."""
        return [self.texts[row] for row in rows]


class TextRange:
    """The texts of another source from `start` up to, but not including, `stop`, as a `TextSource`."""

    def __init__(self, texts: TextSource, start: int, stop: int) -> None:
        self._texts, self._start = texts, start
        self.digests_N2 = texts.digests_N2[start:stop]
        self.fingerprint = f"{texts.fingerprint}[{start}:{stop}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return TextRange, (self._texts, self._start, self._start + len(self))

    def __len__(self) -> int:
        return len(self.digests_N2)

    def read(self, rows: Iterable[int]) -> list[str]:
        """See `TextSource`."""
        return self._texts.read(self._start + row for row in rows)


class TextFile:
    """The distinct texts of a file, numbered in the order of their first appearance.

    Opening takes the same time and memory for any number of texts: everything is read through memory maps, and the offsets
    of the file's batches are in its footer.

    Args:
        path: The Arrow file; the `.npy` files of `_Numbers` with the same name are next to it.

    Raises:
        UserError: A file is missing or incomplete.

    Attributes:
        rows_L: The number of the text on each line.
        keys_N: A 64-bit hash of each text without its white space.
        digests_N2: A 128-bit hash of each text.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._numbers = numbers = _Numbers.read(path)
            self._file = pa.ipc.open_file(pa.memory_map(str(path)))
            if self._file.num_record_batches != -(-len(numbers.rows) // LINES_PER_BATCH):
                raise ValueError("the files next to it belong to other texts")
        except (OSError, ValueError, EOFError, pa.ArrowInvalid) as error:
            raise UserError(
                f"{path} cannot be read ({error}): repeat the command that wrote it, which keeps its vectors"
            ) from error
        self.rows_L, self.keys_N, self.digests_N2 = numbers.rows, numbers.keys, numbers.digests
        self.fingerprint = path.stem.removeprefix("texts-")
        self._batch: tuple[int, pa.RecordBatch] = (-1, None)  # the one read last
        self._order_N: NDArray[np.int64] | None = None  # the sorting order of the keys

    def __reduce__(self) -> tuple[Any, ...]:
        return TextFile, (self.path.absolute(),)  # where the texts are, not the texts

    def __len__(self) -> int:
        return len(self.keys_N)

    def read(self, rows: Iterable[int]) -> list[str]:
        """See `TextSource`."""
        return self.column("text", (int(self._numbers.lines[row]) for row in rows))

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        names: list[str] = self._file.schema.names
        return names

    def column(self, name: str, lines: Iterable[int]) -> list[Any]:
        """Return the values of a column on these lines of the file."""
        return [self._batch_of(line).column(name)[line % LINES_PER_BATCH].as_py() for line in lines]

    def _batch_of(self, line: int) -> pa.RecordBatch:
        number, batch = self._batch
        if number != line // LINES_PER_BATCH:
            number = line // LINES_PER_BATCH
            batch = self._file.get_batch(number)
            self._batch = number, batch
        return batch

    def lines_of(self, row: int) -> list[int]:
        """Return the lines that hold a text."""
        repeated_2M = self._numbers.repeated
        begin, end = np.searchsorted(repeated_2M[0], [row, row + 1])
        return [int(self._numbers.lines[row]), *map(int, repeated_2M[1, begin:end])]

    def find(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the number of the text with each of these keys, -1 for an unknown key."""
        if self._order_N is None:
            self._order_N = np.argsort(self.keys_N)
        places = np.searchsorted(self.keys_N, keys, sorter=self._order_N)
        rows: NDArray[np.int64] = self._order_N[np.minimum(places, len(self) - 1)]
        return np.where(self.keys_N[rows] == keys, rows, -1)


class _Numbers(NamedTuple):
    """The numbers of a file of texts, each in a `.npy` file that is mapped into memory: `texts-<hash>.rows.npy`, ...

    Attributes:
        rows: The number of the text on each line (L,).
        keys: See `TextFile` (N,).
        digests: See `TextFile` (N, 2).
        lines: The line on which each text first appears (N,).
        repeated: The M lines that repeat an earlier text: the numbers of the texts, ascending, and the lines (2, M).
    """

    rows: NDArray[np.int64]
    keys: NDArray[np.uint64]
    digests: NDArray[np.uint64]
    lines: NDArray[np.int64]
    repeated: NDArray[np.int64]

    @classmethod
    def of(cls, rows_L: NDArray[np.int64], keys_N: NDArray[np.uint64], digests_N2: NDArray[np.uint64]) -> "_Numbers":
        """Return all numbers."""
        lines_N = np.flatnonzero(np.diff(np.maximum.accumulate(rows_L), prepend=-1))
        lines_M = np.delete(np.arange(len(rows_L)), lines_N)
        lines_M = lines_M[np.argsort(rows_L[lines_M], kind="stable")]
        return cls(rows_L, keys_N, digests_N2, lines_N, np.stack([rows_L[lines_M], lines_M]))

    @classmethod
    def read(cls, path: Path) -> "_Numbers":
        """Map the numbers of a file of texts into memory.

        Raises:
            OSError, ValueError, EOFError: They cannot be read, or do not belong together.
        """
        numbers = cls(*(np.load(_numbers_path(path, name), mmap_mode="r", allow_pickle=False) for name in cls._fields))
        distinct = {len(numbers.keys), len(numbers.digests), len(numbers.lines)}
        if len(distinct) > 1 or len(numbers.rows) != len(numbers.lines) + numbers.repeated.shape[1]:
            raise ValueError("the files next to it do not match each other")
        return numbers

    def write(self, path: Path) -> None:
        """Write the numbers of a file of texts."""
        for name, numbers in self._asdict().items():
            with whole_file(_numbers_path(path, name)) as stream:
                write_array(stream, numbers)


def _numbers_path(path: Path, name: str) -> Path:
    return path.with_suffix(f".{name}.npy")


def write_texts(texts: Iterable[str | Mapping[str, Any]], folder: Path, schema: pa.Schema = TEXT) -> TextFile:
    """Write texts to a folder, in a file named after a hash of their content.

    Args:
        texts: The texts, read once and never held in memory together; mappings if the schema has more columns than `text`.
        folder: The folder.
        schema: The columns of the file, one of them `text`.
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
    _Numbers.of(rank[inverse_L.reshape(-1)], distinct[order], digests_L2[first_L[order]]).write(path)
    return TextFile(path)


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
