"""`encode`, `index`, `search` and `evaluate` with a server as the encoder, and servers that fail."""

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
from revela_hub.retrieval.endpoint import EmbeddingServer as Client
from revela_hub.retrieval.endpoint import EndpointEncoder
from revela_hub.retrieval.model_settings import ModelSettings

KEY = "sk-a-secret-key"


@pytest.fixture
def server(retriever_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[EmbeddingServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    server = EmbeddingServer(lambda texts: model.encode(texts, prompt=""))
    yield server
    server.close()


def fake(texts: list[str]) -> np.ndarray:
    return np.array([[float(text), 1.0] for text in texts])


# --- the encoder


@pytest.mark.parametrize(
    ("prompts", "default"),
    [
        ({"query": "query: ", "passage": "passage: "}, None),
        ({"search": "search: "}, "search"),
        ({"query": "query: ", "document": "document: ", "corpus": "corpus: "}, "corpus"),
    ],
)
def test_prompts_are_those_that_sentence_transformers_uses(
    prompts: dict[str, str], default: str | None, retriever_folder: Path
) -> None:
    file = retriever_folder / "config_sentence_transformers.json"
    config = json.loads(file.read_text()) | {"prompts": prompts, "default_prompt_name": default}
    file.write_text(json.dumps(config))
    model, settings = (
        SentenceTransformer(str(retriever_folder), device="cpu"),
        ModelSettings.read(str(retriever_folder)),
    )
    for kind, encode in (("query", model.encode_query), ("document", model.encode_document)):
        assert np.array_equal(encode("a text"), model.encode("a text", prompt=settings.prompts[kind]))


@pytest.mark.parametrize("kind", ["tei", "openai", "infinity"])
def test_vectors_are_those_of_the_folder(
    kind: str, server: EmbeddingServer, retriever_folder: Path, texts: list[str]
) -> None:
    server.kind = kind
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    encoder = EndpointEncoder(Client(server.url), ModelSettings.read(str(retriever_folder)))
    texts = [*texts, " ".join(texts * 3)]  # the last one is longer than the maximum length
    for name in ("encode_query", "encode_document"):
        assert np.abs(getattr(encoder, name)(texts, batch_size=2) - getattr(model, name)(texts)).max() < 1e-6
    assert np.abs(encoder.encode_query(texts, prompt="Q: ") - model.encode(texts, prompt="Q: ")).max() < 1e-6
    assert encoder.similarity_fn_name == "cosine"


def test_the_number_of_open_requests_is_bounded_and_the_order_kept(server: EmbeddingServer) -> None:
    server.embed, server.answer = fake, lambda path, body, number: server.wait_for_open(3) if body else None
    client = Client(server.url, concurrency=3)
    assert client.embed([str(n) for n in range(50)], batch_size=4)[:, 0].tolist() == list(range(50))
    assert server.most_open == 3
    assert sorted(len(sent.body["inputs"]) for sent in server.posts) == [2] + [4] * 12
    server.info["max_client_batch_size"] = 2
    server.posts.clear()
    Client(server.url).embed(["1", "2", "3"])
    assert sorted(len(sent.body["inputs"]) for sent in server.posts) == [1, 2]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_temporary_failures_are_repeated(status: int, server: EmbeddingServer) -> None:
    server.embed = fake
    server.answer = lambda path, body, number: (status, {}, {"error": "busy"}) if body and number % 3 else None
    assert Client(server.url).embed(["1", "2"], batch_size=1)[:, 0].tolist() == [1, 2]
    server.answer = lambda path, body, number: (status, {}, {"error": "busy"}) if body else None
    with pytest.raises(UserError, match=rf"HTTP {status} \(busy\) \(3 tries\): try again later"):
        Client(server.url, retries=2).embed(["1"])


def test_a_url_with_a_path_needs_no_detection(server: EmbeddingServer) -> None:
    server.embed = fake
    for kind, path in (("tei", "/embed"), ("openai", "/v1/embeddings"), ("openai", "/v1"), ("infinity", "/embeddings")):
        server.kind = kind
        server.info.pop("model_id", None)
        client = Client(server.url + path)
        assert client.embed(["7"]).tolist() == [[7.0, 1.0]]
        assert client.type == ("tei" if kind == "tei" else "openai")


HTML = b"<!doctype html><html><body>502 Bad gateway</body></html>"
TEI = [[0.1, 0.2]]
WRONG: dict[str, tuple[Any, str]] = {
    "HTML": ((200, {"Content-Type": "text/html"}, HTML), "the answer is an HTML page, not vectors"),
    "broken JSON": ((200, {}, b"[[0.1, "), "the answer is not valid JSON"),
    "too few": ((200, {}, TEI), "the answer has 1 vector for 2 texts"),
    "no list": ((200, {}, {"vectors": TEI}), "the answer has no list of vectors"),
    "no vectors": ((200, {}, ["a", "b"]), "the vectors are not lists of numbers of the same length"),
    "ragged": ((200, {}, [[0.1], [0.1, 0.2]]), "the vectors are not lists of numbers of the same length"),
    "empty": ((200, {}, [[], []]), "the vectors are not lists of numbers of the same length"),
    "NaN": ((200, {}, [[float("nan"), 1], [0, 1]]), "a vector contains NaN or infinity"),
    "null": ((200, {}, [[None, 1], [0, 1]]), "a vector contains NaN or infinity"),
    "401": ((401, {}, {"error": "no key"}), "the API key is required: set an environment variable (--api_key_env"),
    "404": ((404, {}, {"error": "no such model"}), "HTTP 404 (no such model): check --endpoint"),
    "413": ((413, {}, {"error": "too long"}), "HTTP 413 (too long)"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_answers_are_reported_in_one_line(fault: str, server: EmbeddingServer) -> None:
    answer, message = WRONG[fault]
    server.answer = lambda path, body, number: answer if body else None
    with pytest.raises(UserError) as raised:
        Client(server.url, retries=0).embed(["1", "2"])
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_servers_that_do_not_answer_are_reported(server: EmbeddingServer) -> None:
    with pytest.raises(UserError, match="cannot reach http://127.0.0.1:9: "):
        Client("http://127.0.0.1:9", retries=0)
    server.answer = lambda path, body, number: (200, {"Content-Type": "text/html"}, HTML)
    with pytest.raises(UserError, match="answers neither like text-embeddings-inference"):
        Client(server.url, retries=0)
    server.answer = lambda path, body, number: server.closing.wait(60) and None if body else None
    with pytest.raises(UserError, match=r"did not answer within 0.1 seconds \(--request_timeout\)$"):
        Client(server.url, retries=0, timeout=0.1).embed(["1"])


def test_vectors_out_of_order_or_without_number(server: EmbeddingServer) -> None:
    server.kind, server.embed = "openai", fake
    assert Client(server.url).embed(["1", "2"])[:, 0].tolist() == [1, 2]  # the server sends the last one first
    rows = [{"index": 0, "embedding": [1.0]}, {"index": 0, "embedding": [2.0]}]
    server.answer = lambda path, body, number: (200, {}, {"data": rows}) if body else None
    with pytest.raises(UserError, match="not numbered from 0 to 1"):
        Client(server.url).embed(["1", "2"])


# --- the commands


@pytest.fixture
def index(server: EmbeddingServer, retriever_folder: Path, documents: Path, tmp_path: Path) -> Path:
    words = [str(retriever_folder), "--corpus", str(documents), "--output_dir", str(tmp_path / "index")]
    assert main(["encode", *words, "--endpoint", server.url]) == 0
    assert main(["index", *words, "--endpoint", server.url]) == 0
    return tmp_path / "index"


def test_an_index_names_its_server_and_is_searched_with_it(
    index: Path, server: EmbeddingServer, retriever_folder: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = json.loads((index / "index.json").read_text())
    assert metadata["endpoint"] == f"text-embeddings-inference 1.9.3 at {server.url}, tiny, float32"
    assert metadata["fingerprint"].endswith(":served:tei:tiny:float32")
    capsys.readouterr()
    search = ["search", str(retriever_folder), "where does the river go", "--json"]
    assert main([*search, "--index", str(index), "--endpoint", server.url]) == 0
    served = json.loads(capsys.readouterr().out)
    assert main([*search, "--corpus", str(documents)]) == 0
    local = json.loads(capsys.readouterr().out)
    assert [hit["text"] for hit in served["hits"]] == [hit["text"] for hit in local["hits"]]
    assert main([*search, "--index", str(index)]) == 2
    assert "search it with --endpoint and a server that reports the same model" in capsys.readouterr().err
    server.info["model_dtype"] = "float16"
    assert main([*search, "--index", str(index), "--endpoint", server.url]) == 2
    assert "which may differ" in capsys.readouterr().err


def test_late_interaction_needs_the_model_here(
    server: EmbeddingServer,
    documents: Path,
    retriever_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    retriever_folder.rename(tmp_path / "retriever")
    (tmp_path / "hybrid.json").write_text('{"bm25_weight": 0.3, "token_weight": 0.5}')
    words = ["search", str(tmp_path), "river", "--corpus", str(documents), "--endpoint", server.url]
    assert main(words) == 0
    assert "late interaction, which adapt has fitted, needs the model here" in capsys.readouterr().err
    assert main([*words, "--rerank", "self"]) == 2
    assert "late interaction needs a sentence-transformers model" in capsys.readouterr().err
    assert main([*words, "--rerank", "none"]) == 0
    assert "late interaction" not in capsys.readouterr().err


def test_a_server_with_other_vectors_is_noticed(
    index: Path, server: EmbeddingServer, retriever_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = ["search", str(retriever_folder), "river", "--index", str(index), "--endpoint", server.url]
    embed, server.info["version"] = server.embed, "2.0.0"
    server.posts.clear()
    assert main(search) == 0  # another version with the same vectors
    assert [len(sent.body["inputs"]) for sent in server.posts][0] > 1
    server.embed = lambda texts: np.roll(embed(texts), 1, axis=1)
    assert main(search) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "have other vectors now than when it was built" in error
    assert "changed since: server text-embeddings-inference 1.9.3 at" in error
    assert "undo the change of the server or its settings (see revela-hub check --endpoint)" in error


def test_the_key_is_sent_and_stored_nowhere(
    server: EmbeddingServer,
    retriever_folder: Path,
    documents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    server.key = KEY
    words = ["index", str(retriever_folder), "--corpus", str(documents), "--output_dir", str(tmp_path / "index")]
    assert main([*words, "--endpoint", f"{server.url}?key={KEY}", "--api_key_env", "MY_KEY"]) == 0
    printed = capsys.readouterr()
    assert KEY not in printed.out + printed.err
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    monkeypatch.setenv("MY_KEY", "wrong")
    assert main([*words, "--endpoint", server.url, "--api_key_env", "MY_KEY", "--max_words", "20"]) == 2
    assert "HTTP 401 (invalid key); the API key was rejected: check its value" in capsys.readouterr().err


def test_evaluation_has_the_same_scores(
    server: EmbeddingServer,
    retriever_folder: Path,
    tmp_path: Path,
    texts: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "beir/qrels").mkdir(parents=True)
    rows = {"corpus": texts, "queries": [text.split()[-1] for text in texts]}
    for name, column in rows.items():
        lines = (json.dumps({"_id": str(n), "text": text}) + "\n" for n, text in enumerate(column))
        (tmp_path / f"beir/{name}.jsonl").write_text("".join(lines))
    judged = "".join(f"{n}\t{n}\t1\n" for n in range(len(texts)))
    (tmp_path / "beir/qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    words = ["evaluate", str(retriever_folder), "--corpus", str(tmp_path / "beir"), "--json"]
    assert main(words) == 0
    local = json.loads(capsys.readouterr().out)
    assert main([*words, "--endpoint", server.url]) == 0
    assert json.loads(capsys.readouterr().out) == local
    assert main(["evaluate", str(retriever_folder), "other", "--corpus", "x", "--endpoint", server.url]) == 2
    assert "--endpoint requires --corpus and one model" in capsys.readouterr().err


def test_unusable_combinations_are_rejected(
    server: EmbeddingServer, retriever_folder: Path, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*words: str) -> str:
        assert main([*words, "--corpus", str(documents)]) == 2
        return capsys.readouterr().err

    model = str(retriever_folder)
    assert "--endpoint requires a model, not bm25" in error("search", "bm25", "x", "--endpoint", server.url)
    assert "--endpoint requires --mode dense" in error(
        "search", model, "x", "--mode", "sparse", "--endpoint", server.url
    )
    assert "--concurrency requires --endpoint URL" in error("search", model, "x", "--concurrency", "2")
    server.embed = lambda texts: np.ones((len(texts), 16))
    assert "returns vectors of dimension 16, but" in error("search", model, "x", "--endpoint", server.url)
    pooling = next(retriever_folder.glob("1_Pooling/config.json"))
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": False}))
    assert "leaves the tokens of the prompt out" in error("search", model, "x", "--endpoint", server.url)
