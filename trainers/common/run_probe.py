"""The probe of a run: in a folder that the run marked as its own, and the same on every node.

The main process makes it, or finds that of the run that is resumed. Nodes may have no disk in common, so it goes through memory,
and each node's first process writes it where it is not.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from revela_hub.data.own_folder import claim, names_in
from revela_hub.data.sources.held_out import HELD_OUT
from revela_hub.errors import UserError
from revela_hub.trainers.common.processes import from_main

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from revela_hub.evaluation.probe import Probe

OF_A_RUN = ".of-a-run"
"""Marks the probe of a run, which the next run into the same folder replaces; one of `revela-hub probe` has it not."""
NAMES = ("probe", "run_probe")
SETTINGS = "probe.json"
FILES = ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv", HELD_OUT, SETTINGS)


def run_probe(arguments: "TrainingArguments", make: "Callable[[], Probe | None]", *, resumed: bool) -> Path | None:
    """Return the folder of the run's probe, which holds the same on every node; None where the text offers too little for one.

    Args:
        arguments: of the run.
        make: makes it, on the main process alone.
        resumed: whether the run goes on, and so does its probe.
    """
    from revela_hub.evaluation.probe import write_probe

    output = Path(arguments.output_dir or ".")

    def made() -> dict[str, bytes] | None:
        if resumed and (found := _found(output)) is not None and (files := _read(found)) is not None:
            return files
        probe = make()
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
