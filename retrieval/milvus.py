"""Vectors in Milvus, for collections that outgrow one machine, behind the same `search(vectors, k)` as every index here.

The URI selects a server, a cluster, or a local file (Milvus Lite). The token of a server is read from the environment variable
MILVUS_TOKEN and never written to disk. BM25 in a hybrid search is computed here, from the texts in the index folder.

Collections are named after a hash of their vectors, so indexes with the same vectors share one. None is deleted.
"""

import logging
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError, first_line, require
from revela_hub.retrieval.hits import Hits
from revela_hub.retrieval.vectors import Vectors

ID, VECTOR = "id", "vector"
BATCH_ROWS = 1000
"""Vectors per call: Milvus accepts up to 64 MB at a time."""
MAX_HITS = 16_384
"""Milvus's limit on the results of one search."""


class MilvusIndex:
    """A collection, named by a hash of its vectors, of which missing ones are inserted, at `http://host:19530` or in a file `*.db`."""

    def __init__(self, vectors: Vectors | NDArray[np.float32], uri: str, key: str) -> None:
        self.vectors, self.name = vectors, f"revela_hub_{key[:32]}"
        self._client = connect(uri)
        if not self._client.has_collection(self.name):
            self._create(vectors.shape[1])
        self._client.load_collection(self.name)
        # Vectors are inserted in order, so the collection holds the first `stored` of them, and after an interruption perhaps
        # a part of the next call, which is replaced. Not the statistics' row_count: it counts replaced vectors twice until the
        # server compacts its segments.
        [counted] = self._client.query(self.name, filter="", output_fields=["count(*)"], consistency_level="Strong")
        stored = int(counted["count(*)"])
        for start in range(max(0, stored - BATCH_ROWS), len(vectors) if stored < len(vectors) else 0, BATCH_ROWS):
            rows = enumerate(vectors[start : start + BATCH_ROWS], start=start)
            self._client.upsert(self.name, [{ID: row, VECTOR: vector.tolist()} for row, vector in rows])

    def search(self, vectors_QD: NDArray[np.float32], k: int) -> Hits:
        """See `VectorIndex`; at most 16,384 results per query, Milvus's limit."""
        hits = Hits.none(len(vectors_QD), min(k, len(self.vectors), MAX_HITS))
        for start in range(0, len(vectors_QD), BATCH_ROWS):
            block = vectors_QD[start : start + BATCH_ROWS].astype(np.float32).tolist()
            found = self._client.search(self.name, data=block, anns_field=VECTOR, limit=hits.rows_QK.shape[1])
            for query, of_query in enumerate(found, start=start):
                ranked = sorted((-hit["distance"], hit["id"]) for hit in of_query)  # ties: the lower number first
                hits.scores_QK[query, : len(ranked)] = [-score for score, _ in ranked]
                hits.rows_QK[query, : len(ranked)] = [row for _, row in ranked]
        return hits

    def _create(self, dimension: int) -> None:
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field(ID, DataType.INT64, is_primary=True)
        schema.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=dimension)
        indexes = self._client.prepare_index_params()
        indexes.add_index(VECTOR, index_type="AUTOINDEX", metric_type="IP")
        self._client.create_collection(self.name, schema=schema, index_params=indexes, consistency_level="Strong")


def connect(uri: str) -> Any:  # noqa: ANN401 (a `MilvusClient`; pymilvus is optional and has no types)
    """Return a client of a server or a local file."""
    require("pymilvus")
    from pymilvus import MilvusClient
    from pymilvus.exceptions import MilvusException

    for name in ("pymilvus", "milvus_lite"):  # they log a traceback for each error that they raise
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        return MilvusClient(uri, token=os.environ.get("MILVUS_TOKEN", ""), timeout=10)
    except (MilvusException, OSError, ValueError) as error:
        raise UserError(f"Milvus at {uri} cannot be opened: {first_line(error)}") from error
