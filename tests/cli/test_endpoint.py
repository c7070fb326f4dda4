"""A server as the encoder: its vectors are the folder's, and servers that fail or compute others are noticed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedding_server import EmbeddingServer
from sentence_transformers import SentenceTransformer

from revela_hub.cli.main import main
from revela_hub.errors import UserError
from revela_hub.retrieval.endpoint import OpenAIEncoder

KEY = "sk-a-secret-key"


@pytest.fixture
def server(retriever_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[EmbeddingServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-server")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    server = EmbeddingServer(lambda texts: model.encode(texts, prompt=""))
    yield server
    server.close()


def test_vectors_are_those_of_the_folder(server: EmbeddingServer, retriever_folder: Path, texts: list[str]) -> None:
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    encoder = OpenAIEncoder(server.url, str(retriever_folder), concurrency=3)
    texts = [*texts, " ".join(texts * 3)]  # the last one is longer than the maximum length
    for name in ("encode_query", "encode_document"):
        assert np.abs(getattr(encoder, name)(texts, batch_size=2) - getattr(model, name)(texts)).max() < 1e-6
    assert np.abs(encoder.encode_query(texts, prompt="Q: ") - model.encode(texts, prompt="Q: ")).max() < 1e-6
    assert encoder.similarity_fn_name == "cosine"
    assert server.most_open <= 3
    assert {sent.headers["authorization"] for sent in server.posts} == {"Bearer EMPTY"}


ROW = {"index": 0, "embedding": [0.1, 0.2]}
WRONG: dict[str, Any] = {
    "HTML": (200, {"Content-Type": "text/html"}, b"<!doctype html><html></html>"),
    "too few": (200, {}, {"data": [ROW]}),
    "null": (200, {}, {"data": [ROW, {"index": 1, "embedding": [None, 0.2]}]}),
    "500": (500, {}, {"error": "busy"}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_answers_are_errors(fault: str, server: EmbeddingServer, retriever_folder: Path) -> None:
    server.answer = lambda number: WRONG[fault]
    with pytest.raises(UserError, match=server.url):
        OpenAIEncoder(server.url, str(retriever_folder)).encode_query(["1", "2"])


def test_an_index_names_its_server_and_no_key(
    server: EmbeddingServer,
    retriever_folder: Path,
    documents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    server.key = KEY
    there = ["--endpoint", server.url, "--api_key_env"]
    words = ["index", str(retriever_folder), "--corpus", str(documents), "--output_dir", str(tmp_path / "index")]
    assert main([*words, *there, "MY_KEY"]) == 0
    assert json.loads((tmp_path / "index/index.json").read_text())["endpoint"].endswith(f" at {server.url}")
    assert main([*words, *there, KEY]) == 2  # the key instead of the name
    printed = capsys.readouterr()
    assert KEY not in printed.out + printed.err
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    search, found = ["search", str(retriever_folder), "where does the river go", "--json"], []
    for where in (["--index", str(tmp_path / "index"), *there, "MY_KEY"], ["--corpus", str(documents)]):
        assert main([*search, *where]) == 0
        found.append([hit["text"] for hit in json.loads(capsys.readouterr().out)["hits"]])
    assert found[0] == found[1]
    assert main([*search, "--index", str(tmp_path / "index")]) == 2


def test_prompts_that_are_not_pooled_cannot_be_served(server: EmbeddingServer, retriever_folder: Path) -> None:
    pooling = next(retriever_folder.glob("1_Pooling/config.json"))
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": False}))
    with pytest.raises(UserError, match="include_prompt"):
        OpenAIEncoder(server.url, str(retriever_folder)).encode_query(["a text"])


def test_the_check_compares_a_server_with_the_folder(
    server: EmbeddingServer, retriever_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", str(retriever_folder), "--endpoint", server.url, "--json"]
    assert main(words) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["checks"]] == [
        "query vectors",
        "document vectors",
    ]
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    model.max_seq_length = 16
    embed_whole = server.embed
    for embed in (
        lambda texts: model.encode(texts, prompt=""),  # reads less of a text
        lambda texts: np.roll(embed_whole(texts), 1, axis=1),
        lambda texts: embed_whole(texts)[:, :16],
    ):
        server.embed = embed
        with pytest.raises(SystemExit):
            main(words)
        assert not json.loads(capsys.readouterr().out)["ok"]
