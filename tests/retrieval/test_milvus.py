"""Vectors in Milvus: interruptions, a hybrid search with a server, and mistakes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from revela_hub.cli.main import main
from revela_hub.retrieval import milvus

VECTORS = np.random.default_rng(0).normal(size=(57, 4)).astype(np.float32)
TEXTS = ["swallows fly south in autumn", "swallows return in spring", "storks fly south", "stone bridges last"]


class Server:
    """Is interrupted in the third, the sixth and the eighth call."""

    def __init__(self) -> None:
        self.rows: dict[int, list[float]] = {}
        self.calls = 0

    def has_collection(self, name: str) -> bool:
        return True

    def load_collection(self, name: str) -> None: ...

    def query(self, name: str, **options: Any) -> list[dict[str, int]]:
        assert options["output_fields"] == ["count(*)"]
        return [{"count(*)": len(self.rows)}]

    def upsert(self, name: str, rows: list[dict[str, Any]]) -> None:
        self.calls += 1
        if self.calls in (3, 6, 8):
            rows = rows[1:] if self.calls == 3 else []  # an interrupted call may have stored any part of its rows
        self.rows |= {row["id"]: row["vector"] for row in rows}
        if self.calls in (3, 6, 8):
            raise KeyboardInterrupt


def test_no_vector_is_skipped_after_several_interruptions(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setattr(milvus, "connect", lambda uri: server)
    monkeypatch.setattr(milvus, "BATCH_ROWS", 10)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            milvus.MilvusIndex(VECTORS, "http://localhost:1", "key")
    milvus.MilvusIndex(VECTORS, "http://localhost:1", "key")
    assert sorted(server.rows) == list(range(57))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("pymilvus", reason="needs the extra milvus")
    grpc_server = pytest.importorskip("milvus_lite.adapter.grpc.server", reason="needs milvus-lite 3")
    running, database, port = grpc_server.start_server_in_thread(str(tmp_path_factory.mktemp("milvus")))
    yield f"http://127.0.0.1:{port}"
    running.stop(grace=0)
    database.close()


def test_a_hybrid_with_a_server_ranks_as_the_one_here(
    server: str,
    retriever_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILVUS_TOKEN", "root:secret")
    Path("rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    model, found = str(retriever_folder), []
    for folder, options in (("here", []), ("there", ["--index_type", "milvus", "--milvus_uri", server])):
        build = ["index", model, "--corpus", "rows.jsonl", "--output_dir", folder, "--device", "cpu", *options]
        assert main(build) == main(build) == 0
        capsys.readouterr()
        search = ["search", model, "swallows south", "--index", folder, "--mode", "hybrid", "--device", "cpu"]
        assert main([*search, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["hits"])
    assert [hit["text"] for hit in found[0]] == [hit["text"] for hit in found[1]]
    scores = [[hit["score"] for hit in hits] for hits in found]
    np.testing.assert_allclose(*scores, atol=1e-4)
    assert not any(b"secret" in file.read_bytes() for file in Path("there").rglob("*") if file.is_file())
