"""A multi-task mixture: several data sets combined, each with its instruction.

    YAML --tasks--> Task --rows--> rows --pairs--> (anchor, positive, negatives) --weights--> Dataset

`revela_hub.data.mixture.tasks` describes the YAML format, `revela_hub.data.mixture.pairs` how pairs are made. The rows of a
task are cached under a hash of the task, the seed, and the files' sizes and modification times. Every task contributes all its rows, or
a sample of `max_samples` of them.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from revela_hub.data.mixture.instructions import query_prompt
from revela_hub.data.mixture.pairs import (
    KnownPairs,
    Pair,
    PairMode,
    SameLabel,
    class_pairs,
    distinct_pairs,
    fill_negatives,
    sts_pairs,
)
from revela_hub.data.mixture.rows import (
    Corpus,
    excluded_texts,
    read_labelled,
    read_pairs,
    read_scored,
    with_beir_parts,
)
from revela_hub.data.mixture.tasks import Task, parse_mixture
from revela_hub.data.row_cache import cached_file, cached_rows, in_order, rows_fingerprint
from revela_hub.data.sources.report import counted, skips
from revela_hub.errors import UserError
from revela_hub.files import one_at_a_time, write_text

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass
class TaskReport:
    """The counts of one task; `str(report)` is one line."""

    name: str
    type: str
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Dropped rows and pairs, by reason."""
    negatives: Counter[str] = field(default_factory=Counter)
    """Negatives: `given` by the source, `drawn` at random, `wrong` (given, but a known positive; removed)."""

    def __post_init__(self) -> None:
        """Restore the counters from dictionaries, and drop zeros."""
        self.dropped, self.negatives = +Counter(self.dropped), +Counter(self.negatives)

    def __str__(self) -> str:
        """For example `scifact (retrieval): 919 rows; negatives: 919 drawn; dropped: 2 repeated`."""
        parts = [f"{self.name} ({self.type}): {counted(self.rows, 'row')}"]
        for name in ("negatives", "dropped"):
            if counts := getattr(self, name):
                parts.append(f"{name}: {skips(counts)}")
        return "; ".join(parts)


@dataclass
class Mixture:
    """A mixture, ready for training; `str(mixture)` is a report with a line for each task.

    Attributes:
        dataset: One row per training example, in random order: `task`, `anchor`, `positive`, `negative_1` to
            `negative_N`, `anchor_prompt`, `document_prompt` (for positive and negatives; `""`, or the instruction in
            symmetric tasks), `kind` (`"retrieval"` or `"other"`); all strings.
        reports: Counts of used and dropped rows, for each task.
        tasks: The tasks of the mixture.
        retrieval: The rows of the retrieval tasks of both stages, from which questions are held out; None if there is no such task.
    """

    dataset: "Dataset"
    reports: list[TaskReport]
    tasks: tuple[Task, ...]
    retrieval: "Dataset | None"

    def __str__(self) -> str:
        """The total, then the tasks."""
        head = f"{counted(len(self.dataset), 'row')} of {counted(len(self.tasks), 'task')}"
        return "\n".join([head, *(f"  {report}" for report in self.reports)])


def load_mixture(
    mixture: str | Path | Mapping[str, Any] | Sequence[Any],
    *,
    num_negatives: int = 1,
    seed: int = 0,
    stage: int | None = None,
    classes: PairMode = "example",
    without_tasks: Sequence[str] = (),
    root: str | Path | None = None,
    cache_dir: str | Path | None = None,
    num_proc: int = 1,
) -> Mixture:
    """Read the tasks of a mixture and make training examples of them.

    Args:
        mixture: A YAML file, or its content; see `revela_hub.data.mixture.tasks`.
        num_negatives: Negatives per row.
        seed: The seed of pairs, negatives, samples and order; the same seed gives the same rows. A task's rows do not
            depend on the other tasks.
        stage: 1 or 2 selects the tasks of that stage; None selects all.
        classes: How classification and clustering make pairs, if their tasks set no `mode`.
        without_tasks: Names or patterns (`synthetic*`) of tasks to leave out.
        root: The base folder of relative paths; overrides the file.
        cache_dir: The cache folder; default: the cache of `datasets`.
        num_proc: Number of processes, each of which makes the rows of one task at a time.

    Raises:
        UserError: The mixture is invalid, a source cannot be read, a column is missing, a task has no positives or no
            negatives, the stage has no tasks, or `without_tasks` names none.
    """
    import datasets

    parsed = parse_mixture(mixture, root)
    left_out = {pattern: {task.name for task in parsed if fnmatch(task.name, pattern)} for pattern in without_tasks}
    names = ", ".join(task.name for task in parsed)
    if unknown := [pattern for pattern, found in left_out.items() if not found]:
        raise UserError(f"no task is named {', '.join(unknown)}; the tasks are {names}")
    every = [
        with_beir_parts(replace(task, mode=task.mode or classes))
        for task in parsed
        if not any(task.name in found for found in left_out.values())
    ]
    tasks = tuple(task for task in every if stage is None or stage in task.in_stages)
    if not tasks:
        raise UserError(f"no task is for stage {stage} (the tasks are {names}); add stages: [{stage}] to one of them")
    needed = [task for task in every if task in tasks or task.is_retrieval]
    settings: dict[str, Any] = {"num_negatives": num_negatives, "seed": seed}
    made_with = settings | {"tasks": needed}
    name = f"mixture-tasks-{rows_fingerprint(made_with, [source for task in needed for source in task.sources])}"
    make = partial(_task_rows, cache_dir=cache_dir, **settings)
    with one_at_a_time(all_made := cached_file(name, cache_dir)):
        found = in_order(make, needed, 1 if all_made.is_file() else num_proc, ahead=len(needed))
        of_task = dict(zip((task.name for task in needed), found, strict=True))
        write_text(all_made, "{}")
    parts = [of_task[task.name] for task in tasks]
    retrieval = [of_task[task.name][0] for task in every if task.is_retrieval]
    dataset = datasets.concatenate_datasets([rows for rows, _ in parts])
    dataset = dataset.select(np.random.default_rng(seed).permutation(len(dataset)))
    all_retrieval = datasets.concatenate_datasets(retrieval) if retrieval else None
    return Mixture(dataset, [report for _, report in parts], tasks, all_retrieval)


