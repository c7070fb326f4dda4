"""Evaluating on tasks of mteb by name: BEIR, CoIR, BRIGHT and all other retrieval tasks of MTEB.

mteb downloads the data from the Hub, applies each task's rules and computes the scores; this module only converts input and
output. mteb's result cache is not used, so a changed model folder is always evaluated again.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from revela_hub.errors import UserError, require
from revela_hub.evaluation.retrieval import METRICS, RetrievalScores

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask
    from sentence_transformers import SentenceTransformer

BM25_BASELINE = "mteb/baseline-bm25s"
"""mteb's name for its BM25; its settings (k1 = 1.5, b = 0.75, Snowball stemmer) are not those of `evaluate_bm25`."""

PAPERS_TASKS = {
    "BEIR13": ("BEIR", ("MSMARCO", "CQADupstackRetrieval")),
    "BRIGHT12": ("BRIGHT(v1.1)", ("Long",)),
}
"""Sets of Revela's paper: a benchmark of mteb, and parts of the names of the tasks that it leaves out."""


def evaluate_mteb(
    model: "SentenceTransformer | str",
    tasks: "Sequence[str | AbsTask]",
    *,
    batch_size: int = 32,
    show_progress_bar: bool = True,
) -> list[RetrievalScores]:
    """Evaluate a model on mteb's retrieval tasks.

    Args:
        model: A SentenceTransformer, or "bm25" for mteb's own BM25.
        tasks: Names of tasks ("SciFact") or of benchmarks ("BEIR", "CoIR"), of the sets "BEIR13" and "BRIGHT12" of
            Revela's paper, or task objects of mteb.
        batch_size: Texts per forward pass.
        show_progress_bar: Whether to show progress bars on standard error.

    Returns:
        For each task the mean over its splits and subsets, as in mteb, and the total number of queries and documents.

    Raises:
        UserError: mteb is not installed, or a name is unknown or not a retrieval task.
    """
    resolved = resolve_tasks(tasks)
    import mteb

    evaluated: Any = mteb.get_model(BM25_BASELINE) if model == "bm25" else model
    return [_evaluate(evaluated, task, batch_size, show_progress_bar) for task in resolved]


def resolve_tasks(tasks: "Sequence[str | AbsTask]") -> "list[AbsTask]":
    """Return the tasks with these names of tasks and benchmarks; needs no network."""
    require("mteb")
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.abstasks.aggregated_task import AbsTaskAggregate

    resolved = [found for task in tasks for found in (_lookup(task) if isinstance(task, str) else [task])]
    for task in resolved:
        parts = task.tasks if isinstance(task, AbsTaskAggregate) else [task]
        if not all(isinstance(part, AbsTaskRetrieval) for part in parts):
            raise UserError(f"{task.metadata.name} is a {task.metadata.type} task; only retrieval tasks are supported")
    return resolved


def _lookup(name: str) -> "list[AbsTask]":
    import mteb

    if name in PAPERS_TASKS:
        benchmark, dropped = PAPERS_TASKS[name]
        tasks = mteb.get_benchmark(benchmark).tasks
        return [task for task in tasks if not any(part in task.metadata.name for part in dropped)]
    with contextlib.suppress(KeyError):
        return list(mteb.get_benchmark(name).tasks)
    try:
        return [mteb.get_task(name)]
    except KeyError as error:
        raise UserError(f"mteb has no task or benchmark {name!r} ({str(error.args[0]).strip()})") from error


def _evaluate(model: Any, task: "AbsTask", batch_size: int, show_progress_bar: bool) -> RetrievalScores:
    import mteb
    from mteb.abstasks.aggregated_task import AbsTaskAggregate

    name = task.metadata.name
    if isinstance(task, AbsTaskAggregate):  # CQADupstack: the mean over twelve forums
        return replace(
            mean_of([_evaluate(model, part, batch_size, show_progress_bar) for part in task.tasks]), name=name
        )
    was_loaded = task.data_loaded
    task.load_data()
    encode_kwargs: Any = {"batch_size": batch_size, "show_progress_bar": show_progress_bar}
    result = mteb.evaluate(
        model, task, cache=None, co2_tracker=False, encode_kwargs=encode_kwargs, show_progress_bar=show_progress_bar
    )
    # Afterwards: mteb converts tasks in its older data format during the evaluation.
    data: Any = task.dataset
    splits = [subset[split] for subset in data.values() for split in task.eval_splits if split in subset]
    sizes = [sum(len(split[part]) for split in splits) for part in ("queries", "corpus")]
    if not was_loaded:
        task.unload_data()
    return _mean(name, [subset for split in result.task_results[0].scores.values() for subset in split], *sizes)


def mean_of(scores: Sequence[RetrievalScores]) -> RetrievalScores:
    """Return the mean over tasks, with the total number of queries and documents."""
    sizes = [sum(each.queries for each in scores), sum(each.documents for each in scores)]
    return _mean(f"mean of {len(scores)} tasks", [each.to_dict() for each in scores], *sizes)


def _mean(name: str, scores: Sequence[Mapping[str, Any]], queries: int, documents: int) -> RetrievalScores:
    means: dict[str, Any] = {metric: float(sum(score[metric] for score in scores) / len(scores)) for metric in METRICS}
    return RetrievalScores(name, **means, queries=queries, documents=documents)
