"""Find or build a run's evaluation task: a BEIR folder, or a probe held out of the training data.

The first process that needs the run's probe writes it to `probe/` in the output folder; the others, and a resumed run, read it.
"""

import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from revela_hub.data.sources.beir import RetrievalTask, read_beir
from revela_hub.data.sources.documents import HELD_OUT, read_held_out
from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.files import atomic, claim, local_path, names_in, one_at_a_time
from revela_hub.trainers.base.distributed import from_main

if TYPE_CHECKING:
    from datasets import Dataset

    from revela_hub.data.mixture.held_out import HeldOut

RUN_MARKER = ".of-a-run"
"""Marks the complete probe of a run, which the next run may replace; probes of `revela-hub probe` do not have this file."""
PROBE_FOLDER = "probe"


class HeldOutText(NamedTuple):
    """The evaluation task of a run on raw text, if any, and the folder of the probe to exclude when the text is read, if any."""

    task: RetrievalTask | None = None
    folder: Path | None = None


def hold_out_text(arguments: Any, *, max_queries: int | None = None) -> HeldOutText:
    """Return the evaluation task of a run on raw text: `--eval_corpus`, an existing probe, or a new one.

    `arguments` are `ProbeArguments` of a run. A new probe has at most `max_queries` queries. There is no task if evaluation is
    disabled or the text is too short for a probe. A resumed run reuses its probe.
    """
    from revela_hub.evaluation.probe import read_probe_task

    if arguments.eval_corpus or arguments.probe == "none":
        return HeldOutText(_given_task(arguments))
    folder = _run_probe(arguments, max_queries) if arguments.probe == "auto" else Path(arguments.probe)
    if folder is None:
        return HeldOutText()
    if not (folder / HELD_OUT).is_file():
        raise UserError(
            f"--probe {folder} has no {HELD_OUT}, so the run would train on its queries: use a folder written by revela-hub probe,"
            f" or evaluate on it with --eval_corpus {folder}"
        )
    return HeldOutText(read_probe_task(folder), folder)


def hold_out_rows(arguments: Any, rows: "Dataset", among: "Dataset | None" = None) -> "HeldOut":
    """Split labelled rows into training rows and an evaluation task, whose questions are chosen among other rows, if given."""
    from revela_hub.data.mixture.held_out import hold_out
    from revela_hub.data.sources.beir import write_beir

    if arguments.eval_corpus or arguments.probe != "auto":
        return _without_evaluated(arguments, rows)
    found = hold_out(rows, arguments.probe_queries, arguments.probe_passages, among)
    if (task := found.task) is None:
        arguments.log(
            "no evaluation: the data has fewer than 200 queries or 20 passages (set --eval_corpus or --probe)"
        )
        return found
    from_main(lambda: _write(Path(arguments.output_dir) / PROBE_FOLDER, lambda part: write_beir(task, part)))
    arguments.log(
        f"held out for evaluation: {len(task.queries)} queries with {len(task.corpus)} passages, in {PROBE_FOLDER}/"
    )
    return found


def _without_evaluated(arguments: Any, rows: "Dataset") -> "HeldOut":
    """Return the task that the options name, and the rows without its queries and the text that a probe holds out."""
    from revela_hub.data.mixture.held_out import HeldOut, without_queries, without_texts
    from revela_hub.data.sources.beir import read_queries
    from revela_hub.evaluation.probe import read_probe_task

    held_out: list[str] = []
    if arguments.eval_corpus or arguments.probe == "none":
        task = _given_task(arguments)
        asked = task.queries if task else {}
    else:  # the probe also has queries without judgements
        probe = local_path(arguments.probe)
        task, asked = read_probe_task(probe), read_queries(probe)
        if (probe / HELD_OUT).is_file():
            held_out = [*chain.from_iterable(read_held_out(probe).values())]
    left = without_queries(rows, asked.values())
    if len(left) < len(rows):
        arguments.log(
            f"{len(rows) - len(left):,} of {len(rows):,} training rows ask queries of the evaluation: skipped"
        )
    if held_out:
        left, removed = without_texts(left, held_out)
        if removed:
            arguments.log(f"{counted(removed, 'text')} of the probe held out of the training rows")
    if len(left) < min(2, len(rows)):
        raise UserError(f"the evaluation asks or holds out all but {len(left)} of the {len(rows)} training rows")
    return HeldOut(left, task)


def _given_task(arguments: Any) -> RetrievalTask | None:
    """Return the task of `--eval_corpus`, if given."""
    if arguments.eval_corpus:
        return read_beir(arguments.eval_corpus, arguments.eval_split)
    if arguments.eval_strategy != "no":
        raise UserError("--eval_strategy needs a task to evaluate: set --eval_corpus BEIR_FOLDER")
    return None


def _run_probe(arguments: Any, max_queries: int | None) -> Path | None:
    """Return the folder of the run's probe, which one process writes; None if the text is too short for a probe."""
    from revela_hub.evaluation.probe import NoProbe, ProbeSettings, build_probe, write_probe

    folder = Path(arguments.output_dir) / PROBE_FOLDER
    with one_at_a_time(folder):  # no process waits in a collective
        if (folder / RUN_MARKER).is_file():
            return folder
        queries = min(arguments.probe_queries, max_queries or arguments.probe_queries)
        try:
            probe = build_probe(arguments.sources(), ProbeSettings(queries, arguments.probe_passages, seed=0))
        except NoProbe as error:
            arguments.log(f"no evaluation: {error}")
            return None
        arguments.log(probe)
        _write(folder, lambda part: write_probe(probe, part))
    return folder


def remove_run_probe(output: Path) -> None:
    """Delete the probe that an earlier run wrote."""
    if (output / PROBE_FOLDER / RUN_MARKER).is_file():
        shutil.rmtree(output / PROBE_FOLDER)


def _write(folder: Path, write: Callable[[Path], object]) -> None:
    """Write a run's probe as a whole, in place of an earlier run's; raise a `UserError` if the folder has the user's files."""
    if folder.exists() and names_in(folder) and not (folder / RUN_MARKER).is_file():
        raise UserError(f"{folder} was not written by a training run: choose another --output_dir")
    with atomic(folder) as part:
        write(claim(part))
        (part / RUN_MARKER).touch()
