"""Vectors in Milvus, for collections that outgrow one machine: the same `search(vectors, k)` as every index here.

The same client and code talk to a file (Milvus Lite, for tests and examples), a server and a cluster; which of them is said
by the URI alone. A token for a server comes from the environment variable MILVUS_TOKEN and is written nowhere.
"""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError, first_line, install_hint
from revela_hub.retrieval.top_k import Hits
from revela_hub.retrieval.vectors import NumberedVectors

INSERT = 1000
"""Vectors per call: Milvus takes up to 64 MB at a time."""
MOST_HITS = 16_384
"""Milvus's own limit for one search."""


class MilvusIndex:
    """A collection of vectors, named by the model and the texts they are of.

    Args:
        vectors: What is searched; those that the collection does not have yet are inserted.
        uri: `http://host:19530`, or a path that ends in `.db`.

    Raises:
        UserError: pymilvus is not installed, or the server does not answer.
    """

    def __init__(self, vectors: NumberedVectors, uri: str) -> None:
        """Connects, and inserts what is missing."""
        self._size = len(vectors)
        self._uri = uri
        self._name = f"revela_hub_{vectors.key[:16]}"
        self._client = self._call(lambda: _client(uri))
        self._call(lambda: self._fill(vectors))

    def __len__(self) -> int:
        return self._size

    def search(self, vectors_QD: NDArray[np.float32], k: int) -> Hits:
        """See `VectorIndex`; at most 16,384 hits, Milvus's own limit."""
        if not self._size or not len(vectors_QD):
            return Hits.none(len(vectors_QD))
        k = min(k, self._size, MOST_HITS)
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
        """Deletes the collection, and nothing else of the server."""
        self._call(lambda: self._client.drop_collection(self._name))

    def _fill(self, vectors: NumberedVectors) -> None:
        if not self._client.has_collection(self._name):
            self._client.create_collection(
                self._name, dimension=vectors.dimension, metric_type="IP", auto_id=False, consistency_level="Strong"
            )
        self._client.load_collection(self._name)
        # In order, so that the first `there` numbers are those that the collection has. Not the statistics' row_count:
        # it counts a vector again that was replaced, until the server has compacted its segments.
        [counted] = self._client.query(self._name, filter="", output_fields=["count(*)"], consistency_level="Strong")
        there = int(counted["count(*)"])
        for start in range(max(0, there - INSERT), self._size if there < self._size else 0, INSERT):
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
