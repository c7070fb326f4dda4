"""What a run is measured on: a BEIR folder, or a probe that is held out of what it is trained on.

The run's own probe lies in a folder that the run marked as its own, and is the same on every node. The main process makes it, or
finds that of the run that is resumed. Nodes may have no disk in common, so it goes through memory, and each node's first process
writes it where it is not.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela_hub.data.own_folder import claim, names_in
from revela_hub.data.sources.beir import RetrievalTask, read_beir
from revela_hub.data.sources.documents import HELD_OUT
from revela_hub.errors import UserError
from revela_hub.trainers.common.arguments import HeldOutArguments, ProbeArguments
from revela_hub.trainers.common.processes import from_main

if TYPE_CHECKING:
    from datasets import Dataset

    from revela_hub.data.mixture.held_out import HeldOut
    from revela_hub.evaluation.probe import Probe

OF_A_RUN = ".of-a-run"
"""Marks the probe of a run, which the next run into the same folder replaces; one of `revela-hub probe` has it not."""
NAMES = ("probe", "run_probe")
SETTINGS = "probe.json"
FILES = ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv", HELD_OUT, SETTINGS)


def hold_out_text(arguments: ProbeArguments, *, resumed: bool = False) -> RetrievalTask | None:
    """What to measure a run on raw text on: `--eval_corpus`, the probe of a folder or of an earlier run, or one made now.

    To be called before the text is read: `arguments.held_out` is set to the probe's folder, and its queries are left out.

    Args:
        arguments: of the run, its data among them.
        resumed: whether the run goes on, and so does its probe.

    Returns:
        The task; None if nothing is to be measured, or the text offers too little.

    Raises:
        UserError: the folder is none of those, or does not say what it holds out, or the data cannot be read.
    """
    from revela_hub.evaluation.probe import read_probe_task

    if arguments.eval_corpus or arguments.probe == "none":
        return _given_task(arguments)
    folder = _run_probe(arguments, resumed=resumed) if arguments.probe == "auto" else Path(arguments.probe)
    if folder is None:
        arguments.measure_nothing()
        return None
    task = read_probe_task(folder)
    if not (folder / HELD_OUT).is_file():
        raise UserError(
            f"--probe {folder} has no {HELD_OUT}, so its queries would be trained on: give a folder of revela-hub probe, or"
            f" measure on it as it is with --eval_corpus {folder}"
        )
    of: Any = arguments
    of.held_out = str(folder)
    return task


def hold_out_rows(arguments: HeldOutArguments, rows: "Dataset") -> "HeldOut":
    """The rows of a mixture to train on, and what to measure on.

    Raises:
        UserError: the folder that is named is no probe.
    """
    from revela_hub.data.mixture.held_out import HeldOut, hold_out, without_queries
    from revela_hub.data.sources.beir import write_beir
    from revela_hub.evaluation.probe import read_probe_task

    if arguments.eval_corpus or arguments.probe != "auto":
        is_folder = not arguments.eval_corpus and arguments.probe != "none"
        given = read_probe_task(arguments.probe) if is_folder else _given_task(arguments)
        return HeldOut(without_queries(rows, given.queries.values()) if given else rows, given)
    run: Any = arguments
    found = hold_out(rows, arguments.probe_queries, arguments.probe_passages)
    if (task := found.task) is None:
        arguments.measure_nothing()
        run.say("nothing is measured: the mixture has fewer than 200 questions (give --eval_corpus or --probe)")
        return found
    folder = from_main(lambda: write_beir(task, free_folder(Path(run.output_dir or "."))))
    run.say(
        f"held out: {len(task.queries)} questions of the mixture with {len(task.corpus)} passages, in {folder.name}/"
    )
    return found


def _given_task(arguments: ProbeArguments) -> RetrievalTask | None:
    """The task of `--eval_corpus`, if it is given."""
    if arguments.eval_corpus:
        return read_beir(arguments.eval_corpus, arguments.eval_split)
    if arguments.eval_strategy != "no":
        raise UserError("--eval_strategy needs something to measure: give --eval_corpus BEIR_FOLDER")
    return None


def _run_probe(arguments: Any, *, resumed: bool) -> Path | None:
    """The folder of the run's probe, which holds the same on every node; None where the text offers too little for one."""
    from revela_hub.evaluation.probe import write_probe

    output = Path(arguments.output_dir or ".")

    def made() -> dict[str, bytes] | None:
        if resumed and (found := _found(output)) is not None and (files := _read(found)) is not None:
            return files
        probe = _make_probe(arguments)
        if probe is not None:
            return _read(write_probe(probe, free_folder(output), "--output_dir"))
        if any((output / name / OF_A_RUN).is_file() for name in NAMES):
            free_folder(output)  # what an earlier run measured on is not this one's
        return None

    files = from_main(made)
    if files is None:
        return None
    with arguments.main_process_first(desc="writing the probe"):
        found = _found(output)
        if found is None or _read(found) != files:
            _write(free_folder(output), files)
            found = _found(output)
    return found


def _make_probe(arguments: Any) -> "Probe | None":
    from revela_hub.evaluation.probe import NoProbe, ProbeSettings, build_probe

    settings = ProbeSettings(arguments.probe_queries, arguments.probe_passages, seed=0)
    try:
        probe = build_probe(arguments.sources(), settings)
    except NoProbe as error:
        arguments.say(f"nothing is measured: {error}")
        return None
    arguments.say(probe)
    return probe


def free_folder(output: Path) -> Path:
    """Return the folder for a run's probe, marked and empty: never one that a run did not mark.

    Raises:
        UserError: There is none.
    """
    for name in NAMES:
        folder = output / name
        if (folder / OF_A_RUN).is_file() or not folder.exists() or (folder.is_dir() and not names_in(folder)):
            claim(folder, "--output_dir")
            (folder / OF_A_RUN).touch()
            for file in FILES:
                (folder / file).unlink(missing_ok=True)
            return folder
    raise UserError(
        f"--output_dir {output} holds {' and '.join(NAMES)}, which no run wrote: there is no place for the run's own probe;"
        " give another folder"
    )


def _found(output: Path) -> Path | None:
    """The probe that a run wrote; runs of earlier versions did not mark theirs."""
    marked = [output / name for name in NAMES if (output / name / OF_A_RUN).is_file()]
    return next(iter([*marked, *(output / name for name in NAMES[:1] if (output / name / SETTINGS).is_file())]), None)


def _read(folder: Path) -> dict[str, bytes] | None:
    """The files by name; None where it is not whole."""
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    return files if set(FILES[:3]) <= set(files) else None


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        beside = folder / f"{name}.part"
        beside.write_bytes(content)
        os.replace(beside, folder / name)
