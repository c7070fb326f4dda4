"""The code to copy."""

import ast
import shlex
from dataclasses import asdict

from revela_hub.cli.main import parser_of
from revela_hub.demo.code import QUERY, answer_snippets, snippets
from revela_hub.retrieval.bm25 import BM25Settings, bm25_settings


def test_code_for_each_library() -> None:
    found = {snippet.title: snippet for snippet in snippets("org/x", {}, 0.2)}
    assert list(found) == ["sentence-transformers", "TEI", "vLLM", "revela-hub"]
    for snippet in found.values():
        assert "org/x" in snippet.code
        if snippet.language == "python":
            ast.parse(snippet.code)
    assert "--weights 0.8 0.2" in found["revela-hub"].code


def test_search_with_the_fitted_weights() -> None:
    *_, search = snippets("org/x", {}, 0.3, 0.6)
    assert search.code.endswith("--mode hybrid --weights 0.7 0.3 --rerank self --rerank_weight 0.6")


def test_search_with_the_fitted_bm25() -> None:
    fitted = BM25Settings(stemmer="german", stopwords="none", split_identifiers=True)
    *_, search = snippets("org/x", {}, 0.3, bm25=fitted)
    _, _, options = search.code.partition(" --weights 0.7 0.3 ")
    assert options == "--bm25_stemmer german --bm25_stopwords none --bm25_split_identifiers true"
    values = parser_of("search").read(shlex.split(search.code)[2:])
    assert values is not None
    assert bm25_settings(**{name: values.get(f"bm25_{name}") for name in asdict(fitted)}) == fitted


def test_prompts_are_part_of_the_texts_that_servers_get() -> None:
    prompts = {"query": 'Q\'s "query": ', "passage": "passage: "}
    found = {snippet.title: snippet.code for snippet in snippets("org/x", prompts, 0.3)}
    ast.parse(found["vLLM"])
    assert f'\\"query\\": {QUERY}' in found["vLLM"] and '"passage: Swallows' in found["vLLM"]
    assert "curl" in found["TEI"] and "starts with the model's prompt" in found["TEI"]


def test_servers_do_not_run_the_code_of_a_model() -> None:
    found = {snippet.title: snippet.code for snippet in snippets("org/x", {}, 0.3, remote_code=True)}
    assert list(found) == ["sentence-transformers", "revela-hub"]
    assert "trust_remote_code=True" in found["sentence-transformers"]


def test_names_are_quoted_for_the_shell() -> None:
    assert all("'my model'" in snippet.code for snippet in answer_snippets("my model"))
