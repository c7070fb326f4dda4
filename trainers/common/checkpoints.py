"""Checkpoints that are complete or not there, and which of them a run goes on from.

A checkpoint is written into the folder `.incomplete` of the run's output folder, flushed to the disk, and moved to its name
at last. With it goes `run.json`: when it was written, the size of every file, and the settings of the run. So one that was
damaged later is noticed, too, and so is a run that is resumed with other settings.
"""

import json
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from revela_hub.errors import UserError, first_line

RECORD = "run.json"
INCOMPLETE = ".incomplete"


@dataclass
class Record:
    """What `run.json` holds.

    Attributes:
        settings: of the run, those that affect its result.
        changes: a list of what was changed when the run was resumed: `{"step": 20, "learning_rate": [before, after]}`.
        written: when, in seconds since 1970.
        files: the size of every file of the checkpoint, in bytes.
        finished: whether this is the record of a run that has ended, and not of a checkpoint.
        places: how the settings have folders and files of this machine: `content`, by their name and a digest, or `name`, as
            records had them before.
    """

    settings: dict[str, Any]
    changes: list[dict[str, Any]] = field(default_factory=list)
    written: float = 0.0
    files: dict[str, int] = field(default_factory=dict)
    finished: bool = False
    places: str = "name"

    @classmethod
    def read(cls, folder: Path) -> "Record | None":
        """That of a folder; None where there is none that can be read."""
        try:
            return cls(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        """Writes `run.json`, with the sizes of the files that are there."""
        files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != RECORD)
        if not self.finished:
            self.files = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
        self.written = time.time()
        self.places = "content"
        beside = folder / f"{RECORD}.part"
        beside.write_text(json.dumps(self.__dict__, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, folder / RECORD)


def publish_checkpoint(beside: Path, folder: Path) -> None:
    """Moves a checkpoint that has been written to its name; what has that name already is deleted."""
    for path in [*sorted(beside.rglob("*")), beside]:
        _flush(path)
    remove_checkpoint(folder)
    os.replace(beside, folder)
    _flush(folder.parent)


def remove_checkpoint(folder: Path) -> None:
    """Deletes a checkpoint, which is not half there at any time."""
    if folder.exists():
        away = folder.parent / INCOMPLETE / f"deleted-{folder.name}"
        shutil.rmtree(away, ignore_errors=True)
        away.parent.mkdir(exist_ok=True)
        os.replace(folder, away)
        shutil.rmtree(away, ignore_errors=True)


def _flush(path: Path) -> None:
    """Has the file, or the names in the folder, on the disk before this returns.

    Windows can do so for files alone, and wants them opened for writing.
    """
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints_in(output: Path) -> list[Path]:
    """The checkpoints of an output folder, complete or not, the newest first."""
    found = [path for path in sorted(output.glob("checkpoint-*")) if path.is_dir() and step_of(path) >= 0]
    records = {path: Record.read(path) for path in found}
    return sorted(
        found, key=lambda p: (r.written if (r := records[p]) else p.stat().st_mtime, step_of(p)), reverse=True
    )


def rotate(output: Path, limit: int, best: str | None) -> None:
    """Deletes the checkpoints beyond a limit (0 is none), never the newest nor the best."""
    if limit > 0:
        newest, *older = checkpoints_in(output)
        old = [checkpoint for checkpoint in older if best is None or checkpoint != Path(best)]
        kept = limit - 1 - (best is not None and Path(best) != newest)
        for checkpoint in old[max(0, kept) :]:
            remove_checkpoint(checkpoint)


def step_of(checkpoint: Path) -> int:
    """The number of updates in a checkpoint's name; -1 where it is none."""
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if checkpoint.name.startswith("checkpoint-") and number.isdecimal() else -1


def whats_missing(checkpoint: Path) -> str | None:
    """Why a run cannot go on from a folder; None if it can."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        int(state["global_step"])
    except FileNotFoundError:
        return f"it has no {TRAINER_STATE_NAME}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {TRAINER_STATE_NAME} cannot be read ({first_line(error)})"
    record = Record.read(checkpoint)
    if record is None:
        return f"it has no {RECORD}, which is written last"
    for name, size in record.files.items():
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
        if (found := (checkpoint / name).stat().st_size) != size:
            return f"{name} has {found} bytes of {size}"
    if not any(name.startswith("rng_state") for name in record.files):
        return "it holds the model alone (--save_only_model), from which no run can go on"
    return None


def last_complete(output: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of an output folder, and what was passed over on the way, with the reasons."""
    passed: list[str] = []
    for checkpoint in checkpoints_in(output):
        missing = whats_missing(checkpoint)
        if missing is None:
            return checkpoint, passed
        passed.append(f"{checkpoint.name}: {missing}")
    return None, passed


def checkpoint_to_resume(wanted: str | None, output: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from: the one given, or the newest complete one for `last`; and what was passed over.

    Raises:
        UserError: the one given is not complete.
    """
    if not wanted:
        return None, []
    if wanted in ("last", "true", "True"):
        return last_complete(output)
    if missing := whats_missing(Path(wanted)):
        raise UserError(f"--resume_from_checkpoint: {wanted} is not a complete checkpoint: {missing}")
    return Path(wanted), []