# --- one task


def _task_rows(task: Task, num_negatives: int, seed: int, cache_dir: str | Path | None) -> "tuple[Dataset, TaskReport]":
    """Return the rows of a task, from the cache if possible."""
    report = TaskReport(task.name, task.type)
    negatives = [f"negative_{number}" for number in range(1, num_negatives + 1)]
    names = ["task", "anchor", "positive", *negatives, "anchor_prompt", "document_prompt", "kind"]
    # Of the stages, the rows have the kind.
    settings = asdict(replace(task, stages=None, mined_from=None)) | {"kind": task.is_retrieval}
    made_with = {"same_text": 1, "num_negatives": num_negatives, "seed": seed, **settings}
    rows, counts = cached_rows(
        f"mixture-{rows_fingerprint(made_with, task.sources)}",
        dict.fromkeys(names, "string"),
        lambda: _rows(task, num_negatives, seed, report, cache_dir),
        lambda: vars(report),
        cache_dir,
    )
    return rows, TaskReport(**counts)


def _rows(
    task: Task, num_negatives: int, seed: int, report: TaskReport, cache_dir: str | Path | None
) -> Iterator[dict[str, str]]:
    """Make the pairs of a task: checked, sampled, and with negatives."""
    seed = task_seed(task, seed)
    pairs, pool, known = task_pairs(task, seed, report.dropped, cache_dir)
    counts = {"dropped": report.dropped, "counts": report.negatives}
    filled = fill_negatives(pairs, pool, known, num_negatives=num_negatives, seed=seed, **counts)
    for pair in islice(filled, task.max_samples):
        report.rows += 1
        yield _row(task, pair)
    if not report.rows:
        reasons = skips(report.dropped) or "no rows"
        raise UserError(f"task {task.name}: no positives for training in {task.source.path} ({reasons})")
    sys.stderr.write(f"task {task.name}: {counted(report.rows, 'row')}\n")


def task_seed(task: Task, seed: int) -> int:
    """Return the seed of a task, which does not depend on the other tasks."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{task.name}".encode()).digest()[:8], "big")


def task_pairs(
    task: Task, seed: int, dropped: Counter[str], cache_dir: str | Path | None = None
) -> tuple[list[Pair], Sequence[str], KnownPairs | SameLabel]:
    """Return a task's pairs in random order, the texts that negatives are drawn from, and the pairs whose passages are no negatives."""
    excluded = excluded_texts(task)

    def allowed(*texts: str) -> bool:
        found = excluded is not None and any(map(excluded.find, texts))
        if found:
            dropped["in an evaluation set"] += 1
        return not found

    if task.has_passages:
        corpus, queries = (Corpus(source, cache_dir) if source else None for source in (task.corpus, task.queries))
        pairs = [pair for pair in read_pairs(task, corpus, queries, seed, dropped) if allowed(pair.anchor)]
        pool: Sequence[str] = [pair.positive for pair in pairs] if corpus is None else corpus
        known: KnownPairs | SameLabel = KnownPairs((pair.anchor, pair.positive) for pair in pairs)
    elif task.type == "sts":
        rows = [row for row in read_scored(task, seed, dropped) if allowed(*row[:2])]
        pairs = list(sts_pairs(rows, threshold=task.threshold, dropped=dropped))
        pool = [text for first, second, _ in rows for text in (first, second)]
        # Known whatever the score: what was judged and found half similar is no negative to draw at random.
        known = KnownPairs(pair for first, second, _ in rows for pair in ((first, second), (second, first)))
    else:
        examples = [pair for pair in read_labelled(task, seed, dropped) if allowed(pair.anchor)]
        pairs = list(distinct_pairs(examples, dropped=dropped))
        labelled = [(example.anchor, example.positive) for example in pairs]
        if task.mode == "label":
            pool, known = list(dict.fromkeys(label for _, label in labelled)), KnownPairs(labelled)
        else:
            pool, known = [text for text, _ in labelled], SameLabel(labelled)
            pairs = list(class_pairs(labelled, seed=seed, dropped=dropped))
    order = np.random.default_rng([seed, 1]).permutation(len(pairs))
    return list(distinct_pairs((pairs[index] for index in order), dropped=dropped)), pool, known


def _row(task: Task, pair: Pair) -> dict[str, str]:
    prompt = query_prompt(pair.instruction or task.instruction)
    return {
        "task": task.name,
        "anchor": pair.anchor,
        "positive": pair.positive,
        **{f"negative_{number}": text for number, text in enumerate(pair.negatives, start=1)},
        "anchor_prompt": prompt,
        "document_prompt": prompt if task.is_symmetric else "",
        "kind": "retrieval" if task.is_retrieval else "other",
    }
