"""A run is measured, its best weights are exported, and never weights worse than the base model's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.hybrid_weight import fit_hybrid, fit_weight, fuse_runs, halves
from revela_hub.evaluation.retrieval import RetrievalScores, bm25_run, retrieval_run, score_run
from revela_hub.retrieval.hybrid import BM25_WEIGHT
from revela_hub.trainers.base.distributed import from_main, rank
from revela_hub.trainers.base.measuring import BestWeights

WORDS = [f"w{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(80)]


def words_task() -> RetrievalTask:
    ids = [f"d{n:02}" for n in range(80)]
    corpus = {id_: f"{WORDS[n]} alpha beta" for n, id_ in enumerate(ids)}
    queries = {f"sentence-{n}": WORDS[n % 60] for n in range(120)}
    return RetrievalTask(corpus, queries, {f"sentence-{n}": {ids[n % 60]: 1} for n in range(120)}, "probe")


@pytest.fixture
def task() -> RetrievalTask:
    return words_task()


class Model(nn.Module):
    """A vector for each word; `skill` words are told apart, of the others all look alike."""

    def __init__(self, skill: int) -> None:
        super().__init__()
        self.skill = nn.Parameter(torch.tensor(float(skill)))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def _encode(self, texts: list[str], **_: Any) -> np.ndarray:
        known = [WORDS.index(text.split()[0]) for text in texts]
        vectors = np.zeros((len(texts), 81), np.float32)
        for row, word in zip(vectors, known, strict=True):
            row[word if word < float(self.skill.detach()) else 80] = 1
        return vectors

    encode_query = encode_document = _encode


def measuring(
    model: Model, task: RetrievalTask, folder: Path, log: Callable[[str], None] = lambda line: None
) -> BestWeights:
    trainer: Any = SimpleNamespace(
        model=model,
        retrieval_task=task,
        args=SimpleNamespace(should_save=rank() == 0, log=log),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        retriever=model,
        state=SimpleNamespace(global_step=0, max_steps=90, log_history=[]),
    )
    return BestWeights(trainer, folder)


def evaluate(measured: BestWeights, step: int) -> bool:
    """As the Trainer does; whether the run is to end."""
    trainer: Any = measured.trainer
    run = from_main(lambda: retrieval_run(trainer.model, measured.task))  # as `rank_together`
    trainer.measurement = score_run(run, measured.task), run
    control: Any = SimpleNamespace(should_training_stop=False)
    state = trainer.state
    state.global_step = step
    measured.on_evaluate(None, state, control, metrics={"eval_loss": 1.0})  # type: ignore[arg-type]
    measured.on_evaluate(None, state, control, metrics={"eval_ndcg_at_10": 1.0})  # type: ignore[arg-type]
    return bool(control.should_training_stop)


def resume_at(measured: BestWeights, step: int, evaluated: tuple[int, ...] = ()) -> None:
    state: Any = measured.trainer.state
    state.global_step, state.log_history = step, [{"step": at, "eval_ndcg_at_10": 0.5} for at in evaluated]
    measured.on_train_begin(None, state, None)  # type: ignore[arg-type]


def run(
    skills: dict[int, int],
    task: RetrievalTask,
    folder: Path,
    *,
    every: int = 10,
    last: bool = False,
    **options: Any,
) -> Any:
    """Update -> skill: what the training does to the model."""
    model = Model(skills[0])
    measured = measuring(model, task, folder, **options)
    measured.last = last
    evaluate(measured, 0)
    end = max(skills)
    for step in range(1, end + 1):
        with torch.no_grad():
            model.skill.copy_(torch.tensor(float(skills.get(step, float(model.skill)))))
        if (step % every == 0 or step == end) and evaluate(measured, step):
            break
    return model, measured.finish(), step


def test_the_best_moment_is_handed_out_and_said(task: RetrievalTask, tmp_path: Path) -> None:
    model, outcome, _ = run({0: 20, 10: 50, 20: 45, 30: 40}, task, tmp_path)
    assert float(model.skill) == 50 and outcome.step == 10 and outcome.last_step == 30
    assert outcome.difference.verdict == "better"
    assert outcome.sentence().startswith("Training improved nDCG@10 by 0.")
    assert "60 queries of the probe" in outcome.sentence()
    assert list(outcome.curve) == [0, 10, 20, 30] and outcome.curve[10] == max(outcome.curve.values())
    assert outcome.base.ndcg_at_10 == outcome.curve[0] and outcome.exported.ndcg_at_10 == outcome.curve[10]
    table = outcome.report()
    assert "trained (step 10 of 30)" in table and "BM25" in table and "hybrid (" in table
    weight = outcome.hybrid.weight
    assert f"--weights {1 - weight:.1f} {weight:.1f}) improves nDCG@10 by another 0." in outcome.advice()
    alone = replace(outcome, hybrid=replace(outcome.hybrid, weight=0.0, scores=outcome.exported))
    assert alone.advice() == ""
    assert [result.model for result in outcome.card()["results"]][:3] == ["base model", None, "BM25"]


def test_what_is_worse_than_the_start_is_not_handed_out(task: RetrievalTask, tmp_path: Path) -> None:
    skills = {0: 50, 30: 10}
    model, outcome, _ = run(skills, task, tmp_path / "a", every=1000)
    assert float(model.skill) == 50 and outcome.step == 0
    assert "lowered nDCG@10 by 0." in outcome.sentence() and "Exported: the base model." in outcome.sentence()
    assert outcome.exported.ndcg_at_10 == outcome.base.ndcg_at_10
    model, outcome, _ = run(skills, task, tmp_path / "b", every=1000, last=True)
    assert float(model.skill) == 10 and outcome.step == 30
    assert outcome.sentence().endswith("Exported: step 30 of 30 (--export last).")


def test_chance_is_called_chance(task: RetrievalTask, tmp_path: Path) -> None:
    model, outcome, _ = run({0: 40, 10: 41}, task, tmp_path / "a")
    assert "no significant difference" in outcome.sentence()
    assert float(model.skill) in (40, 41)
    model, outcome, _ = run({0: 40, 10: 40}, task, tmp_path / "b")
    assert "kept the base model" in outcome.sentence() and outcome.difference.difference == 0


def test_the_half_that_chose_does_not_keep_what_is_worse_on_the_whole(task: RetrievalTask, tmp_path: Path) -> None:
    model = Model(40)
    measured = measuring(model, task, tmp_path)
    evaluate(measured, 0)
    base = measured.scores[0]
    own = base.per_query["ndcg_at_10"]
    (chosen, *_), (*told,) = (
        [query for query in sorted(half) if own[query] == 1][:2] for half in (measured.dev, measured.test)
    )
    # A little better on the dev half, and worse, or no worse, on the test half.
    for update, lost in ((10, told), (20, [])):
        scores = own | {query: 0.5 for query in lost} | {chosen: 1.1}
        per_query = {**base.per_query, "ndcg_at_10": scores}
        measured.scores = {0: base, update: RetrievalScores.of(base.name, per_query, base.documents)}
        measured.store(update)
        outcome = measured.finish()
        assert outcome.difference.verdict == "no significant difference" and outcome.step == (0 if lost else update)


def test_a_run_that_no_longer_improves_ends(task: RetrievalTask, tmp_path: Path) -> None:
    skills = {0: 50, 10: 55, 20: 10, 30: 8, 40: 5, 90: 1}
    lines: list[str] = []
    model, outcome, step = run(skills, task, tmp_path / "a", log=lines.append)
    assert step == 40 and float(model.skill) == 55 and outcome.step == 10 and len(lines) == 1
    resumed = measuring(Model(5), task, tmp_path / "a")  # killed after step 30
    evaluate(resumed, 0)
    resume_at(resumed, 30, (10, 20, 30))
    assert evaluate(resumed, 40) and resumed.best_step == 10
    model, outcome, step = run(skills, task, tmp_path / "c", last=True)
    assert step == 90 and float(model.skill) == 1 and outcome.step == 90
    assert run({0: 50, 20: 40, 40: 45, 60: 47, 80: 60, 90: 65}, task, tmp_path / "b", every=30)[2] == 90


@pytest.mark.parametrize(("at", "known"), [(4, [0]), (9, [0]), (10, [0, 10]), (15, [0, 10])])
def test_a_resumed_run_knows_its_best_step(task: RetrievalTask, tmp_path: Path, at: int, known: list[int]) -> None:
    """Evaluated at steps 5 and 10 and killed; if it resumes from an older checkpoint than its best step, it chooses again."""
    model = Model(20)
    whole = measuring(model, task, tmp_path)
    for step, skill in ((0, 20), (5, 40), (10, 60)):
        model.skill.data.fill_(skill)
        evaluate(whole, step)
    model = Model(20)
    resumed = measuring(model, task, tmp_path)
    evaluate(resumed, 0)
    resume_at(resumed, at)
    assert sorted(resumed.scores) == known
    assert list(tmp_path.rglob("step-10.*")) == [tmp_path / "measured" / "step-10.safetensors"] * (at >= 10)
    for step, skill in ((10, 45), (15, 30), (20, 25)):
        if step > at:
            model.skill.data.fill_(skill)
            evaluate(resumed, step)
    outcome = resumed.finish()
    assert outcome.step == 10 and float(model.skill.detach()) == (60 if at >= 10 else 45)
    assert outcome.base == whole.scores[0] and outcome.exported == score_run(retrieval_run(model, task), task)


def test_a_run_that_exported_the_last_step_may_be_resumed_to_export_the_best(
    task: RetrievalTask, tmp_path: Path
) -> None:
    """The weights of step 10, its best, were not kept."""
    run({0: 20, 10: 60, 20: 40}, task, tmp_path, last=True)
    model = Model(20)
    resumed = measuring(model, task, tmp_path)
    evaluate(resumed, 0)
    resume_at(resumed, 20, (10, 20))
    model.skill.data.fill_(50)
    evaluate(resumed, 30)
    outcome = resumed.finish()
    assert outcome.step == 30 and float(model.skill) == 50 and list(outcome.curve) == [0, 10, 20, 30]


def test_scores_of_another_task_are_not_compared(task: RetrievalTask, tmp_path: Path) -> None:
    run({0: 20, 10: 60}, task, tmp_path)
    fewer = RetrievalTask(task.corpus, dict(list(task.queries.items())[:40]), task.qrels, task.name)
    renamed = RetrievalTask(task.corpus, task.queries, task.qrels, "other texts")
    asked = RetrievalTask(task.corpus, {name: f"{text}?" for name, text in task.queries.items()}, task.qrels, task.name)
    for other, known in ((task, [10]), (fewer, []), (renamed, []), (asked, [])):
        resumed = measuring(Model(20), other, tmp_path)
        resume_at(resumed, 10, (10,))
        assert sorted(resumed.scores) == list(resumed._curve(resumed.trainer.state)) == known


def test_the_weight_of_a_hybrid_is_chosen_without_the_query(task: RetrievalTask) -> None:
    model = Model(30)
    dense, bm25 = retrieval_run(model, task), bm25_run(task)
    fitted = fit_hybrid(dense, bm25, task)
    assert 0 < fitted.weight <= 1
    assert fitted.scores.ndcg_at_10 >= score_run(dense, task).ndcg_at_10
    one, other = halves(task.queries)
    assert one | other == set(task.queries) and not one & other and abs(len(one) - len(other)) <= 1
    # of BM25 alone and of the retriever alone it is the same ranking
    assert score_run(fuse_runs(dense, bm25, task, 1.0), task).ndcg_at_10 == score_run(bm25, task).ndcg_at_10

    useless = {query: {} for query in task.queries}
    alone = fit_hybrid(dense, useless, task)
    assert alone.weight == BM25_WEIGHT and alone.scores.per_query == score_run(dense, task).per_query


def test_made_queries_must_support_a_larger_weight_by_more(task: RetrievalTask) -> None:
    ids = list(task.corpus)
    right = {query: next(iter(judged)) for query, judged in task.qrels.items()}
    better = sorted(task.queries)[:3]  # BM25 finds three passages that the retriever ranks second
    wrong = {query: next(id_ for id_ in ids if id_ != right[query]) for query in task.queries}
    dense = {
        q: {right[q]: 1.0, wrong[q]: 0.9} if q not in better else {wrong[q]: 1.0, right[q]: 0.4, "x": 0.0}
        for q in task.queries
    }
    bm25 = {q: {right[q]: 1.0} if q in better else {} for q in task.queries}
    known = {id_: text for id_, text in task.corpus.items()} | {"x": "none"}
    labelled, made = (RetrievalTask(known, task.queries, task.qrels, name) for name in ("labels", "probe"))
    assert fit_weight(dense, bm25, labelled) > BM25_WEIGHT  # 1.7 standard errors
    assert fit_weight(dense, bm25, made) == BM25_WEIGHT
