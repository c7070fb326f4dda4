"""Texts on disk: an Arrow file of any size, read through a memory map, with duplicates removed.

Memory holds only a few numbers per text. Texts that differ in white space only count as duplicates: a negative must not be
the positive with different line breaks, and data sets differ in whether a space or a line break follows a passage's title.

Letters in names: L lines of the file (texts as given), N distinct texts, M lines that repeat an earlier text.
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
from revela_hub.files import atomic, checksum

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


class TextFile:
    """The distinct texts of a file, numbered in the order of their first appearance.

    Args:
        path: The Arrow file; the numbers below are next to it, in a file of the same name that ends in `.npz`.

    Attributes:
        rows_L: The number of the text on each line.
        keys_N: A 64-bit hash of each text without its white space.
        digests_N2: A 128-bit hash of each text.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.fingerprint = path, path.stem.removeprefix("texts-")
        try:
            with np.load(path.with_suffix(".npz"), allow_pickle=False) as numbers:
                self.rows_L: NDArray[np.int64] = numbers["rows"]
                self.keys_N: NDArray[np.uint64] = numbers["keys"]
                self.digests_N2: NDArray[np.uint64] = numbers["digests"]
            self._file = pa.ipc.open_file(pa.memory_map(str(path)))
            if self._file.num_record_batches != -(-len(self.rows_L) // LINES_PER_BATCH):
                raise ValueError("the numbers next to it belong to other texts")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, pa.ArrowInvalid) as error:
            raise UserError(f"{path} cannot be read ({error}): repeat the command that wrote it") from error
        self._lines_N = np.flatnonzero(np.diff(np.maximum.accumulate(self.rows_L), prepend=-1))
        self._batch: tuple[int, pa.RecordBatch] = (-1, None)  # the one read last

    def __reduce__(self) -> tuple[Any, ...]:
        return TextFile, (self.path.absolute(),)  # where the texts are, not the texts

    def __len__(self) -> int:
        return len(self.keys_N)

    def read(self, rows: Iterable[int]) -> list[str]:
        """See `TextSource`."""
        return self.column("text", (int(self._lines_N[row]) for row in rows))

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
        lines_M, rows_M = self._repeated
        return [int(self._lines_N[row]), *lines_M[rows_M == row].tolist()]

    @cached_property
    def _repeated(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The lines that repeat an earlier text (M,), and the numbers of these texts (M,)."""
        lines_M = np.delete(np.arange(len(self.rows_L)), self._lines_N)
        return lines_M, self.rows_L[lines_M]


def write_texts(texts: Iterable[str | Mapping[str, Any]], folder: Path, schema: pa.Schema = TEXT) -> TextFile:
    """Write texts to a folder, in a file named after a hash of their content.

    Args:
        texts: The texts, read once and never held in memory together; mappings if the schema has more columns than `text`.
        folder: The folder.
        schema: The columns of the file, one of them `text`.
    """
    keys, digests = array("Q"), array("Q")
    source = _records(texts)
    unnamed = folder / f"texts-{uuid.uuid4().hex}.arrow"
    with (
        atomic(unnamed) as temporary,
        pa.OSFile(str(temporary), "wb") as stream,
        pa.ipc.new_file(stream, schema) as writer,
    ):
        while batch := list(islice(source, LINES_PER_BATCH)):
            for record in batch:
                keys.append(_key(record["text"]))
                digests.extend(_digest(record["text"]))
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
    digests_L2 = np.array(digests, dtype="<u8").reshape(-1, 2)
    path = unnamed.with_name(f"texts-{checksum(digests_L2)}.arrow")
    distinct, first_L, inverse_L = np.unique(np.array(keys, dtype="<u8"), return_index=True, return_inverse=True)
    order = np.argsort(first_L)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    with atomic(path.with_suffix(".npz")) as temporary, temporary.open("wb") as stream:
        np.savez(stream, rows=rank[inverse_L.reshape(-1)], keys=distinct[order], digests=digests_L2[first_L[order]])
    unnamed.replace(path)
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
