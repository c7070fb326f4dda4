"""Vectors in Milvus, for collections that outgrow one machine, behind the same `search(vectors, k)` as every index here.

The URI selects a local file (Milvus Lite, for tests and examples), a server or a cluster. The token of a server is read from
the environment variable MILVUS_TOKEN and never written to disk.
"""

import copy
import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError, first_line, require
from revela_hub.retrieval.bm25 import BM25
from revela_hub.retrieval.disk import key_of
from revela_hub.retrieval.milvus_fields import BM25_WEIGHTS, ID, VECTOR, MilvusFields
from revela_hub.retrieval.stored_vectors import NumberedVectors
from revela_hub.retrieval.top_k import Hits

logger = logging.getLogger(__name__)

BATCH_ROWS = 1000
"""Vectors per call: Milvus accepts up to 64 MB at a time."""
MAX_HITS = 16_384
"""Milvus's limit on the hits of one search."""


class MilvusIndex:
    """A collection of vectors.

    Args:
        vectors: The vectors to search; those missing from the collection are inserted.
        uri: `http://host:19530`, or a path that ends in `.db`.
        fields: Metadata and BM25 weights of the passages, to store with the vectors.
        folder: The folder of the index: others do not share its collection, even with the same passages.
        name: The name of the collection; None: hashes of the model and the texts, and of the folder.
    """

    def __init__(
        self,
        vectors: NumberedVectors,
        uri: str,
        fields: MilvusFields | None = None,
        folder: Path | None = None,
        name: str | None = None,
    ) -> None:
        require("pymilvus")
        self._size = len(vectors)
        self._uri = uri
        self.fields = fields
        self.filter: str | None = None
        key = vectors.key if fields is None else key_of(vectors.key, fields.key)
        self.name = name or f"revela_hub_{key[:16]}{_end_of_name(folder)}"
        self._client = _call(self._uri, lambda: _client(uri))
        _call(self._uri, lambda: self._fill(vectors))

    @property
    def bm25(self) -> BM25 | None:
        """The BM25 index whose weights are in the collection, if they are."""
        return self.fields.bm25 if self.fields is not None else None

    def where(self, expression: str) -> "MilvusIndex":
        """Return this index, restricted to the passages whose metadata match an expression of Milvus."""
        from pymilvus.exceptions import MilvusException

        names = self.fields.metadata if self.fields is not None else {}
        if not names:
            raise UserError("--filter: the index has no metadata: build it with --metadata_columns COLUMN ...")
        found = copy.copy(self)
        found.filter = expression
        try:
            self._client.query(self.name, filter=expression, limit=1, output_fields=[ID])
        except (MilvusException, ValueError) as error:
            shown = ", ".join(f"{name} ({kind})" for name, kind in names.items())
            raise UserError(f"--filter {expression!r}: {_reason(error)}; the fields are {shown}") from error
        return found

    def search(self, vectors_QD: NDArray[np.float32], k: int) -> Hits:
        """See `VectorIndex`; at most 16,384 hits per query, Milvus's limit."""
        return self._search(VECTOR, vectors_QD.astype(np.float32), k)

    def search_words(self, queries: Sequence[Sequence[int]], k: int) -> Hits:
        """Return the best passages by BM25 for queries as `BM25.encode` returns them."""
        some = [number for number, words in enumerate(queries) if words]
        counts = [{word: float(times) for word, times in Counter(queries[number]).items()} for number in some]
        found = self._search(BM25_WEIGHTS, counts, k)
        scores_QK = np.full((len(queries), found.scores_QK.shape[1]), -np.inf, dtype=np.float32)
        rows_QK = np.full(scores_QK.shape, -1, dtype=np.int64)
        scores_QK[some], rows_QK[some] = found.scores_QK, found.rows_QK
        return Hits(scores_QK, rows_QK)

    def _search(self, field: str, queries: Any, k: int) -> Hits:
        if not self._size or not len(queries):
            return Hits.none(len(queries))
        k = min(k, self._size, MAX_HITS)
        scores_QK = np.full((len(queries), k), -np.inf, dtype=np.float32)
        rows_QK = np.full((len(queries), k), -1, dtype=np.int64)
        for start in range(0, len(queries), BATCH_ROWS):
            part = queries[start : start + BATCH_ROWS]
            part = part.tolist() if isinstance(part, np.ndarray) else part
            found = _call(
                self._uri,
                lambda part=part: self._client.search(
                    self.name, data=part, anns_field=field, limit=k, filter=self.filter or ""
                ),
            )
            for query, hits in enumerate(found, start=start):
                ranked = sorted((-hit["distance"], hit["id"]) for hit in hits)
                scores_QK[query, : len(ranked)] = [-score for score, _ in ranked]
                rows_QK[query, : len(ranked)] = [row for _, row in ranked]
        return Hits(scores_QK, rows_QK)

    def drop(self) -> None:
        """Deletes the collection, and nothing else on the server."""
        _call(self._uri, lambda: self._client.drop_collection(self.name))

    def _fill(self, vectors: NumberedVectors) -> None:
        found = self._client.has_collection(self.name)
        if not found:
            self._create(vectors.dimension)
        self._client.load_collection(self.name)
        # Vectors are inserted in order, so the collection holds the first `stored` of them, and after an interruption perhaps
        # a part of the next call. These are replaced; the others are inserted, because Milvus before 2.3.11 puts replaced rows
        # into the wrong partitions (milvus-io/milvus#30607). Not the statistics' row_count:
        # it counts replaced vectors twice until the server compacts its segments.
        [counted] = self._client.query(self.name, filter="", output_fields=["count(*)"], consistency_level="Strong")
        stored = int(counted["count(*)"])
        for start in range(max(0, stored - BATCH_ROWS), self._size if stored < self._size else 0, BATCH_ROWS):
            block = vectors.read(start, start + BATCH_ROWS)
            rows = [{ID: start + row, VECTOR: vector.tolist()} for row, vector in enumerate(block)]
            if self.fields is not None:
                rows = [row | more for row, more in zip(rows, self.fields.read(start, start + BATCH_ROWS), strict=True)]
            write = self._client.upsert if found and start < stored + BATCH_ROWS else self._client.insert
            write(self.name, rows)

    def _create(self, dimension: int) -> None:
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field(ID, DataType.INT64, is_primary=True)
        schema.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=dimension)
        indexes = self._client.prepare_index_params()
        indexes.add_index(VECTOR, index_type="AUTOINDEX", metric_type="IP")
        if self.fields is not None:
            self.fields.declare(schema, indexes)
        try:
            self._client.create_collection(self.name, schema=schema, index_params=indexes, consistency_level="Strong")
        except Exception:  # it may exist without its indexes
            self._client.drop_collection(self.name)
            raise


