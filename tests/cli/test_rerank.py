"""`--rerank` of search, evaluate and mine, with a tiny CrossEncoder, a tiny MultiVectorEncoder and a retriever's own token vectors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoTokenizer, BertConfig, BertModel

from revela_hub.cli.main import main
from revela_hub.data.sources.beir import RetrievalTask, write_beir
from revela_hub.errors import UserError
from revela_hub.retrieval import BM25, TextList
from revela_hub.retrieval.rerank import RerankedRanker, Reranker, has_tokens
from revela_hub.trainers.base.retriever import load_retriever


@pytest.fixture
def cross_encoder(tmp_path: Path, bert_folder: Path) -> Path:
    model = CrossEncoder(str(bert_folder), num_labels=1, device="cpu")
    model.save_pretrained(str(tmp_path / "cross-encoder"))
    return tmp_path / "cross-encoder"


@pytest.fixture
def multi_vector(tmp_path: Path, bert_folder: Path) -> Path:
    model = MultiVectorEncoder(str(bert_folder), device="cpu")
    model.save_pretrained(str(tmp_path / "multi-vector"))
    return tmp_path / "multi-vector"


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


QUERY = "the river and the fox"


def write_task(folder: Path, texts: list[str]) -> None:
    """A BEIR folder whose queries are the last two words of the texts."""
    corpus = {str(n): text for n, text in enumerate(texts)}
    queries = {name: " ".join(text.split()[-2:]) for name, text in corpus.items()}
    write_beir(RetrievalTask(corpus, queries, {name: {name: 1} for name in corpus}, "task"), folder)


@pytest.fixture
def search(corpus: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[tuple[str, float]]]:
    """Search with QUERY, and return the texts and scores."""

    def search(model: object, *options: object) -> list[tuple[str, float]]:
        words = ["search", str(model), QUERY, "--json", *map(str, options)]
        assert main([*words, *([] if "--index" in options else ["--corpus", str(corpus)])]) == 0
        return [(hit["text"], hit["score"]) for hit in json.loads(capsys.readouterr().out)["hits"]]

    return search


def test_scores_are_those_of_the_models(cross_encoder: Path, multi_vector: Path, texts: list[str]) -> None:
    pairs = [(QUERY, text) for text in texts]
    model = CrossEncoder(str(cross_encoder), device="cpu")
    scores = Reranker(str(cross_encoder), device="cpu", batch_size=2).scores(pairs)
    assert np.abs(scores - model.predict(pairs)).max() < 1e-5
    assert Reranker(str(cross_encoder)).scores([]).shape == (0,)
    tokens = MultiVectorEncoder(str(multi_vector), device="cpu")
    expected = tokens.similarity(tokens.encode_query([QUERY]), tokens.encode_document(texts))[0]
    assert np.abs(Reranker(str(multi_vector), device="cpu").scores(pairs) - np.asarray(expected)).max() < 1e-4


def late_interaction(retriever: SentenceTransformer, query: str, passage: str, prompt: str = "Passage: ") -> float:
    """The equation of `retrieval.rerank` in plain loops, in float64; the prompts are part of the texts."""
    vectors = []
    for start, text in (("Query: ", query), (prompt, passage)):
        features = retriever.tokenizer([start + text], return_tensors="pt")
        states = retriever[0].auto_model(**features).last_hidden_state[0].detach().numpy().astype(np.float64)
        pooled = 0 if retriever[1].include_prompt else len(retriever.tokenizer(start)["input_ids"]) - 1  # without [SEP]
        vectors.append([state / np.linalg.norm(state) for state in states[pooled:]])
    of_query, of_passage = vectors
    return sum(max(float(one @ other) for other in of_passage) for one in of_query) / len(of_query)


@pytest.mark.parametrize("included", [True, False])
def test_late_interaction_equals_a_loop(retriever_folder: Path, texts: list[str], included: bool) -> None:
    retriever = SentenceTransformer(str(retriever_folder), device="cpu")
    retriever.set_pooling_include_prompt(included)
    pairs = [(query, text) for query in (QUERY, "width") for text in texts]
    expected = [late_interaction(retriever, *pair) for pair in pairs]
    assert np.abs(Reranker(retriever, batch_size=2).scores(pairs) - expected).max() < 1e-6
    prompted = Reranker(retriever, prompts={"query": "Passage: "}).scores(pairs)
    assert np.abs(prompted - expected).max() > 1e-4


def test_queries_and_passages_without_comparable_token_vectors(
    retriever_folder: Path, bert_folder: Path, tmp_path: Path
) -> None:
    """Only the pooled vectors of such a retriever are comparable."""
    small = BertModel(BertConfig.from_pretrained(bert_folder, hidden_size=8, num_attention_heads=1))
    small.save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(bert_folder).save_pretrained(tmp_path / "small")
    query, document = Transformer(str(tmp_path / "small")), Transformer(str(bert_folder))
    size = document.get_embedding_dimension()
    for first, possible in ((query, False), (document, True), (Transformer(str(bert_folder)), False)):
        of_query = [first, Pooling(first.get_embedding_dimension()), Dense(first.get_embedding_dimension(), size)]
        router = Router.for_query_document(of_query, [document, Pooling(size)])
        retriever = SentenceTransformer(modules=[router], device="cpu")
        assert has_tokens(retriever) == possible
        if possible:
            assert Reranker(retriever).scores([("a river", "a river")]) == pytest.approx([1.0])
        else:
            with pytest.raises(UserError):
                Reranker(retriever)


def test_an_adapted_retriever_is_reranked_with_the_fitted_weight(
    retriever_folder: Path,
    corpus: Path,
    texts: list[str],
    tmp_path: Path,
    search: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "adapted"
    folder.mkdir()
    plain = shutil.copytree(retriever_folder, tmp_path / "plain")
    retriever_folder.rename(folder / "retriever")
    (folder / "retriever" / "hybrid.json").write_text(json.dumps({"bm25_weight": 0.3, "token_weight": 0.8}))
    hybrid, tokens = ["--mode", "hybrid", "--weights", "0.7", "0.3"], ["--rerank", "self", "--rerank_weight", "0.8"]
    assert search(folder) == search(folder / "retriever") == search(plain, *hybrid, *tokens)
    assert search(folder, "--rerank", "none") == search(plain, *hybrid) != search(folder)
    assert search(folder, "--mode", "dense") == search(plain, "--mode", "dense")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"anchor": text.split()[1], "positive": text}) + "\n" for text in texts))
    mined = []
    for options in ([], ["--rerank", "none"], ["--rerank", "self"]):
        output = tmp_path / f"mined{len(mined)}.jsonl"
        words = ["mine", str(folder), "--pairs", str(pairs), "--corpus", str(corpus), "--output", str(output), *options]
        assert main([*words, "--mode", "hybrid", "--scores", "--fewer", "keep"]) == 0
        mined.append(output.read_text())
    assert mined[0] == mined[1] != mined[2]
    write_task(tmp_path / "beir", texts)
    capsys.readouterr()
    words = ["evaluate", str(folder), "--corpus", str(tmp_path / "beir"), "--json"]
    found = []
    for options in ([], ["--mode", "hybrid"], ["--mode", "hybrid", "--rerank", "none"]):
        assert main([*words, *options]) == 0
        found.append([row["ndcg_at_10"] for row in json.loads(capsys.readouterr().out)])
    assert found[0] == found[1][1:] and found[2] == found[1][:1]  # was: without --mode, the retriever alone


def scaled(scores: list[float]) -> list[float]:
    low, high = min(scores), max(scores)
    return [(score - low) / (high - low) for score in scores]


@pytest.mark.parametrize("mode", ["dense", "hybrid"])
def test_search_combines_both_scores(mode: str, retriever_folder: Path, search: Callable[..., Any]) -> None:
    retriever = SentenceTransformer(str(retriever_folder), device="cpu")
    options = [retriever_folder, "--top_k", 100, "--mode", mode]
    first = search(*options)
    assert search(*options, "--rerank", "none") == first
    for weight, depth in ((0.5, 20), (0.4, 3)):
        given = [] if depth == 20 else ["--rerank_weight", weight, "--rerank_depth", depth]  # or the defaults
        found = search(*options, "--rerank", "self", *given)
        top = first[:depth]
        tokens = scaled([late_interaction(retriever, QUERY, text) for text, _ in top])
        both = [
            (1 - weight) * one + weight * other
            for one, other in zip(scaled([score for _, score in top]), tokens, strict=True)
        ]
        assert [score for _, score in found[:depth]] == pytest.approx(sorted(both, reverse=True), abs=1e-4)
        assert [text for text, _ in found[depth:]] == [text for text, _ in first[depth:]]


def test_the_best_results_are_reordered_and_the_rest_follows(cross_encoder: Path, texts: list[str]) -> None:
    passages = TextList(texts)
    bm25, reranker = BM25(texts), Reranker(str(cross_encoder), device="cpu")
    queries = [QUERY, "width of the rectangle", "zebra"]
    plain = bm25.search(queries, 10)
    for depth in (1, 3, 100):
        ranker = RerankedRanker(bm25, reranker, passages, depth)
        found = ranker.search(queries, 10)
        for query, (rows, scores, before) in enumerate(zip(found.rows_QK, found.scores_QK, plain.rows_QK, strict=True)):
            known, before = rows[rows >= 0], before[before >= 0]
            assert sorted(known) == sorted(before)
            top = reranker.scores([(queries[query], texts[row]) for row in before[:depth]])
            assert known[:depth].tolist() == before[:depth][np.argsort(-top, kind="stable")].tolist()
            assert known[depth:].tolist() == before[depth:].tolist()
            assert (np.diff(scores[: len(known)]) <= 0).all()
    assert ranker.search(queries, 1).rows_QK.shape == (3, 1)


def test_evaluation_shows_both_rows(
    cross_encoder: Path, retriever_folder: Path, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path / "beir", texts)

    def rows(*words: str) -> list[dict[str, Any]]:
        assert main(["evaluate", *words, "--corpus", str(tmp_path / "beir"), "--json"]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found

    [alone] = rows("bm25")
    before, after = rows("bm25", "--rerank", str(cross_encoder), "--rerank_depth", "2")
    assert before == alone and after["recall_at_100"] == before["recall_at_100"]
    assert after["model"] == f"bm25 > {cross_encoder}" and after["compared_with"] == "bm25"
    # Late interaction for each retriever.
    names = [row["model"] for row in rows(str(retriever_folder), "bm25", "--rerank", "self", "--mode", "dense")]
    assert names == [str(retriever_folder), f"{retriever_folder} > self", "bm25"]


def test_models_of_the_wrong_kind_are_rejected(
    cross_encoder: Path,
    retriever_folder: Path,
    tiny_sparse_folder: Path,
    corpus: Path,
    bert_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def error(model: Any, *options: Any) -> str:
        assert main(["search", str(model), "x", "--corpus", str(corpus), *map(str, options)]) == 2
        return capsys.readouterr().err

    for model in (retriever_folder, tiny_sparse_folder, bert_folder):
        assert "rerank needs a CrossEncoder or a MultiVectorEncoder" in error("bm25", "--rerank", model)
    assert "is a reranker (CrossEncoder)" in error(cross_encoder)
    # sentence-transformers would load it as a dense model with new random layers.
    assert "is a SparseEncoder" in error(tiny_sparse_folder, "--mode", "dense")
    for other in (cross_encoder, tiny_sparse_folder):
        with pytest.raises(UserError):
            load_retriever(other)
    three = tmp_path / "three"
    CrossEncoder(str(bert_folder), num_labels=3, device="cpu").save_pretrained(str(three))
    assert "has 3 outputs; a reranker has one" in error("bm25", "--rerank", three)
