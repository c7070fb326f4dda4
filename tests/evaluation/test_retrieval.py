"""Scores against sums done manually, and exact search against a plain loop."""

import math
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.evaluation import evaluate_bm25, evaluate_ranking, evaluate_retrieval, score_run
from revela_hub.evaluation.hybrid_weight import fuse_runs
from revela_hub.evaluation.question_answering import holds_answer
from revela_hub.evaluation.retrieval import ranking_run, read_run, write_run
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


def test_metrics_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """With ties, grades, cut-offs, a relevant document outside the corpus, and a query without hits."""
    generator = np.random.default_rng(3)
    corpus = {f"d{number:02d}": "" for number in range(60)}
    qrels = {
        f"q{n}": {d: int(generator.integers(0, 4)) for d in [*generator.choice([*corpus], 9), "no"]} for n in range(8)
    }
    run = {q: {d: float(generator.integers(0, 9)) for d in corpus} for q in qrels} | {"q0": {}}
    task = RetrievalTask(corpus, dict.fromkeys(qrels, ""), qrels, "loop")
    expected: dict[str, list[float]] = {}
    for query, judged in qrels.items():
        ranked = [judged.get(d, 0) for _, d in sorted(((s, d) for d, s in run[query].items()), reverse=True)]
        best = sorted(judged.values(), reverse=True)
        first = next((rank for rank, grade in enumerate(ranked, 1) if grade), 10**9)
        for k in (1, 5, 10, 50):
            gains, ideal = (sum(g / math.log2(1 + r) for r, g in enumerate(of[:k], 1)) for of in (ranked, best))
            found = sum(grade > 0 for grade in ranked[:k]) / sum(grade > 0 for grade in best)
            for name, score in (("ndcg", gains / ideal), ("mrr", 1 / first if first <= k else 0.0), ("recall", found)):
                expected.setdefault(f"{name}_at_{k}", []).append(score)
    scores = score_run(run, task, [metric.replace("_at_", "@") for metric in expected])
    for metric, values in expected.items():
        assert [*scores.per_query[metric].values()] == pytest.approx(values), metric
        assert scores.to_dict()[metric] == getattr(scores, metric) == pytest.approx(np.mean(values))
    assert (scores.queries, scores.documents, scores.unanswered) == (8, 60, 1)
    write_run(run, tmp_path / "run.trec", "a model")
    again = read_run(tmp_path / "run.trec", task, 50)
    assert again == run and score_run(again, task, [*expected]) == scores
    for other in (replace(task, corpus={"d00": ""}), replace(task, queries={"other": ""}, qrels={"other": {"d00": 1}})):
        with pytest.raises(UserError, match="not a ranking of loop"):
            read_run(tmp_path / "run.trec", other, 50)


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


def test_runs_are_fused_as_rankers_are() -> None:
    encoder, task = random_task(documents=40, queries=9)
    task = replace(task, corpus={id_: f"{text} {text[-1] * 3}" for id_, text in task.corpus.items()})
    encoder.documents = {f"{text} {text[-1] * 3}": vector for text, vector in encoder.documents.items()}
    bm25 = ranking_run(task, RankerSettings(mode="bm25"))
    found = fuse_runs(ranking_run(task, RankerSettings(), dense=encoder), bm25, task, 0.4)
    hybrid = RankerSettings(mode="hybrid", weights=(0.6, 0.4))
    expected = ranking_run(task, hybrid, dense=encoder)
    assert max(map(len, bm25.values())) > 0
    for query in task.queries:
        assert found[query] == pytest.approx(expected[query], abs=1e-6)


def test_an_answer_is_found_by_the_tokens_of_dpr() -> None:
    regex = pytest.importorskip("regex", reason="transformers needs it")
    token = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")

    def tokens(text: str) -> list[str]:
        return [word.lower() for word in token.findall(unicodedata.normalize("NFD", text))]

    text = "The U.S.-led \u201cCoalition\u201d of 1991\u200b, not_it: 3.5% of Gr\u00f6\u00dfe\tand \u0939\u093f\u0928\u094d\u0926\u0940"
    answers = "the u.s. -|coalition|of 1991 ,|1991|199|it|_|3|3.5 %|gro\u0308\u00dfe|grosse|\u0939\u093f\u0928\u094d\u0926\u0940|\u0939|led coalition"
    for answer in answers.split("|"):
        wanted, found = tokens(answer), tokens(text)
        expected = any(found[at : at + len(wanted)] == wanted for at in range(len(found)))
        assert holds_answer([text], [answer]) is expected, answer
