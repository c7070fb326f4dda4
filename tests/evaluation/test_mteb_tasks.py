"""mteb: names are found without network, mistakes are named, and its scores of a local task are ours."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from revela_hub.cli.main import main
from revela_hub.data.sources.beir import RetrievalTask, read_beir
from revela_hub.evaluation import evaluate_mteb, evaluate_retrieval
from revela_hub.evaluation.mteb_tasks import TaskScores, means_of, resolve_tasks, task_prompts
from revela_hub.retrieval.encoder import load_encoder

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

pytestmark = pytest.mark.skipif(find_spec("mteb") is None, reason="needs the extra mteb")


def test_names_of_tasks_of_benchmarks_and_of_the_sets_of_revelas_paper() -> None:
    """Tables 7, 8 and 10 of arXiv 2506.16552v3."""
    names = [task.metadata.name for task in resolve_tasks(["SciFact", "CoIR", "BEIR"])]
    assert names[0] == "SciFact" and {"AppsRetrieval", "CQADupstackRetrieval"} < set(names)
    beir, bright = ([task.metadata.name for task in resolve_tasks([name])] for name in ("BEIR13", "BRIGHT12"))
    rows = "ArguAna ClimateFEVER DBPedia FEVER FiQA2018 HotpotQA NFCorpus NQ QuoraRetrieval SCIDOCS SciFact TRECCOVID"
    assert sorted(beir) == sorted([*rows.split(), "Touche2020"])
    assert len(bright) == 12 and "BrightPonyRetrieval" in bright
    assert len(resolve_tasks(["MTEB56"])) == 56


def test_same_scores_as_mteb(retriever_folder: Path, tmp_path: Path, texts: list[str]) -> None:
    model = load_encoder(str(retriever_folder), device="cpu")
    folder = write_beir(tmp_path / "beir", texts)
    task = read_beir(folder)
    metrics = ["ndcg_at_10", "mrr_at_10", "recall_at_100", "ndcg_at_3", "mrr_at_100", "recall_at_50"]
    [by_mteb] = evaluate_mteb(model, [mteb_task(task)], batch_size=4, metrics=metrics, show_progress_bar=False)
    ours = evaluate_retrieval(model, task, batch_size=4, metrics=metrics)
    assert by_mteb.name == "LocalBeir"
    assert (by_mteb.queries, by_mteb.documents) == (ours.queries, ours.documents) == (20, 400)
    for metric in metrics:
        assert getattr(ours, metric) == pytest.approx(getattr(by_mteb, metric), abs=1e-5), metric
        assert 0.0 < getattr(ours, metric) < 1.0, metric  # not trivially equal
    # The prompts matter, so this also shows that both use them.
    model.prompts = {"query": "", "document": ""}
    assert evaluate_retrieval(model, task, metrics=metrics) != ours


def test_the_command_uses_the_given_prompt(
    retriever_folder: Path,
    tmp_path: Path,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_beir(tmp_path / "beir", texts)
    task = read_beir(folder)
    monkeypatch.setattr("revela_hub.evaluation.mteb_tasks.resolve_tasks", lambda names: [mteb_task(task)])
    found = []
    for words in (["--tasks", "LocalBeir"], ["--corpus", str(folder)]):
        given = ["evaluate", str(retriever_folder), *words, "--query_prompt", "zzz dog river: ", "--json"]
        assert main([*given, "--device", "cpu"]) == 0
        found += [row["ndcg_at_10"] for row in json.loads(capsys.readouterr().out)]
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert found[0] != pytest.approx(evaluate_retrieval(load_encoder(str(retriever_folder)), task).ndcg_at_10, abs=1e-4)


def test_a_task_of_tasks_is_their_mean(retriever_folder: Path, tmp_path: Path, texts: list[str]) -> None:
    from mteb.abstasks.aggregate_task_metadata import AggregateTaskMetadata
    from mteb.abstasks.aggregated_task import AbsTaskAggregate

    model = load_encoder(str(retriever_folder), device="cpu")
    task = read_beir(write_beir(tmp_path / "beir", texts))
    half = dict(list(task.queries.items())[:7])
    first = RetrievalTask(task.corpus, half, {query: task.qrels[query] for query in half}, "first")
    parts = [mteb_task(first, "First"), mteb_task(task, "Second")]

    class Both(AbsTaskAggregate):
        metadata = AggregateTaskMetadata(name="Both", tasks=parts, **COMMON)

    [scores] = evaluate_mteb(model, [Both()], show_progress_bar=False)
    ours = [evaluate_retrieval(model, each) for each in (first, task)]
    assert (scores.name, scores.queries, scores.documents) == ("Both", 27, 800)
    assert scores.ndcg_at_10 == pytest.approx((ours[0].ndcg_at_10 + ours[1].ndcg_at_10) / 2, abs=1e-5)
    [mean] = means_of(evaluate_mteb(model, parts, show_progress_bar=False))
    assert (mean.name, mean.queries, mean.documents) == ("mean of 2 tasks", 27, 800)
    assert mean.ndcg_at_10 == pytest.approx(scores.ndcg_at_10, abs=1e-9)


def test_instructions_are_put_before_the_queries(retriever_folder: Path, tmp_path: Path, texts: list[str]) -> None:
    model = load_encoder(str(retriever_folder), device="cpu")
    task = read_beir(write_beir(tmp_path / "beir", texts))
    own = model.prompts
    local = mteb_task(task, "SciFact")  # a name that mteb knows
    [scores] = evaluate_mteb(model, [local], instructions={"SciFact": "find the dog"}, show_progress_bar=False)
    assert model.prompts == own
    model.prompts = {"query": "Instruct: find the dog\nQuery: ", "document": ""}
    assert scores.ndcg_at_10 == pytest.approx(evaluate_retrieval(model, task).ndcg_at_10, abs=1e-5)
    names = ["CQADupstackRetrieval", "STS12", "Banking77Classification"]
    given = {"CQADupstackRetrieval": {"query": "alike", "corpus": ""}, "Banking77Classification": "intents"}
    prompts = task_prompts(resolve_tasks(names), given)
    assert (
        prompts["CQADupstackUnixRetrieval"] == "Instruct: alike\nQuery: "
        and not prompts["CQADupstackUnixRetrieval-document"]
    )
    assert prompts["STS12"] == "Instruct: Retrieve semantically similar text.\nQuery: "
    assert prompts["Banking77Classification"] == "Instruct: intents\nQuery: " and "STS12-document" not in prompts


def test_other_types_have_their_main_score_and_means_by_type(retriever_folder: Path) -> None:
    from mteb.mocks.mock_tasks import sts, summarization

    model = load_encoder(str(retriever_folder), device="cpu")
    tasks = [sts.MockSTSTask(), summarization.MockSummarizationTask()]
    found = evaluate_mteb(model, tasks, show_progress_bar=False)
    assert [each.category for each in found] == ["STS", "Summarization"]
    assert all(each.to_dict()["main_score"] == each.metrics["main_score"] for each in found)
    a, b, c = (
        TaskScores(str(s), {}, 0, 0, category=k, main_score=s) for s, k in ((0.1, "STS"), (0.2, "STS"), (0.9, "x"))
    )
    means = {each.name: pytest.approx(each.main_score) for each in means_of([a, b, c])}
    assert means == {"mean of 2 STS tasks": 0.15, "mean of 1 x tasks": 0.9, "mean of 3 tasks": 0.4}


def write_beir(folder: Path, texts: list[str]) -> Path:
    """400 documents of random words with and without a title, 20 queries, two graded judgements each."""
    generator = np.random.default_rng(1)
    words = " ".join(texts).split()
    (folder / "qrels").mkdir(parents=True)
    corpus, queries, qrels = [], [], ["query-id\tcorpus-id\tscore"]
    for number in range(400):
        record = {"_id": f"d{number}", "text": " ".join(generator.choice(words, 6))}
        corpus.append(record | ({"title": " ".join(generator.choice(words, 3))} if number % 3 else {}))
    for number in range(20):
        near, far = generator.choice(400, 2, replace=False)
        queries.append({"_id": f"q{number}", "text": " ".join(corpus[near]["text"].split()[:3])})
        qrels += [f"q{number}\td{near}\t2", f"q{number}\td{far}\t1"]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (folder / "qrels" / "test.tsv").write_text("\n".join(qrels))
    return folder


COMMON = {
    "description": "A BEIR folder.",
    "type": "Retrieval",
    "category": "t2t",
    "modalities": ["text"],
    "eval_splits": ["test"],
    "eval_langs": ["eng-Latn"],
    "main_score": "ndcg_at_10",
}


def mteb_task(task: RetrievalTask, task_name: str = "LocalBeir") -> "AbsTask":
    """The same task as an object of mteb's, its data already loaded."""
    from datasets import Dataset
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    class LocalBeir(AbsTaskRetrieval):
        metadata = TaskMetadata(name=task_name, dataset={"path": "local/beir", "revision": "0"}, **COMMON)

    local = LocalBeir()
    local.dataset = {
        "default": {
            "test": {
                "corpus": Dataset.from_list([{"id": id_, "text": text} for id_, text in task.corpus.items()]),
                "queries": Dataset.from_list([{"id": id_, "text": text} for id_, text in task.queries.items()]),
                "relevant_docs": task.qrels,
                "top_ranked": None,
            }
        }
    }
    local.data_loaded = True
    return local
