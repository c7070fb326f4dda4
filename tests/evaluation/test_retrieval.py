"""Scores against sums done manually, and exact search against a plain loop."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.evaluation import evaluate_bm25, evaluate_ranking, evaluate_retrieval, score_run
from revela_hub.retrieval.dense import best_hits
from revela_hub.retrieval.ranking import RankerSettings


class Table:
    """An encoder that looks its vectors up, and remembers how it was called."""

    def __init__(self, queries: dict[str, list[float]], documents: dict[str, list[float]]) -> None:
        self.queries, self.documents = queries, documents
        self.calls: list[tuple[int, int, bool]] = []
        self.similarity_fn_name: str | None = None

    def encode_query(self, inputs: list[str], /, *, batch_size: int, show_progress_bar: bool) -> np.ndarray:
        return np.array([self.queries[text] for text in inputs])

    def encode_document(self, inputs: list[str], /, *, batch_size: int, show_progress_bar: bool) -> torch.Tensor:
        self.calls.append((len(inputs), batch_size, show_progress_bar))
        return torch.tensor([self.documents[text] for text in inputs], dtype=torch.float64)


def random_task(documents: int, queries: int, dimension: int = 8) -> tuple[Table, RetrievalTask]:
    generator = np.random.default_rng(0)
    corpus = {f"d{number:03d}": f"document {number}" for number in range(documents)}
    asked = {f"q{number}": f"query {number}" for number in range(queries)}
    qrels = {q: {str(d): 1 for d in generator.choice(list(corpus), size=3, replace=False)} for q in asked}
    encoder = Table(
        {text: generator.normal(size=dimension).tolist() for text in asked.values()},
        {text: generator.normal(size=dimension).tolist() for text in corpus.values()},
    )
    return encoder, RetrievalTask(corpus, asked, qrels, "random")


def test_scores_are_those_computed_by_hand() -> None:
    corpus = {f"d{number:02d}": "" for number in range(1, 13)}
    at_rank = {f"d{number:02d}": 1.0 - number / 100 for number in range(1, 13)}  # d01 is first, d12 last
    qrels = {
        "graded": {"d02": 2, "d03": 1, "d04": 0},
        "tenth": {"d10": 1},
        "eleventh": {"d11": 1},
        "no hits": {"d01": 1},
        "half": {"d01": 1, "absent": 1},
    }
    task = RetrievalTask(corpus, {query: query for query in qrels}, qrels, "manual")
    scores = score_run({query: {} if query == "no hits" else at_rank for query in qrels}, task)

    graded = (2 / math.log2(3) + 1 / math.log2(4)) / (2 / math.log2(2) + 1 / math.log2(3))
    half = 1 / (1 + 1 / math.log2(3))
    assert scores.ndcg_at_10 == pytest.approx((graded + 1 / math.log2(11) + 0 + 0 + half) / 5)
    assert scores.mrr_at_10 == pytest.approx((1 / 2 + 1 / 10 + 0 + 0 + 1) / 5)
    assert scores.recall_at_100 == pytest.approx((1 + 1 + 1 + 0 + 1 / 2) / 5)
    assert (scores.queries, scores.documents) == (5, 12)
    assert json.loads(json.dumps(scores.to_dict()))["mrr_at_10"] == scores.mrr_at_10


def test_grades_are_whole_numbers_also_of_pandas() -> None:
    grade: Any = np.int64(1)
    task = RetrievalTask({"a": "rivers", "b": "lakes"}, {"q": "rivers"}, {"q": {"a": grade}}, "t")
    assert evaluate_bm25(task).ndcg_at_10 == 1
    for qrels in ({"q": {"a": 0.5}}, {}):
        with pytest.raises(UserError, match="judgements with whole numbers"):
            evaluate_bm25(replace(task, qrels=qrels))  # type: ignore[arg-type]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_search_is_exact(similarity: str) -> None:
    encoder, task = random_task(documents=150, queries=11)
    encoder.similarity_fn_name = similarity
    run: dict[str, dict[str, float]] = {}
    for id_, query in task.queries.items():
        a = np.array(encoder.queries[query])
        for document, text in task.corpus.items():
            b = np.array(encoder.documents[text])
            norm = np.linalg.norm(a) * np.linalg.norm(b) if similarity == "cosine" else 1.0
            run.setdefault(id_, {})[document] = float(a @ b / norm)
    scores = evaluate_retrieval(encoder, task, 4)
    expected = score_run(run, task)
    assert scores.to_dict() == pytest.approx(expected.to_dict())
    assert 0.3 < scores.recall_at_100 < 1.0  # a task on which mistakes would show
    assert sum(texts for texts, *_ in encoder.calls) == 150  # each once
    assert {call[1:] for call in encoder.calls} == {(4, False)}
    for metric, values in scores.per_query.items():
        assert values == pytest.approx(expected.per_query[metric])
        assert np.mean(list(values.values())) == pytest.approx(getattr(scores, metric))


def test_an_encoder_says_how_its_vectors_are_compared() -> None:
    """By cosine the shorter vector is the better one, by dot product the longer one."""
    hybrid = RankerSettings(mode="hybrid", weights=(1.0, 0.0))
    encoder = Table({"x": [1.0, 0.0]}, {"right": [5.0, 5.0], "wrong": [1.0, 0.0]})
    task = RetrievalTask({"a": "right", "b": "wrong"}, {"q": "x"}, {"q": {"a": 1}}, "lengths")
    assert evaluate_retrieval(encoder, task).mrr_at_10 == 0.5  # one that does not say: cosine
    for name, expected in (("dot", 1.0), ("cosine", 0.5)):
        encoder.similarity_fn_name = name
        assert evaluate_retrieval(encoder, task).mrr_at_10 == expected
        assert evaluate_ranking(task, hybrid, dense=encoder).mrr_at_10 == expected
    encoder.similarity_fn_name = "euclidean"
    with pytest.raises(UserError, match="compares by euclidean distance"):
        evaluate_retrieval(encoder, task)


def test_equal_scores_rank_by_descending_id() -> None:
    corpus = {f"d{number:03d}": f"{number}" for number in range(150)}
    encoder = Table({"q": [1.0, 2.0]}, {text: [0.5, 0.5] for text in corpus.values()})

    def evaluate(relevant: str) -> tuple[float, float]:
        task = RetrievalTask(corpus, {"q": "q"}, {"q": {relevant: 1}}, "ties")
        scores = evaluate_retrieval(encoder, task)
        return scores.mrr_at_10, scores.recall_at_100

    assert evaluate("d149") == (1.0, 1.0)
    assert evaluate("d148") == (0.5, 1.0)
    assert evaluate("d050") == (0.0, 1.0)
    assert evaluate("d049") == (0.0, 0.0)


def test_a_query_does_not_find_itself() -> None:
    """As in ArguAna and Quora, where the queries are in the corpus under their own ids, unless it is judged relevant."""
    corpus = {"a": "near", "b": "nearer", "c": "far"}
    vectors = {"near": [1.0, 0.5], "nearer": [1.0, 0.1], "far": [0.0, 1.0], "itself": [1.0, 0.2]}
    encoder = Table({"itself": [1.0, 0.2]}, vectors)
    for corpus_id, answer, expected in (("q", "b", 1.0), ("q", "q", 1.0), ("other", "b", 0.5)):
        task = RetrievalTask(corpus | {corpus_id: "itself"}, {"q": "itself"}, {"q": {answer: 1}}, "own")
        assert evaluate_retrieval(encoder, task).mrr_at_10 == expected
        assert evaluate_bm25(task).mrr_at_10 == (1.0 if answer == "q" else 0.0)


def test_an_encoder_with_bm25() -> None:
    corpus = {"a": "Rivers carry sediment", "b": "gold", "c": "cats and dogs"}
    encoder = Table(
        {"river": [1.0, 0.0], "pets": [0.1, 1.0]}, dict(zip(corpus.values(), ([0.5, 1], [1, 0], [0, 1]), strict=True))
    )
    task = RetrievalTask(corpus, {"q1": "river", "q2": "pets"}, {"q1": {"a": 1}, "q2": {"c": 1}}, "both")
    assert evaluate_retrieval(encoder, task).mrr_at_10 == 0.75
    assert evaluate_bm25(task).mrr_at_10 == 0.5
    for weights, expected in (((0.4, 0.6), 1.0), ((1.0, 0.0), 0.75)):
        settings = RankerSettings(mode="hybrid", weights=weights)
        assert evaluate_ranking(task, settings, dense=encoder).mrr_at_10 == expected


@pytest.mark.parametrize("size", [3, 7, 30])
def test_blocks_change_nothing_not_even_among_equals(size: int) -> None:
    scores = torch.randint(0, 6, (50, 30)).float()
    for k in (1, 5, 30):
        blocks = [(first, scores[:, first : first + size]) for first in range(0, 30, size)]
        found = best_hits(blocks, k)
        expected_scores, expected_rows = torch.sort(scores, dim=1, descending=True, stable=True)
        np.testing.assert_array_equal(found.rows_QK, expected_rows[:, :k].numpy())
        np.testing.assert_array_equal(found.scores_QK, expected_scores[:, :k].numpy())


def test_vectors_that_are_no_numbers_or_of_the_wrong_shape() -> None:
    encoder, task = random_task(documents=5, queries=1)
    encoder.documents["document 3"] = [float("nan")] * 8
    with pytest.raises(UserError, match="NaN or infinity"):
        evaluate_retrieval(encoder, task)
    encoder, task = random_task(documents=5, queries=1)
    encoder.queries = {"query 0": 1.0}  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"shape \(1,\) for 1 texts"):
        evaluate_retrieval(encoder, task)


def test_bm25_finds_words_and_nothing_else() -> None:
    corpus = {"a": "Rivers carry sediment", "b": "the sediments of a river carry gold", "c": "cats"}
    queries = {"stem": "a river's sediment", "none": "zebra", "stop words": "of the and"}
    qrels = {"stem": {"a": 1, "b": 1}, "none": {"a": 1}, "stop words": {"b": 1}}
    scores = evaluate_bm25(RetrievalTask(corpus, queries, qrels, "words"))
    # A query that shares no word with the corpus has no hits, although bm25s fills its list up with scores of 0.
    assert scores.ndcg_at_10 == scores.mrr_at_10 == scores.recall_at_100 == pytest.approx(1 / 3)
    without_words = RetrievalTask({"a": "", "b": "of the and"}, {"q": "gold"}, {"q": {"a": 1}}, "empty")
    assert evaluate_bm25(without_words).recall_at_100 == 0.0
