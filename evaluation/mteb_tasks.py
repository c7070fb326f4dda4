"""Evaluating on tasks of mteb by name: BEIR, CoIR, BRIGHT, and the whole of MTEB.

mteb downloads the data from the Hub, applies each task's rules and computes the scores; this module only converts input and
output. mteb's result cache is not used, so a changed model folder is always evaluated again.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from revela_hub.data.mixture.instructions import query_prompt
from revela_hub.errors import UserError, require
from revela_hub.evaluation.retrieval import METRICS, RetrievalScores, cutoff

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask
    from sentence_transformers import SentenceTransformer

logger = logging.getLogger(__name__)

BM25_BASELINE = "mteb/baseline-bm25s"
"""mteb's name for its BM25; its settings (k1 = 1.5, b = 0.75, Snowball stemmer) are not those of `evaluate_bm25`."""

PAPERS_TASKS = {
    "BEIR13": ("BEIR", ("MSMARCO", "CQADupstackRetrieval")),
    "BRIGHT12": ("BRIGHT(v1.1)", ("Long",)),
    "MTEB56": ("MTEB(eng, v1)", ()),
}
"""Sets of papers (arXiv 2506.16552, 2405.17428): a benchmark of mteb, and parts of the names of the tasks that they leave out."""

Instructions: TypeAlias = Mapping[str, str | Mapping[str, str]]
"""Task to its instruction, or to those of `query` and `corpus`, as in the `instructions.json` of arXiv 2405.17428's official model."""


@dataclass(frozen=True)
class TaskScores(RetrievalScores):
    """Scores of a task of mteb and its category: its main score in `metrics`, of a retrieval task the metrics that were asked for."""

    category: str = "Retrieval"
    main_score: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary, for JSON."""
        return super().to_dict() | {"category": self.category, "main_score": self.main_score}


def evaluate_mteb(
    model: "SentenceTransformer | str",
    tasks: "Sequence[str | AbsTask]",
    *,
    batch_size: int = 32,
    metrics: Sequence[str] = METRICS,
    instructions: Instructions | None = None,
    show_progress_bar: bool = True,
) -> list[TaskScores]:
    """Evaluate a model on tasks of mteb.

    Args:
        model: A SentenceTransformer, or "bm25" for mteb's own BM25.
        tasks: Names of tasks ("SciFact") or of benchmarks ("BEIR", "CoIR"), of the papers' sets "BEIR13", "BRIGHT12" and
            "MTEB56", or task objects of mteb.
        batch_size: Texts per forward pass.
        metrics: The metrics of retrieval tasks; other tasks have their main score.
        instructions: For models that follow instructions: the instruction of each task, which is put before its texts (before
            the queries only, if there are queries and documents) as `Instruct: {instruction}`, a new line and `Query:`. Tasks that
            are missing get mteb's own instruction. None: the prompts of the model, which other than retrieval tasks do not use.
        show_progress_bar: Whether to show progress bars on standard error.

    Returns:
        For each task the mean over its splits and subsets, as in mteb, and the total number of queries and documents.

    Raises:
        UserError: mteb is not installed, or a name is unknown.
    """
    resolved = resolve_tasks(tasks)
    import mteb

    if isinstance(model, str):
        assert model == "bm25"
        evaluated: Any = mteb.get_model(BM25_BASELINE)
        return [_evaluate(evaluated, task, batch_size, metrics, show_progress_bar) for task in resolved]
    own: dict[str, Any] = model.prompts
    try:
        if instructions is not None:
            model.prompts = own | task_prompts(resolved, instructions)
        return [_evaluate(model, task, batch_size, metrics, show_progress_bar) for task in resolved]
    finally:
        model.prompts = own


def resolve_tasks(tasks: "Sequence[str | AbsTask]") -> "list[AbsTask]":
    """Return the tasks with these names of tasks and benchmarks; needs no network."""
    require("mteb")
    return [found for task in tasks for found in (_lookup(task) if isinstance(task, str) else [task])]


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


def task_prompts(tasks: "Sequence[AbsTask]", instructions: Instructions) -> dict[str, str]:
    """Return the prompts of tasks by mteb's names for them: `task` for queries and in symmetric tasks, `task-document`."""
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.abstasks.aggregated_task import AbsTaskAggregate

    prompts: dict[str, str] = {}
    for task in tasks:
        name = task.metadata.name
        if isinstance(task, AbsTaskAggregate):
            of_parts = {part.metadata.name: instructions[name] for part in task.tasks if name in instructions}
            prompts |= task_prompts(task.tasks, of_parts | dict(instructions))
            continue
        if instructions and name not in instructions:
            logger.warning("%s has no instruction: mteb's own is used", name)
        given: Any = instructions.get(name, task.metadata.prompt or task.abstask_prompt)
        both = given if isinstance(given, Mapping) else {"query": given}
        prompts[name] = query_prompt(both["query"])
        if isinstance(task, AbsTaskRetrieval):
            prompts[f"{name}-document"] = query_prompt(both.get("corpus") or both.get("document") or "")
    return prompts


