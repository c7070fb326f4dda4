"""Vectors in Milvus, for collections that outgrow one machine, behind the same `search(vectors, k)` as every index here.

The URI selects a local file (Milvus Lite, for tests and examples), a server or a cluster. The token of a server is read from
the environment variable MILVUS_TOKEN and never written to disk.
"""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError, first_line, install_hint
from revela_hub.retrieval.stored_vectors import NumberedVectors
from revela_hub.retrieval.top_k import Hits

INSERT = 1000
"""Vectors per call: Milvus accepts up to 64 MB at a time."""
MAX_HITS = 16_384
"""Milvus's limit on the hits of one search."""


class MilvusIndex:
    """A collection of vectors, named after a hash of the model and the texts.

    Args:
        vectors: The vectors to search; those missing from the collection are inserted.
        uri: `http://host:19530`, or a path that ends in `.db`.

    Raises:
        UserError: pymilvus is not installed, or the server does not answer.
    """

    def __init__(self, vectors: NumberedVectors, uri: str) -> None:
        """Connects, and inserts missing vectors."""
        self._size = len(vectors)
        self._uri = uri
        self._name = f"revela_hub_{vectors.key[:16]}"
        self._client = self._call(lambda: _client(uri))
        self._call(lambda: self._fill(vectors))

    def __len__(self) -> int:
        return self._size

    def search(self, vectors_QD: NDArray[np.float32], k: int) -> Hits:
        """See `VectorIndex`; at most 16,384 hits per query, Milvus's limit."""
        if not self._size or not len(vectors_QD):
            return Hits.none(len(vectors_QD))
        k = min(k, self._size, MAX_HITS)
        scores_QK = np.full((len(vectors_QD), k), -np.inf, dtype=np.float32)
        rows_QK = np.full((len(vectors_QD), k), -1, dtype=np.int64)
        for start in range(0, len(vectors_QD), INSERT):
            part = vectors_QD[start : start + INSERT].astype(np.float32).tolist()
            found = self._call(lambda part=part: self._client.search(self._name, data=part, limit=k))
            for query, hits in enumerate(found, start=start):
                ranked = sorted((-hit["distance"], hit["id"]) for hit in hits)
                scores_QK[query, : len(ranked)] = [-score for score, _ in ranked]
                rows_QK[query, : len(ranked)] = [row for _, row in ranked]
        return Hits(scores_QK, rows_QK)

    def drop(self) -> None:
        """Deletes the collection, and nothing else on the server."""
        self._call(lambda: self._client.drop_collection(self._name))

    def _fill(self, vectors: NumberedVectors) -> None:
        if not self._client.has_collection(self._name):
            self._client.create_collection(
                self._name, dimension=vectors.dimension, metric_type="IP", auto_id=False, consistency_level="Strong"
            )
        self._client.load_collection(self._name)
        # Vectors are inserted in order, so the collection holds the first `stored` of them. Not the statistics' row_count:
        # it counts replaced vectors twice until the server compacts its segments.
        [counted] = self._client.query(self._name, filter="", output_fields=["count(*)"], consistency_level="Strong")
        stored = int(counted["count(*)"])
        for start in range(max(0, stored - INSERT), self._size if stored < self._size else 0, INSERT):
            block = vectors.read(start, start + INSERT)
            self._client.upsert(
                self._name, [{"id": start + row, "vector": vector.tolist()} for row, vector in enumerate(block)]
            )

    def _call(self, action: Any) -> Any:
        try:
            from pymilvus.exceptions import MilvusException
        except ImportError as error:
            raise UserError(install_hint("pymilvus")) from error
        try:
            return action()
        except (MilvusException, OSError, ValueError) as error:
            raise UserError(f"Milvus at {self._uri}: {first_line(error)}") from error


def _client(uri: str) -> Any:
    from pymilvus import MilvusClient

    return MilvusClient(uri, token=os.environ.get("MILVUS_TOKEN", ""), timeout=10)
