"""Write checkpoints atomically, and find the one to resume from.

A checkpoint is written to the folder `.incomplete` in the output folder, flushed to disk, and then renamed. Its `run.json`
records the time, the size of every file and the settings of the run. This detects checkpoints that were damaged later, and
runs that resume with different settings.
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
from revela_hub.whole_files import write_text

RECORD = "run.json"
INCOMPLETE = ".incomplete"
MEASUREMENTS_FOLDER = "measured"
"""Folder in the output folder with the scores and the weights of the base model and the best checkpoint."""


@dataclass
class Record:
    """Content of `run.json`.

    Attributes:
        settings: settings of the run that affect its result.
        changes: settings that changed when the run resumed: `{"step": 20, "learning_rate": [before, after]}`.
        written: time of writing, in seconds since 1970.
        files: size of every file of the checkpoint, in bytes.
        finished: whether this is the record of a finished run instead of a checkpoint.
    """

    settings: dict[str, Any]
    changes: list[dict[str, Any]] = field(default_factory=list)
    written: float = 0.0
    files: dict[str, int] = field(default_factory=dict)
    finished: bool = False

    @classmethod
    def read(cls, folder: Path) -> "Record | None":
        """Read the record of a folder; None if it is missing or unreadable."""
        try:
            return cls(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, folder: Path, written: float | None = None) -> None:
        """Write `run.json`, with the sizes of the files and the time of writing, by which nodes recognise the same checkpoint."""
        files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != RECORD)
        if not self.finished:
            self.files = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
        self.written = time.time() if written is None else written
        write_text(folder / RECORD, json.dumps(self.__dict__, indent=1) + "\n", "--output_dir")


def publish_checkpoint(written: Path, folder: Path) -> None:
    """Flush a complete checkpoint to disk and move it to its final name, replacing an existing one."""
    for path in [*sorted(written.rglob("*")), written]:
        _flush(path)
    remove_checkpoint(folder)
    os.replace(written, folder)
    _flush(folder.parent)


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that it is never incomplete under its own name."""
    if folder.exists():
        trash = folder.parent / INCOMPLETE / f"deleted-{folder.name}"
        shutil.rmtree(trash, ignore_errors=True)
        trash.parent.mkdir(exist_ok=True)
        os.replace(folder, trash)
        shutil.rmtree(trash, ignore_errors=True)


def _flush(path: Path) -> None:
    """Flush a file, or a folder's directory entry, to disk.

    Windows can only flush files, and only those opened for writing.
    """
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints_in(output: Path) -> list[Path]:
    """Return the checkpoints of an output folder, newest first, including incomplete ones."""
    found = [path for path in sorted(output.glob("checkpoint-*")) if path.is_dir() and step_of(path) >= 0]
    records = {path: Record.read(path) for path in found}
    return sorted(
        found, key=lambda p: (r.written if (r := records[p]) else p.stat().st_mtime, step_of(p)), reverse=True
    )


def rotate(output: Path, limit: int, best: str | None) -> None:
    """Delete the oldest checkpoints beyond the limit (0: no limit), but never the newest or the best one."""
    if limit > 0:
        newest, *older = checkpoints_in(output)
        old = [checkpoint for checkpoint in older if best is None or checkpoint != Path(best)]
        kept = limit - 1 - (best is not None and Path(best) != newest)
        for checkpoint in old[max(0, kept) :]:
            remove_checkpoint(checkpoint)


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name, or -1 if it is not a checkpoint's name."""
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if checkpoint.name.startswith("checkpoint-") and number.isdecimal() else -1


def missing_part(checkpoint: Path) -> str | None:
    """Return why a run cannot resume from a folder, or None if it can."""
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
        return "it contains only the model (--save_only_model), which is not enough to resume from"
    return None


def last_complete(output: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint of an output folder, and the newer ones that were skipped, with reasons."""
    skipped: list[str] = []
    for checkpoint in checkpoints_in(output):
        missing = missing_part(checkpoint)
        if missing is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint.name}: {missing}")
    return None, skipped


def checkpoint_to_resume(wanted: str | None, output: Path) -> tuple[Path | None, list[str]]:
    """Return the given checkpoint, which must be complete, or, for `last`, the newest complete one and those it skipped."""
    if not wanted:
        return None, []
    if wanted in ("last", "true", "True"):
        return last_complete(output)
    if missing := missing_part(Path(wanted)):
        raise UserError(f"--resume_from_checkpoint: {wanted} is not a complete checkpoint: {missing}")
    return Path(wanted), []
