"""Texts on disk: an Arrow file of any size, read through a memory map, with duplicates removed.

Memory holds two numbers per text. A text is identified by a 64-bit hash; among ten million texts, a collision occurs with a
probability of 1 in 400,000.

Letters in names: L lines of the file (texts as given), N distinct texts.
"""

import hashlib
import uuid
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from revela_hub.data.sources.unicode import without_surrogates
from revela_hub.files import atomic, checksum

LINES_PER_BATCH = 1024

TEXT = pa.schema([("text", pa.large_string())])


class TextList:
    """A list of texts; it may contain duplicates."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.digests_N = np.array([_digest(text) for text in texts], dtype=np.uint64)
        self.fingerprint = checksum(self.digests_N)

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, rows: Iterable[int]) -> list[str]:
        """Return the texts with these numbers."""
        return [self.texts[row] for row in rows]


class TextFile:
    """The distinct texts of a file, numbered in the order of their first appearance.

    Args:
        path: The Arrow file; the numbers below are next to it, in a file of the same name that ends in `.npz`.

    Attributes:
        rows_L: The number of the text on each line.
        digests_N: A hash of each text.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.fingerprint = path, path.stem.removeprefix("texts-")
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as numbers:
            self.rows_L: NDArray[np.int64] = numbers["rows"]
            self.digests_N: NDArray[np.uint64] = numbers["digests"]
        self._first_line_N = np.flatnonzero(np.diff(np.maximum.accumulate(self.rows_L), prepend=-1))
        self._batch = lru_cache(maxsize=1)(pa.ipc.open_file(pa.memory_map(str(path))).get_batch)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path.absolute(),)  # where the texts are, not the texts

    def __len__(self) -> int:
        return len(self.digests_N)

    def read(self, rows: Iterable[int]) -> list[str]:
        """Return the texts with these numbers."""
        return self.column("text", (int(self._first_line_N[row]) for row in rows))

    def column(self, name: str, lines: Iterable[int]) -> list[Any]:
        """Return the values of a column on these lines of the file."""
        places = (divmod(line, LINES_PER_BATCH) for line in lines)
        return [self._batch(batch).column(name)[line].as_py() for batch, line in places]


def write_texts(texts: Iterable[Mapping[str, Any]], folder: Path, schema: pa.Schema = TEXT) -> Path:
    """Write texts to a folder, and return the path of a `TextFile`, which is named after a hash of the texts.

    The texts are mappings with `text` and the other columns of the schema, read once and never held in memory together.
    """
    source, digests = iter(texts), array("Q")
    unnamed = folder / f"texts-{uuid.uuid4().hex}.arrow"
    with (
        atomic(unnamed) as temporary,
        pa.OSFile(str(temporary), "wb") as stream,
        pa.ipc.new_file(stream, schema) as writer,
    ):
        while batch := [without_surrogates(dict(record)) for record in islice(source, LINES_PER_BATCH)]:
            digests.extend(_digest(record["text"]) for record in batch)
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
    digests_L = np.array(digests, dtype=np.uint64)
    _, first_N, sorted_L = np.unique(digests_L, return_index=True, return_inverse=True)
    order_N = np.argsort(first_N)  # of the sorted texts, by their first line
    path = unnamed.with_name(f"texts-{checksum(digests_L)}.arrow")
    with atomic(path.with_suffix(".npz")) as temporary, temporary.open("wb") as stream:
        np.savez(stream, rows=np.argsort(order_N)[sorted_L], digests=digests_L[first_N[order_N]])
    unnamed.replace(path)
    return path


TextSource = TextFile | TextList
"""Numbered texts. The fingerprint changes with any of them and with their order; `digests_N` are the keys of their vectors."""


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
