"""`revela-hub check FOLDER --endpoint URL`: servers that compute a tiny model's vectors wrongly in each known way."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding_server import EmbeddingServer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers.processors import TemplateProcessing

from revela_hub.cli.main import main

Change = Callable[[SentenceTransformer], Any]


@pytest.fixture
def dense_folder(tmp_path: Path, llama_folder: Path, bpe_tokenizer: Any) -> Path:
    """A tiny decoder with EOS, last-token pooling, a Dense module (32 -> 24) and unit vectors, with a query prompt."""
    bpe_tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", bpe_tokenizer.eos_token_id)]
    )
    bpe_tokenizer.model_max_length = 256
    bpe_tokenizer.save_pretrained(llama_folder)
    modules = [Transformer(str(llama_folder)), Pooling(32, pooling_mode="lasttoken"), Dense(32, 24), Normalize()]
    model = SentenceTransformer(modules=modules, prompts={"query": "Query: ", "document": ""}, device="cpu")
    model.save(str(tmp_path / "dense"), create_model_card=False)
    return tmp_path / "dense"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EmbeddingServer]]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    servers: list[EmbeddingServer] = []

    def start(folder: Path, change: Change | None = None, kind: str = "tei") -> EmbeddingServer:
        model = SentenceTransformer(str(folder), device="cpu")
        embed = change(model) if change else None
        servers.append(EmbeddingServer(embed or (lambda texts: model.encode(texts, prompt="")), kind))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def run(*words: str) -> int:
    try:
        return main(list(words))
    except SystemExit as end:
        return int(str(end.code))


def check(folder: Path, server: EmbeddingServer, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Run the command; return name -> (ok, detail)."""
    status = run("check", str(folder), "--endpoint", server.url, "--json", *options)
    found = json.loads(capsys.readouterr().out)
    assert status == (0 if found["ok"] else 1)
    return {row["name"]: (row["ok"], row["detail"]) for row in found["checks"]}


def replace(model: SentenceTransformer, *modules: Any) -> None:
    for name in list(model._modules):
        del model._modules[name]
    for at, module in enumerate(modules):
        model.add_module(str(at), module)


# --- the faults, each as a change of the served model; a function replaces its `encode`


def pooling(mode: str) -> Change:
    def change(model: SentenceTransformer) -> None:
        replace(model, *(Pooling(32, pooling_mode=mode) if isinstance(m, Pooling) else m for m in model))  # type: ignore[arg-type]

    return change


def without(kind: type) -> Change:
    return lambda model: replace(model, *(module for module in model if not isinstance(module, kind)))


def without_eos(model: SentenceTransformer) -> None:
    model.tokenizer._tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])


def prompt_added(prompt: str) -> Change:
    return lambda model: lambda texts: model.encode(texts, prompt=prompt)


def prompt_lost(model: SentenceTransformer) -> Any:
    return lambda texts: model.encode([text.removeprefix("Query: ") for text in texts], prompt="")


def both(*changes: Change) -> Change:
    def change(model: SentenceTransformer) -> Any:
        return [each(model) for each in changes][-1]

    return change


def first_dimensions(model: SentenceTransformer) -> Any:
    return lambda texts: model.encode(texts, prompt="", truncate_dim=16)