def _evaluate(
    model: Any, task: "AbsTask", batch_size: int, metrics: Sequence[str], show_progress_bar: bool
) -> TaskScores:
    import mteb
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.abstasks.aggregated_task import AbsTaskAggregate

    name, category = task.metadata.name, task.metadata.type
    if isinstance(task, AbsTaskAggregate):  # CQADupstack: the mean over twelve forums
        return _mean(name, [_evaluate(model, part, batch_size, metrics, show_progress_bar) for part in task.tasks])
    wanted = [f"{kind}_at_{k}" for kind, k in map(cutoff, metrics)] if category == "Retrieval" else ["main_score"]
    if isinstance(task, AbsTaskRetrieval) and category == "Retrieval":
        task.k_values = sorted({*task.k_values, *(k for _, k in map(cutoff, metrics))})
        task._top_k = max(task.k_values)
    was_loaded = task.data_loaded
    task.load_data()
    encode_kwargs: Any = {"batch_size": batch_size, "show_progress_bar": show_progress_bar}
    result = mteb.evaluate(
        model, task, cache=None, co2_tracker=False, encode_kwargs=encode_kwargs, show_progress_bar=show_progress_bar
    )
    sizes = [0, 0]
    if isinstance(task, AbsTaskRetrieval):
        # Afterwards: mteb converts tasks in its older data format during the evaluation.
        data: Any = task.dataset
        splits = [subset[split] for subset in data.values() for split in task.eval_splits if split in subset]
        sizes = [sum(len(split[part]) for split in splits) for part in ("queries", "corpus")]
    if not was_loaded:
        task.unload_data()
    scores = [subset for split in result.task_results[0].scores.values() for subset in split]
    *means, main = (float(sum(score[key] for score in scores) / len(scores)) for key in (*wanted, "main_score"))
    return TaskScores(
        name, dict(zip(wanted, means, strict=True)), sizes[0], sizes[1], category=category, main_score=main
    )


def means_of(scores: Sequence[TaskScores]) -> list[TaskScores]:
    """Return the means over several tasks: over all of them, and before it of each category if there are several."""
    names = list(dict.fromkeys(each.category for each in scores))
    groups = [(f"{name} ", [each for each in scores if each.category == name]) for name in names if len(names) > 1]
    groups = [*groups, ("", list(scores))] if len(scores) > 1 else []
    return [_mean(f"mean of {len(group)} {name}tasks", group) for name, group in groups]


def _mean(name: str, scores: Sequence[TaskScores]) -> TaskScores:
    """Return the mean of the metrics over tasks, of several categories that of the main score, and the sums of the sizes."""
    rows = [{**each.metrics, "main_score": each.main_score} for each in scores]
    shared = [metric for metric in rows[0] if all(metric in row for row in rows)]
    means = {metric: sum(row[metric] for row in rows) / len(rows) for metric in shared}
    metrics = {metric: means[metric] for metric in scores[0].metrics if metric in means} or means
    sizes = sum(each.queries for each in scores), sum(each.documents for each in scores)
    category = scores[0].category if len({each.category for each in scores}) == 1 else ""
    return TaskScores(name, metrics, *sizes, category=category, main_score=means["main_score"])
