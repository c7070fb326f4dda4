"""Vectors in Milvus: interruptions, filters, hybrid search on a server, and mistakes."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from revela_hub.cli.main import main
from revela_hub.errors import UserError
from revela_hub.retrieval import BM25, PassageStore, milvus
from revela_hub.retrieval.stored_vectors import VectorsInMemory

VECTORS = VectorsInMemory(np.random.default_rng(0).normal(size=(57, 4)).astype(np.float32))


def test_without_pymilvus_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pymilvus"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(UserError, match="the package pymilvus is not installed: pip install"):
        milvus.MilvusIndex(VECTORS, "http://localhost:1")


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

    def insert(self, name: str, rows: list[dict[str, Any]]) -> None:
        assert not self.rows.keys() & {row["id"] for row in rows}, "a server keeps both"
        self.upsert(name, rows)

    def upsert(self, name: str, rows: list[dict[str, Any]]) -> None:
        self.calls += 1
        if self.calls in (3, 6, 8):
            rows = rows[1:] if self.calls == 3 else []  # an interrupted call may have stored any part of its rows
        self.row_count += len(rows)
        self.rows |= {row["id"]: row["vector"] for row in rows}
        if self.calls in (3, 6, 8):
            raise KeyboardInterrupt


def test_no_vector_is_skipped_after_several_interruptions(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pymilvus", reason="needs the extra milvus")

    server = Server()
    monkeypatch.setattr(milvus, "_client", lambda uri: server)
    monkeypatch.setattr(milvus, "BATCH_ROWS", 10)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            milvus.MilvusIndex(VECTORS, "http://localhost:1")
    milvus.MilvusIndex(VECTORS, "http://localhost:1")
    assert sorted(server.rows) == list(range(57))


MODEL = str(Path(__file__).parents[2] / "examples/quickstart/retriever")
ROWS = [
    {"text": "swallows fly south in autumn", "year": 2019, "lang": "en", "score": 1.5},
    {"text": "swallows return in spring", "year": 2021, "lang": "en", "score": 2},
    {"text": "storks fly south, and swallows too", "year": 2022, "lang": "de"},
    {"text": "swallows fly south in autumn", "year": 2023, "lang": "en"},
    {"text": "stone bridges last", "year": 2023, "lang": "en"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("pymilvus", reason="needs the extra milvus")
    grpc_server = pytest.importorskip("milvus_lite.adapter.grpc.server", reason="needs milvus-lite 3")
    running, database, port = grpc_server.start_server_in_thread(str(tmp_path_factory.mktemp("milvus")))
    yield f"http://127.0.0.1:{port}"
    running.stop(grace=0)
    database.close()


@pytest.fixture(scope="module")
def index(server: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("index")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = [
        "index",
        MODEL,
        "--corpus",
        str(folder / "rows.jsonl"),
        "--output_dir",
        str(folder / "index"),
    ]
    words += ["--index_type", "milvus", "--milvus_uri", server, "--milvus_bm25", "true"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MILVUS_TOKEN", "root:secret")
        assert main([*words, "--device", "cpu", "--metadata_columns", "year", "lang", "score"]) == 0
    assert not any(b"secret" in file.read_bytes() for file in (folder / "index").rglob("*") if file.is_file())
    return MODEL, str(folder / "index")


def test_a_filter_uses_the_bm25_of_the_index_whatever_adapt_fitted(
    index: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(MODEL, tmp_path / "adapted" / "retriever")
    fitted = {"bm25_weight": 0.3, "bm25": {"split_identifiers": True}}
    (tmp_path / "adapted" / "hybrid.json").write_text(json.dumps(fitted))
    words = ["search", str(tmp_path / "adapted"), "swallows south", "--index", index[1], "--device", "cpu", "--json"]
    assert main([*words, "--filter", "year >= 2022"]) == 0
    assert {hit["metadata"]["year"] for hit in json.loads(capsys.readouterr().out)["hits"]} == {2022, 2023}


@pytest.mark.parametrize("mode", ["dense", "bm25", "hybrid"])
def test_a_filter_selects_passages_on_the_server(
    index: tuple[str, str], mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = index
    search = [
        "search",
        model,
        "swallows south",
        "--index",
        folder,
        "--mode",
        mode,
        "--device",
        "cpu",
        "--json",
        "--filter",
    ]
    for expression, years in (('year >= 2020 and lang == "en"', {2021, 2023}), ("score > 1.6", {2021})):
        assert main([*search, expression]) == 0
        hits = json.loads(capsys.readouterr().out)["hits"]
        assert {hit["metadata"]["year"] for hit in hits} == years
    assert main([*search, "year > 3000"]) == 0
    assert "no passage matches --filter" in json.loads(capsys.readouterr().out)["nothing_found"]
    for wrong in ("yeer > 1", "year >"):
        assert main([*search, wrong]) == 2
        [line] = capsys.readouterr().err.splitlines()[-1:]
        assert f"--filter {wrong!r}: " in line and "the fields are lang (varchar), score (double), year (int64)" in line


def test_a_partition_key_divides_the_collection(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    build = ["index", MODEL, "--corpus", "rows.jsonl", "--output_dir", "index", "--index_type", "milvus"]
    build += ["--milvus_uri", server, "--device", "cpu", "--metadata_columns", "year", "lang", "score"]
    for column, reason in (
        ("year2", "--metadata_columns does not name it"),
        ("score", "whole numbers, but its values are double"),
    ):
        assert main([*build, "--milvus_partition_key", column]) == 2
        assert reason in capsys.readouterr().err.splitlines()[-1]
    assert main([*build, "--milvus_partition_key", "lang"]) == 0
    capsys.readouterr()
    assert main(["search", MODEL, "swallows", "--index", "index", "--json", "--filter", 'lang == "de"']) == 0
    assert [hit["metadata"]["year"] for hit in json.loads(capsys.readouterr().out)["hits"]] == [2022]
    index = PassageStore("index").index
    assert isinstance(index, milvus.MilvusIndex)
    assert index.fields is not None
    schema = index._client.create_schema()
    index.fields.declare(schema, index._client.prepare_index_params())
    assert [field.name for field in schema.fields if field.is_partition_key] == ["lang"]

    monkeypatch.setattr("revela_hub.retrieval.store.document_vectors", None)  # found before the texts are encoded
    Path("rows.jsonl").write_text('{"text": "a", "lang": "en", "year": 1}\n{"text": "b", "score": 1.0}\n')
    assert main([*build, "--milvus_partition_key", "lang"]) == 2
    assert "rows.jsonl:2:1-1 has no value in this column" in capsys.readouterr().err.splitlines()[-1]


def test_an_updated_index_has_its_own_bm25_and_one_collection(
    index: tuple[str, str],
    server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    build = ["index", MODEL, "--corpus", "rows.jsonl", "--device", "cpu", "--output_dir"]
    there = [*build, "index", "--index_type", "milvus", "--milvus_uri", server, "--milvus_bm25", "true"]
    client = milvus._client(server)
    others = set(client.list_collections())
    assert others
    for rows in (ROWS[1:], ROWS, ROWS):
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(there) == 0
        assert others < {*client.list_collections()} and len(client.list_collections()) == len(others) + 1
        [folder] = Path("index").glob("bm25-*")
        index = PassageStore("index").index
        assert isinstance(index, milvus.MilvusIndex) and index.bm25 is not None
        assert folder.name == f"bm25-{index.bm25.key[:16]}"
    with monkeypatch.context() as patched:
        patched.setattr(milvus, "_client", no_answer)
        assert main([*build, "index"]) == 0
        assert "of the replaced index could not be deleted: Milvus at " in caplog.text
    assert main(there) == main([*build, "index"]) == 0
    assert {*client.list_collections()} == others


def test_folders_with_the_same_passages_have_their_own_collections(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    build = ["index", MODEL, "--corpus", "rows.jsonl", "--device", "cpu", "--output_dir"]
    client = milvus._client(server)
    others = set(client.list_collections())
    for folder in ("first", "second"):
        assert main([*build, folder, "--index_type", "milvus", "--milvus_uri", server]) == 0
    assert len({*client.list_collections()} - others) == 2
    names = [PassageStore(folder).metadata.collection for folder in ("first", "second")]
    shutil.copytree("first", "copy")
    Path("first").rename("moved")
    assert [PassageStore(folder).index.name for folder in ("copy", "moved")] == 2 * names[:1]  # type: ignore[attr-defined]
    assert main([*build, "second"]) == main([*build, "copy"]) == 0
    assert {*client.list_collections()} - others == {names[0]}
    assert f"the collection {names[0]} of the replaced index is kept" in caplog.text
    assert PassageStore("moved").index.drop() is None  # type: ignore[attr-defined]


def no_answer(uri: str) -> None:
    raise OSError("connection refused")


def test_what_milvus_rejects_is_found_before_the_texts_are_encoded(
    retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pymilvus", reason="needs the extra milvus")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("revela_hub.retrieval.store.document_vectors", None)
    rows = [{"text": "a", "note": "e" * 65_535}, {"text": "b", "note": "e" + "\u00e9" * 32_768}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build = ["index", str(retriever_folder), "--corpus", "rows.jsonl", "--output_dir", "index", "--device", "cpu"]
    build += ["--index_type", "milvus", "--milvus_uri", "http://localhost:1"]
    assert main([*build, "--metadata_columns", "note"]) == 2
    expected = (
        "--metadata_columns note: rows.jsonl:2:1-1 has a text of 65,537 bytes in this column, but Milvus allows 65,535"
    )
    assert expected in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr(milvus, "_client", no_answer)
    assert main(build) == 2
    assert "Milvus at http://localhost:1: connection refused" in capsys.readouterr().err.splitlines()[-1]


def test_a_hybrid_in_milvus_ranks_as_the_one_here(index: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    model, folder = index
    store = PassageStore(folder)
    here = BM25(store.passages.texts)
    assert isinstance(store.index, milvus.MilvusIndex) and store.index.bm25 is not None
    there = milvus.MilvusBM25(store.index, store.index.bm25)
    queries = ["swallows swallows south", "autumn", "zebra"]
    expected, found = here.search(here.encode(queries), 3), there.search(there.encode(queries), 3)
    for query in range(3):
        both = [
            dict(zip(each.rows_QK[query].tolist(), each.scores_QK[query].tolist(), strict=True))
            for each in (expected, found)
        ]
        scores = [sorted(value for row, value in each.items() if row >= 0) for each in both]
        np.testing.assert_allclose(*scores, rtol=1e-5)
    assert (
        main(
            ["search", model, "swallows", "--index", folder, "--filter", "year > 1", "--mode", "bm25", "--bm25_k1", "2"]
        )
        == 2
    )
    assert "an index built with --milvus_bm25" in capsys.readouterr().err


def test_mistakes_with_milvus_are_one_line(
    retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "a", "year": 1, "id": 2, "tags": ["x"]}\n{"text": "b", "year": "1"}\n')
    model = str(retriever_folder)
    build = [
        "index",
        model,
        "--corpus",
        "rows.jsonl",
        "--output_dir",
        "index",
        "--index_type",
        "milvus",
        "--device",
        "cpu",
    ]

    def message(*words: str) -> str:
        assert main(list(words)) == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert "values of several types (int64, varchar)" in message(*build, "--metadata_columns", "year")
    assert "rename the column" in message(*build, "--metadata_columns", "id")
    assert "no document has a value in this column" in message(*build, "--metadata_columns", "yeer")
    assert "rows.jsonl:1: column 'tags' holds list" in message(*build, "--metadata_columns", "tags")
    assert "must not contain a password" in message(*build, "--milvus_uri", "http://me:secret@localhost:1")
    assert "need the index type milvus, not exact" in message(*build[:6], "--device", "cpu", "--milvus_bm25", "true")
    assert "--filter requires --index" in message(
        "search", "bm25", "x", "--corpus", "rows.jsonl", "--filter", "year > 1"
    )
    assert main([*build[:6], "--device", "cpu"]) == 0
    assert "--filter needs an index of the type milvus" in message(
        "search", model, "x", "--index", "index", "--filter", "year > 1", "--device", "cpu"
    )


def test_a_file_of_milvus_lite_2_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pymilvus", reason="needs the extra milvus")
    (tmp_path / "milvus.db").write_bytes(b"SQLite format 3\0")
    with pytest.raises(
        UserError, match="was written by Milvus Lite 2, which Milvus Lite 3 cannot read: delete the file"
    ):
        milvus.MilvusIndex(VECTORS, str(tmp_path / "milvus.db"))