class MilvusBM25:
    """BM25 in Milvus (a `Ranker`), with the words of a `BM25`, whose weights the collection has."""

    def __init__(self, index: MilvusIndex, bm25: BM25) -> None:
        self.key = key_of("milvus", bm25.key, index.filter)
        self.encode, self.why_nothing, self.pair_scores = bm25.encode, bm25.why_nothing, bm25.pair_scores
        self.search = index.search_words


def is_collection_of(folder: Path, name: str) -> bool:
    """Return whether a collection was made for the index in a folder, not for the folder's original or copy."""
    return name.endswith(_end_of_name(folder))


def _end_of_name(folder: Path | None) -> str:
    return "" if folder is None else f"_{key_of(str(folder.resolve()))[:16]}"


def drop_collection(uri: str, name: str) -> None:
    """Deletes the collection of a replaced index; a server that does not answer is a warning, as the new index is complete."""

    def drop() -> None:
        client = _client(uri)
        if client.has_collection(name):
            client.drop_collection(name)

    try:
        require("pymilvus")
        _call(uri, drop)
    except UserError as error:
        logger.warning("the collection %s of the replaced index could not be deleted: %s", name, error)


def check_connection(uri: str) -> None:
    """Check before long work that Milvus answers."""
    require("pymilvus")
    _call(uri, lambda: _client(uri).close())


def _call(uri: str, action: Any) -> Any:
    from pymilvus.exceptions import MilvusException

    try:
        return action()
    except (MilvusException, OSError, ValueError) as error:
        raise UserError(f"Milvus at {uri}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the server's message in one line, with the usual remedies."""
    reason = first_line(ValueError(getattr(error, "message", str(error))))
    if "Fail connecting to server" in reason:
        reason += " (is it running, and does MILVUS_TOKEN hold user:password or an API key if it asks for one?)"
    elif "104 field is not supported" in reason:  # the number of the type of sparse vectors
        reason = "this server has no sparse vectors, which --milvus_bm25 needs: update it to Milvus 2.4 or newer"
    return reason


def _client(uri: str) -> Any:
    from pymilvus import MilvusClient

    local = Path(uri) if uri.endswith(".db") else None
    if local is not None and local.is_file():
        raise UserError(
            f"{uri} was written by Milvus Lite 2, which Milvus Lite 3 cannot read: delete the file, and the index is built"
            " again from the vectors on disk"
        )
    for name in ("pymilvus", "milvus_lite"):  # they log a traceback for each error that they raise
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        return MilvusClient(uri, token=os.environ.get("MILVUS_TOKEN", ""), timeout=10)
    except Exception as error:
        if local is not None and "Open local milvus failed" in str(error):
            raise UserError(
                f"{uri} cannot be opened: another process uses it (start a Milvus server to share it), or it is damaged"
            ) from error
        raise
