"""The fields of a Milvus collection besides the vectors: metadata of the passages, for filters, and their BM25 weights.

The BM25 weight of each word is computed here, on the whole collection, and stored as a sparse vector. Its inner product with
the number of times that each word occurs in a query is the BM25 score of `bm25.BM25`. Milvus's own full-text search splits
and weights words differently.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from revela_hub.errors import UserError
from revela_hub.retrieval.bm25 import BM25
from revela_hub.retrieval.disk import key_of
from revela_hub.retrieval.index_options import IndexOptions
from revela_hub.retrieval.passages import Passages, metadata_types

ID, VECTOR, BM25_WEIGHTS = "id", "vector", "bm25"
MAX_TEXT = 65_535
"""Milvus's limit on the bytes of a text field."""
BLOCK = 1000
"""Passages that are checked at a time."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")


def metadata_fields(passages: Passages) -> dict[str, str]:
    """Return the names and Milvus types of the metadata of passages."""
    kinds = metadata_types(passages)
    for name in kinds:
        if not _NAME.fullmatch(name) or name in (ID, VECTOR, BM25_WEIGHTS):
            reserved = f"other than {ID}, {VECTOR} and {BM25_WEIGHTS}"
            raise UserError(
                f"--metadata_columns {name!r}: a field of Milvus has a name of letters, digits and underscores, {reserved}:"
                " rename the column"
            )
    return kinds


@dataclass(frozen=True)
class MilvusFields:
    """The fields of passages besides their vectors.

    Attributes:
        passages: The passages.
        metadata: Names and types of metadata, as `metadata_fields` returns them.
        bm25: The BM25 index of the passages, to store its weights; None: no weights.
        partition_key: The name of the metadata that divides the collection into partitions.
    """

    passages: Passages
    metadata: Mapping[str, str]
    bm25: BM25 | None = None
    partition_key: str | None = None

    @property
    def key(self) -> str:
        """Changes with any of the values."""
        bm25 = None if self.bm25 is None else self.bm25.key
        return key_of(self.passages.texts.fingerprint, dict(self.metadata), bm25, self.partition_key)

    def declare(self, schema: Any, indexes: Any) -> None:
        """Add the fields to the schema of a new collection and to the parameters of its indexes."""
        from pymilvus import DataType

        for name, kind in self.metadata.items():
            options = {"max_length": MAX_TEXT} if kind == "varchar" else {}
            # Milvus allows no missing values in the field that divides a collection.
            place = {"is_partition_key": True} if name == self.partition_key else {"nullable": True}
            schema.add_field(name, DataType[kind.upper()], **place, **options)
        if self.bm25 is not None:
            schema.add_field(BM25_WEIGHTS, DataType.SPARSE_FLOAT_VECTOR)
            indexes.add_index(BM25_WEIGHTS, index_type="SPARSE_INVERTED_INDEX", metric_type="IP")

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return the fields of the passages from `start` up to, but not including, `stop`."""
        stop = min(stop, len(self.passages))
        rows = self._values(start, stop)
        if self.bm25 is not None:
            block = self._weights[start:stop]
            for number, row in enumerate(rows):
                place = slice(*block.indptr[number : number + 2])
                weights = dict(zip(block.indices[place].tolist(), block.data[place].tolist(), strict=True))
                # Milvus does not store empty sparse vectors: a passage without words gets a word that no query has.
                row[BM25_WEIGHTS] = weights or {block.shape[1]: 1.0}
        return rows

    def check(self) -> None:
        """Check the metadata of all passages before long work.

        Raises:
            UserError: A passage has a text that is too long for Milvus, or no value in the column that divides the collection.
        """
        for start in range(0, len(self.passages) if self.metadata else 0, BLOCK):
            self._values(start, min(start + BLOCK, len(self.passages)))

    def _values(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return the metadata of passages."""
        found = self.passages.metadata(range(start, stop)) if self.metadata else [{}] * (stop - start)
        return [self._checked(number, values or {}) for number, values in enumerate(found, start)]

    def _checked(self, number: int, found: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: found.get(name) for name in self.metadata}
        for name, value in values.items():
            if isinstance(value, str) and len(value.encode()) > MAX_TEXT:
                raise UserError(
                    f"--metadata_columns {name}: {self.passages.hit(number, 0.0).location} has a text of"
                    f" {len(value.encode()):,} bytes in this column, but Milvus allows {MAX_TEXT:,}: shorten it, or leave out the"
                    " column"
                )
            if value is None and name == self.partition_key:
                raise UserError(
                    f"--milvus_partition_key {name}: {self.passages.hit(number, 0.0).location} has no value in this column:"
                    " add one, or choose a column with a value in every row"
                )
            if value is not None and self.metadata[name] == "double":
                values[name] = float(value)
        return values

    @cached_property
    def _weights(self) -> Any:
        assert self.bm25 is not None
        return self.bm25.weights()


def milvus_fields(
    passages: Passages, metadata: Mapping[str, str], options: IndexOptions, folder: Path
) -> MilvusFields | None:
    """Return the fields of an index in a folder; None if it has vectors only."""
    key = options.milvus_partition_key
    if key is not None and metadata.get(key) not in ("varchar", "int64"):
        reason = f"its values are {metadata[key]}" if key in metadata else "--metadata_columns does not name it"
        raise UserError(f"--milvus_partition_key {key}: the column must hold text or whole numbers, but {reason}")
    bm25 = BM25(passages.texts, folder=folder) if options.milvus_bm25 else None
    return MilvusFields(passages, metadata, bm25, key) if metadata or bm25 else None