QUERY = "query vectors"
FAULTS: dict[str, tuple[Change, str, list[str]]] = {
    "mean pooling": (pooling("mean"), QUERY, ["pooling of all tokens (mean) instead of the last token"]),
    "cls pooling": (pooling("cls"), "document vectors", ["pooling of the first token instead of the last token"]),
    "no EOS": (without_eos, QUERY, ["the end token (EOS) is missing"]),
    "no Dense": (without(Dense), QUERY, ["the Dense module is ignored"]),
    "not normalised": (without(Normalize), QUERY, ["the vectors are not normalised"]),
    "prompt lost": (prompt_lost, QUERY, ["the prompt is missing"]),
    "prompt twice": (prompt_added("Query: "), QUERY, ["the prompt is there twice"]),
    "other dimension": (first_dimensions, QUERY, ["only the first 16 of 24 dimensions"]),
    "prompt added": (prompt_added("Query: "), "document vectors", ["the server adds the prompt 'Query: '"]),
    "mean and no EOS": (both(pooling("mean"), without_eos), QUERY, ["(mean) instead", "(EOS) is missing"]),
    "no EOS, no Dense": (both(without_eos, without(Dense)), QUERY, ["Dense module is ignored", "(EOS) is missing"]),
    "lost and not normalised": (both(without(Normalize), prompt_lost), QUERY, ["not normalised", "prompt is missing"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_of_a_difference_is_named(
    fault: str, dense_folder: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    change, row, words = FAULTS[fault]
    ok, detail = check(dense_folder, serve(dense_folder, change), capsys)[row]
    assert not ok
    assert [word for word in words if word not in detail] == []
    assert detail.partition(" (recomputed so")[0].count(" and ") == len(words) - 1, detail


@pytest.mark.parametrize("kind", ["tei", "openai", "infinity"])
def test_a_faithful_server_passes(
    kind: str, dense_folder: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(dense_folder, kind=kind)
    rows = check(dense_folder, server, capsys)
    assert [name for name, (ok, _) in rows.items() if not ok] == []
    assert list(rows) == ["server", QUERY, "document vectors", "prompts", "batching", "length", "empty text"]
    assert rows["prompts"][1].startswith("the server adds none")
    assert "reads all of a text of 256 tokens" in rows["length"][1]
    assert {sent.path for sent in server.posts} == {
        {"tei": "/embed", "openai": "/v1/embeddings", "infinity": "/embeddings"}[kind]
    }


def test_an_encoder_with_prompts_on_both_sides_passes(
    retriever_folder: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = check(retriever_folder, serve(retriever_folder, kind="openai"), capsys)
    assert all(ok for ok, _ in rows.values())
    without_special = both(lambda model: setattr(model.tokenizer._tokenizer, "post_processor", None))
    ok, detail = check(retriever_folder, serve(retriever_folder, without_special), capsys)[QUERY]
    assert not ok and "the special tokens are missing" in detail


def test_half_precision_passes_with_a_note(
    retriever_folder: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = check(retriever_folder, serve(retriever_folder, lambda model: model.bfloat16() and None), capsys)
    ok, detail = rows[QUERY]
    assert ok and "same up to rounding" in detail and "as in bfloat16" in detail


def test_earlier_truncation_is_found(retriever_folder: Path, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = check(retriever_folder, serve(retriever_folder, lambda model: setattr(model, "max_seq_length", 64)), capsys)
    assert rows[QUERY][0]
    ok, detail = rows["length"]
    assert not ok
    assert detail.endswith("tokens, the folder 128")
    assert 60 <= int(detail.split("first ")[1].split()[0]) <= 66


def test_another_model_is_recognised(
    retriever_folder: Path, dense_folder: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ok, detail = check(retriever_folder, serve(dense_folder), capsys)[QUERY]
    assert not ok and detail.startswith("24 dimensions instead of 32") and "another model" in detail

    def noise(model: SentenceTransformer) -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn_like(weight))

    ok, detail = check(retriever_folder, serve(retriever_folder, noise), capsys)[QUERY]
    assert not ok and "no known mistake" in detail and "other weights" in detail


def test_texts_in_the_wrong_order_are_found(dense_folder: Path, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def sort(model: SentenceTransformer) -> Any:
        return lambda texts: model.encode(sorted(texts), prompt="")

    assert not check(dense_folder, serve(dense_folder, sort), capsys)["batching"][0]


def test_rejected_texts_are_reported(dense_folder: Path, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(dense_folder)

    def limits(path: str, body: Any, number: int) -> Any:
        if body and ("" in body["inputs"] or max(map(len, body["inputs"])) > 400):
            return 413, {}, {"error": "`inputs` must have less than 100 tokens", "error_type": "Validation"}
        return None

    server.answer = limits
    rows = check(dense_folder, server, capsys)
    assert not rows["length"][0] and "must have less than 100 tokens" in rows["length"][1]
    assert rows["empty text"][0] and "is rejected" in rows["empty text"][1]


def test_the_table_ends_with_the_failed_checks(
    dense_folder: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(dense_folder, pooling("mean"))
    assert run("check", str(dense_folder), "--endpoint", server.url) == 1
    out = capsys.readouterr().out
    assert "FAIL  query vectors     pooling of all tokens (mean) instead of the last token (recomputed so, they" in out
    assert out.splitlines()[-1].endswith("checks failed: query vectors, document vectors")


def test_options_without_a_server_are_rejected(dense_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(dense_folder), "--endpoint_type", "tei"]) == 2
    assert "--endpoint_type requires --endpoint URL" in capsys.readouterr().err
    assert main(["check", str(dense_folder), "--endpoint", "localhost:8080"]) == 2
    assert "not the URL of a server" in capsys.readouterr().err


def test_sparse_models_are_rejected(tiny_sparse_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tiny_sparse_folder), "--endpoint", "http://127.0.0.1:9"]) == 2
    assert "SpladePooling: its vectors are weighted terms" in capsys.readouterr().err
