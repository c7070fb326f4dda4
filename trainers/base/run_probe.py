"""Find or build a run's evaluation task: a BEIR folder, or a probe held out of the training data.

A run stores its own probe in a folder that it marks, with the same content on every node. The main process builds the probe, or
reads that of the resumed run, and sends it to the other processes: nodes may not share a disk. Each node's main process then
writes it if it is missing.
"""

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from revela_hub.data.own_folder import claim, names_in
from revela_hub.data.sources.beir import RetrievalTask, read_beir
from revela_hub.data.sources.documents import HELD_OUT, read_held_out
from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.paths import local_path
from revela_hub.trainers.base.arguments import ProbeArguments
from revela_hub.trainers.base.processes import from_main
from revela_hub.whole_files import whole_file

if TYPE_CHECKING:
    from datasets import Dataset

    from revela_hub.data.mixture.held_out import HeldOut
    from revela_hub.evaluation.probe import Probe

RUN_MARKER = ".of-a-run"
"""Marks the probe of a run, which the next run may replace; probes of `revela-hub probe` do not have this file."""
PROBE_FOLDERS = ("probe", "run_probe")
SETTINGS_FILE = "probe.json"
PROBE_FILES = ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv", HELD_OUT, SETTINGS_FILE)


class HeldOutText(NamedTuple):
    """The evaluation task of a run on raw text, if any, and the folder of the probe to exclude when the text is read, if any."""

    task: RetrievalTask | None = None
    folder: Path | None = None


def hold_out_text(arguments: ProbeArguments, *, resumed: bool = False, max_queries: int | None = None) -> HeldOutText:
    """Return the evaluation task of a run on raw text: `--eval_corpus`, an existing probe, or a new one.

    A new probe has at most `max_queries` queries. There is no task if evaluation is disabled or the text is too short for a
    probe. A resumed run reuses its probe.

    Raises:
        UserError: the folder is not a probe, does not list the text it holds out, or the data cannot be read.
    """
    from revela_hub.evaluation.probe_folder import read_probe_task

    if arguments.eval_corpus or arguments.probe == "none":
        return HeldOutText(_given_task(arguments))
    new = arguments.probe == "auto"
    folder = _run_probe(arguments, max_queries, resumed=resumed) if new else Path(arguments.probe)
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
    folder = from_main(lambda: write_beir(task, free_folder(Path(run.output_dir or "."))))
    run.log(f"held out for evaluation: {len(task.queries)} queries with {len(task.corpus)} passages, in {folder.name}/")
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


def _run_probe(arguments: Any, max_queries: int | None, *, resumed: bool) -> Path | None:
    """Return the folder of the run's probe, identical on every node; None if the text is too short for a probe."""
    from revela_hub.evaluation.probe_folder import write_probe

    output = Path(arguments.output_dir or ".")

    def build() -> dict[str, bytes] | None:
        if resumed and (found := _found(output)) is not None and (files := _read(found)) is not None:
            return files
        probe = _make_probe(arguments, max_queries)
        if probe is not None:
            return _read(write_probe(probe, free_folder(output), "--output_dir"))
        if any((output / name / RUN_MARKER).is_file() for name in PROBE_FOLDERS):
            free_folder(output)  # remove an earlier run's probe
        return None

    files = from_main(build)
    if files is None:
        return None
    with arguments.main_process_first(desc="writing the probe"):
        found = _found(output)
        if found is None or _read(found) != files:
            _write(free_folder(output), files)
            found = _found(output)
    return found


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


def free_folder(output: Path) -> Path:
    """Return an empty, marked folder for a run's probe, never one with the user's files."""
    for name in PROBE_FOLDERS:
        folder = output / name
        if (folder / RUN_MARKER).is_file() or not folder.exists() or (folder.is_dir() and not names_in(folder)):
            claim(folder, "--output_dir")
            (folder / RUN_MARKER).touch()
            for file in PROBE_FILES:
                (folder / file).unlink(missing_ok=True)
            return folder
    raise UserError(
        f"--output_dir {output} contains {' and '.join(PROBE_FOLDERS)}, which were not written by a training run, and there is no other"
        " place for the run's probe: choose another folder"
    )


def _found(output: Path) -> Path | None:
    """Return the probe that a run wrote, if any."""
    return next((output / name for name in PROBE_FOLDERS if (output / name / RUN_MARKER).is_file()), None)


def _read(folder: Path) -> dict[str, bytes] | None:
    """Return the files by name; None if the probe is incomplete."""
    files = {name: (folder / name).read_bytes() for name in PROBE_FILES if (folder / name).is_file()}
    return files if set(PROBE_FILES[:3]) <= set(files) else None


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / name, "--output_dir") as stream:
            stream.write(content)
