"""Vectors in Milvus: what an interruption leaves, and what a missing package says."""

import sys
from typing import Any

import numpy as np
import pytest

from revela_hub.errors import UserError
from revela_hub.retrieval import milvus
from revela_hub.retrieval.stored_vectors import VectorsInMemory

VECTORS = VectorsInMemory(np.random.default_rng(0).normal(size=(57, 4)).astype(np.float32))


def test_without_pymilvus_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pymilvus"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(UserError, match="the package pymilvus is not installed: pip install"):
        milvus.MilvusIndex(VECTORS, "http://localhost:1")


def test_no_vector_is_skipped_after_several_interruptions(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pymilvus", reason="needs the extra milvus")

    class Server:
        """Counts a vector again that was replaced, as a server does until it has compacted its segments."""

        def __init__(self) -> None:
            self.rows: dict[int, list[float]] = {}
            self.row_count = self.calls = 0

        def has_collection(self, name: str) -> bool:
            return True

        def load_collection(self, name: str) -> None: ...

        def get_collection_stats(self, name: str) -> dict[str, int]:
            return {"row_count": self.row_count}

        def query(self, name: str, **options: Any) -> list[dict[str, int]]:
            assert options["output_fields"] == ["count(*)"]
            return [{"count(*)": len(self.rows)}]

        def upsert(self, name: str, rows: list[dict[str, Any]]) -> None:
            self.calls += 1
            if self.calls in (3, 6, 8):
                raise KeyboardInterrupt
            self.row_count += len(rows)
            self.rows |= {row["id"]: row["vector"] for row in rows}

    server = Server()
    monkeypatch.setattr(milvus, "_client", lambda uri: server)
    monkeypatch.setattr(milvus, "INSERT", 10)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            milvus.MilvusIndex(VECTORS, "http://localhost:1")
    milvus.MilvusIndex(VECTORS, "http://localhost:1")
    assert sorted(server.rows) == list(range(57))
