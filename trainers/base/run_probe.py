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
from revela_hub.files import claim, local_path, names_in
from revela_hub.trainers.base.arguments import ProbeArguments
from revela_hub.trainers.base.distributed import from_main

if TYPE_CHECKING:
    from datasets import Dataset

    from revela_hub.data.mixture.held_out import HeldOut
    from revela_hub.evaluation.probe import Probe

RUN_MARKER = ".of-a-run"
"""Marks the complete probe of a run, which the next run may replace; probes of `revela-hub probe` do not have this file."""
PROBE_FOLDER = "probe"


class HeldOutText(NamedTuple):
    """The evaluation task of a run on raw text, if any, and the folder of the probe to exclude when the text is read, if any."""

    task: RetrievalTask | None = None
    folder: Path | None = None


def hold_out_text(arguments: ProbeArguments, *, max_queries: int | None = None) -> HeldOutText:
    """Return the evaluation task of a run on raw text: `--eval_corpus`, an existing probe, or a new one.

    A new probe has at most `max_queries` queries. There is no task if evaluation is disabled or the text is too short for a
    probe. A resumed run reuses its probe.
    """
    from revela_hub.evaluation.probe_folder import read_probe_task

    if arguments.eval_corpus or arguments.probe == "none":
        return HeldOutText(_given_task(arguments))
    new = arguments.probe == "auto"
    folder = _run_probe(arguments, max_queries) if new else Path(arguments.probe)
    if folder is None:
        return HeldOutText()
    task = read_probe_task(folder)
    if not (folder / HELD_OUT).is_file():
        raise UserError(
            f"--probe {folder} has no {HELD_OUT}, so the run would train on its queries: use a folder written by revela-hub probe,"
            f" or evaluate on it with --eval_corpus {folder}"
        )
    return HeldOutText(task, folder)


def hold_out_rows(arguments: ProbeArguments, rows: "Dataset", among: "Dataset | None" = None) -> "HeldOut":
    """Split labelled rows into training rows and an evaluation task, whose questions are chosen among other rows, if given."""
    from revela_hub.data.mixture.held_out import HeldOut, hold_out, without_queries
    from revela_hub.data.sources.beir import write_beir
    from revela_hub.data.sources.queries import read_queries
    from revela_hub.evaluation.probe_folder import read_probe_task

    run: Any = arguments
    if arguments.eval_corpus or arguments.probe != "auto":
        is_folder = not arguments.eval_corpus and arguments.probe != "none"
        given = read_probe_task(arguments.probe) if is_folder else _given_task(arguments)
        asked = read_queries(arguments.probe) if is_folder else given.queries if given else {}
        left = without_queries(rows, asked.values())
        name = "--eval_corpus" if arguments.eval_corpus else "--probe"
        if len(left) < min(2, len(rows)):
            raise UserError(
                f"{name} asks {len(rows) - len(left)} of the {len(rows)} training queries: too few are left to train on"
            )
        if len(left) < len(rows):
            run.log(f"{len(rows) - len(left):,} of {len(rows):,} training rows are left out: {name} asks their queries")
        return HeldOut(_without_held_out(left, arguments) if is_folder else left, given)
    found = hold_out(rows, arguments.probe_queries, arguments.probe_passages, among)
    if (task := found.task) is None:
        run.log("no evaluation: the data has fewer than 200 queries or 20 passages (set --eval_corpus or --probe)")
        return found
    folder = Path(run.output_dir or ".") / PROBE_FOLDER
    from_main(lambda: _write(folder, lambda part: write_beir(task, part)))
    run.log(
        f"held out for evaluation: {len(task.queries)} queries with {len(task.corpus)} passages, in {PROBE_FOLDER}/"
    )
    return found


def _without_held_out(rows: "Dataset", arguments: ProbeArguments) -> "Dataset":
    """Return the rows without the text that an existing probe holds out, as it is removed from raw text."""
    from revela_hub.data.mixture.held_out import without_texts

    run: Any = arguments
    probe = local_path(arguments.probe)
    if not (probe / HELD_OUT).is_file():
        return rows
    left, removed = without_texts(rows, chain.from_iterable(read_held_out(probe).values()))
    if len(left) < min(2, len(rows)):
        raise UserError(
            f"--probe holds out the passages of all but {counted(len(left), 'training row')}: too few to train on"
        )
    if removed:
        run.log(f"{counted(removed, 'text')} of the probe held out of the training rows")
    return left


def _given_task(arguments: ProbeArguments) -> RetrievalTask | None:
    """Return the task of `--eval_corpus`, if given."""
    if arguments.eval_corpus:
        return read_beir(arguments.eval_corpus, arguments.eval_split)
    if arguments.eval_strategy != "no":
        raise UserError("--eval_strategy needs a task to evaluate: set --eval_corpus BEIR_FOLDER")
    return None


def _run_probe(arguments: Any, max_queries: int | None) -> Path | None:
    """Return the folder of the run's probe, which one process writes; None if the text is too short for a probe."""
    from revela_hub.evaluation.probe_folder import write_probe

    folder = Path(arguments.output_dir or ".") / PROBE_FOLDER
    with arguments.preparing("making the probe"):
        if (folder / RUN_MARKER).is_file():
            return folder
        probe = _make_probe(arguments, max_queries)
        if probe is None:
            return None
        _write(folder, lambda part: write_probe(probe, part))
    return folder


def _make_probe(arguments: Any, max_queries: int | None) -> "Probe | None":
    from revela_hub.evaluation.probe import NoProbe, ProbeSettings, build_probe

    queries = min(arguments.probe_queries, max_queries or arguments.probe_queries)
    settings = ProbeSettings(queries, arguments.probe_passages, seed=0)
    try:
        probe = build_probe(arguments.sources(), settings)
    except NoProbe as error:
        arguments.log(f"no evaluation: {error}")
        return None
    arguments.log(probe)
    return probe


def remove_run_probe(output: Path) -> None:
    """Delete the probe that an earlier run wrote."""
    if (output / PROBE_FOLDER / RUN_MARKER).is_file():
        shutil.rmtree(output / PROBE_FOLDER)


def _write(folder: Path, write: Callable[[Path], object]) -> None:
    """Write a run's probe as a whole, in place of an earlier run's; raise a `UserError` if the folder has the user's files."""
    if folder.exists() and names_in(folder) and not (folder / RUN_MARKER).is_file():
        raise UserError(f"{folder} was not written by a training run: choose another --output_dir")
    part = folder.parent / ".probe"
    for path in (part, folder):
        shutil.rmtree(path, ignore_errors=True)
    write(claim(part))
    (part / RUN_MARKER).touch()
    part.rename(folder)
