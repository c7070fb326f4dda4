"""The folder that synthetic data are written to, line by line as they come, so that a run can stop at any moment.

    pairs.jsonl      the examples: what training reads
    tasks.jsonl      the tasks of the first step
    rejected.jsonl   what was asked for and could not be used, with the reason and the beginning of the reply
    settings.json    the settings that the data depend on

Each line says which draw it came from. What is done is what is in these files: a restart draws the same again only for
requests whose replies had not come.
"""

import json
import os
import reprlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from revela_hub.data.synthesis.prompts import FORMS, Form
from revela_hub.errors import UserError

PAIRS, TASKS, REJECTED, SETTINGS = "pairs.jsonl", "tasks.jsonl", "rejected.jsonl", "settings.json"
TASK_PREFIX = "synthetic/"  # of the column `task`: synthetic/short-long

# Settings of which no value is shown, only a hash kept.
_HASHED = {
    "exclude": "other --exclude texts",
    "extra_body": "another --extra_body",
    "prompts": "other prompts (of another version of revela-hub)",
    "weights": "other weights of --model (or a server's, or not a server's)",
}
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlist = 100, 5


class Pair(BaseModel):
    """A line of `pairs.jsonl`."""

    task: Literal["synthetic/short-long", "synthetic/long-short", "synthetic/short-short"]
    instruction: str
    anchor: str
    positive: str
    negative_1: str
    kind: str
    language: str
    model: str
    draw: int

    @property
    def form(self) -> Form:
        """The form of the example."""
        return self.task.removeprefix(TASK_PREFIX)  # type: ignore[return-value]  # the type of `task` allows no other


class Task(BaseModel):
    """A line of `tasks.jsonl`."""

    form: Form
    task: str
    draw: int


class Rejection(BaseModel):
    """A line of `rejected.jsonl`."""

    step: Literal["tasks", "examples"]
    form: Form
    draw: int
    attempt: int
    reason: str
    reply: str


_LINES: dict[str, type[Pair] | type[Task] | type[Rejection]] = {PAIRS: Pair, TASKS: Task, REJECTED: Rejection}


class SyntheticFolder:
    """The folder, open for one run: what is in it, and what is added.

    Args:
        path: Made if it is not there.
        settings: Those that the data depend on; must be the ones that the folder was begun with.
        overwrite: Whether to remove what earlier runs wrote there, whatever their settings.

    Attributes:
        pairs: The lines of `pairs.jsonl`, of this run and earlier ones, by form.
        tasks: The tasks of each form, in order.
        attempts: How many replies to a draw of the second step were rejected, by form and draw.
        lists: Draws of the first step that have been answered, by form.

    Raises:
        UserError: The folder cannot be written, belongs to a run with other settings or to something else, is in use, or a
            line of it is damaged (but for the last line of a file, which a crash may have cut off: that is removed).
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], overwrite: bool = False) -> None:
        self.path = Path(path).expanduser()
        self.pairs: dict[Form, list[Pair]] = {form: [] for form in FORMS}
        self.tasks: dict[Form, list[str]] = {form: [] for form in FORMS}
        self.attempts: dict[Form, dict[int, int]] = {form: defaultdict(int) for form in FORMS}
        self.lists: dict[Form, set[int]] = {form: set() for form in FORMS}
        self._files: dict[str, IO[bytes]] = {}
        self._lock = FileLock(self.path / ".lock", timeout=0)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout as error:
            raise UserError(f"{self.path}: another run is writing there; choose another --output_dir") from error
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot write there ({error.strerror}); choose another --output_dir"
            ) from error
        try:
            begun = self._begun()
            if overwrite and begun:
                for name in (*_LINES, SETTINGS):  # the settings last: they say that the others are ours
                    (self.path / name).unlink(missing_ok=True)
                begun = {}
            for name in _LINES:
                self._read(name)
            self._check_settings(begun, dict(settings))
            self._files |= {name: (self.path / name).open("ab") for name in _LINES}
        except OSError as error:
            self.close()
            raise UserError(f"{error.filename or self.path}: cannot read or write it ({error.strerror})") from error
        except UserError:
            self.close()
            raise

    def __enter__(self) -> "SyntheticFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files and lets other runs in."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._lock.release()

    def add(self, row: Pair | Task | Rejection) -> None:
        """Writes a line, and counts it in."""
        name = next(name for name, kind in _LINES.items() if isinstance(row, kind))
        try:
            self._files[name].write(row.model_dump_json().encode() + b"\n")
            self._files[name].flush()
        except OSError as error:
            raise UserError(
                f"{self.path / name}: cannot write ({error.strerror}); make room and run again to resume"
            ) from error
        self._take(row)

    def _take(self, row: Pair | Task | Rejection) -> None:
        if isinstance(row, Pair):
            self.pairs[row.form].append(row)
        elif isinstance(row, Task):
            self.tasks[row.form].append(row.task)
            self.lists[row.form].add(row.draw)
        elif row.step == "tasks":
            self.lists[row.form].add(row.draw)
        else:
            self.attempts[row.form][row.draw] += 1

    def _begun(self) -> dict[str, Any]:
        """The settings that the folder was begun with; none for a new one."""
        file = self.path / SETTINGS
        if not file.exists():
            if taken := [name for name in _LINES if (self.path / name).exists()]:
                raise UserError(
                    f"{self.path / taken[0]} is there, but no {SETTINGS} of ours; choose another --output_dir"
                )
            return {}
        try:
            begun = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(begun, dict) or "examples_per_task" not in begun:
                raise ValueError("not written by revela-hub synthesize")
        except ValueError as error:
            raise UserError(f"{file}: not the settings of a run ({error}); choose another --output_dir") from error
        return begun

    def _check_settings(self, begun: dict[str, Any], settings: dict[str, Any]) -> None:
        """Refuses other settings, and writes down those that an earlier release did not."""
        pairs = sum(self.pairs.values(), [])
        if pairs:
            begun.setdefault("model", pairs[0].model)
        elif not any(self.tasks.values()):  # nothing to mix with
            begun = {}
        for name, value in settings.items():
            if begun.get(name, value) != value:
                what = _HASHED.get(name, f"--{name} {_SHORT.repr(begun[name])}, not {_SHORT.repr(value)}")
                raise UserError(
                    f"{self.path} was begun with {what}; choose another --output_dir, or start over with --overwrite"
                )
        if begun != settings:
            draft = self.path / f"{SETTINGS}.{os.getpid()}.tmp"
            draft.write_text(json.dumps(settings | begun, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(draft, self.path / SETTINGS)

    def _read(self, name: str) -> None:
        file = self.path / name
        if not file.exists():
            return
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # the last line was not written to its end
            os.truncate(file, whole)
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], start=1):
            try:
                self._take(_LINES[name].model_validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                where = "".join(f"{key}: " for key in first["loc"])
                raise UserError(f"{file}:{number}: damaged ({where}{first['msg']}); remove the line") from error
