"""The output folder of synthetic data, written line by line, so that a run can be interrupted at any time.

    pairs.jsonl      the examples, for training
    tasks.jsonl      the tasks of the first step
    rejected.jsonl   unusable replies, with the reason and the beginning of the reply
    settings.json    the settings that the data depend on

Each line has the number of its draw. These files are the only state: a resumed run repeats only the requests without a reply.
"""

import json
import os
import reprlib
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from revela_hub.data.synthesis.prompts import FORMS, Form
from revela_hub.errors import UserError
from revela_hub.paths import local_path
from revela_hub.whole_files import write_text

PAIRS, TASKS, REJECTED, SETTINGS = "pairs.jsonl", "tasks.jsonl", "rejected.jsonl", "settings.json"
TASK_PREFIX = "synthetic/"  # of the column `task`: synthetic/short-long

# Settings of which only a hash is stored, and how a difference is described.
_HASHED = {
    "exclude": "different --exclude texts",
    "extra_body": "a different --extra_body",
    "prompts": "different prompts (of another version of revela-hub)",
    "weights": "different weights of --model (or local instead of a server's, or the reverse)",
}
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlist = 100, 5


class SyntheticPair(BaseModel):
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


class SyntheticTask(BaseModel):
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


_LINES: dict[str, type[SyntheticPair] | type[SyntheticTask] | type[Rejection]] = {
    PAIRS: SyntheticPair,
    TASKS: SyntheticTask,
    REJECTED: Rejection,
}


class SyntheticFolder:
    """The folder, opened for one run: its content, and new lines.

    Args:
        path: The folder; created if it is missing.
        settings: The settings that the data depend on, which must be the same as in earlier runs.
        overwrite: Whether to delete the files of earlier runs, when the first new line is written.

    Attributes:
        pairs: The lines of `pairs.jsonl`, of this run and earlier ones, by form.
        tasks: The tasks of each form, in order.
        attempts: The number of rejected replies for each draw of the second step, by form and draw.
        lists: The answered draws of the first step, by form.

    Raises:
        UserError: The folder cannot be written to, belongs to a run with different settings or to something else, is in
            use, or contains an invalid line. (An incomplete last line, left by a crash, is removed.)
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], overwrite: bool = False) -> None:
        self.path = local_path(path)
        self.pairs: dict[Form, list[SyntheticPair]] = {form: [] for form in FORMS}
        self.tasks: dict[Form, list[str]] = {form: [] for form in FORMS}
        self.attempts: dict[Form, dict[int, int]] = {form: defaultdict(int) for form in FORMS}
        self.lists: dict[Form, set[int]] = {form: set() for form in FORMS}
        self._opened = ExitStack()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._opened.enter_context(FileLock(self.path / ".lock", timeout=0))
        except Timeout as error:
            raise UserError(f"{self.path} is in use by another run; choose another --output_dir") from error
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot write there ({error.strerror}); choose another --output_dir"
            ) from error
        try:
            begun, self._settings = self._begun(), dict(settings)
            self._overwrite = overwrite and bool(begun)
            if not self._overwrite:
                for name in _LINES:
                    self._read(name)
                self._open(begun)
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
        self._opened.close()

    def add(self, row: SyntheticPair | SyntheticTask | Rejection) -> None:
        """Writes a line and adds it to the attributes."""
        name = next(name for name, kind in _LINES.items() if isinstance(row, kind))
        try:
            if self._overwrite:  # only now: a server that never answers must not cost the earlier examples
                for earlier in (*_LINES, SETTINGS):  # the settings last: they say that the others are ours
                    (self.path / earlier).unlink(missing_ok=True)
                self._open({})
                self._overwrite = False
            self._files[name].write(row.model_dump_json().encode() + b"\n")
            self._files[name].flush()
        except OSError as error:
            raise UserError(
                f"{self.path / name}: cannot write ({error.strerror}); free some space and run again"
                " without --overwrite to resume"
            ) from error
        self._take(row)

    def _take(self, row: SyntheticPair | SyntheticTask | Rejection) -> None:
        if isinstance(row, SyntheticPair):
            self.pairs[row.form].append(row)
        elif isinstance(row, SyntheticTask):
            self.tasks[row.form].append(row.task)
            self.lists[row.form].add(row.draw)
        elif row.step == "tasks":
            self.lists[row.form].add(row.draw)
        else:
            self.attempts[row.form][row.draw] += 1

    def _begun(self) -> dict[str, Any]:
        """Return the stored settings; an empty dictionary for a new folder."""
        file = self.path / SETTINGS
        if not file.exists():
            if taken := [name for name in _LINES if (self.path / name).exists()]:
                raise UserError(
                    f"{self.path / taken[0]} exists, but {SETTINGS} is missing; choose another --output_dir"
                )
            return {}
        try:
            begun = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(begun, dict) or "examples_per_task" not in begun:
                raise ValueError("not written by revela-hub synthesize")
        except ValueError as error:
            raise UserError(
                f"{file}: not the settings of a synthesis run ({error}); choose another --output_dir"
            ) from error
        return begun

    def _open(self, begun: dict[str, Any]) -> None:
        """Opens the files; raises UserError for different settings."""
        if not any((*self.pairs.values(), *self.tasks.values())):  # nothing was written yet
            begun = {}
        for name, value in self._settings.items() if begun else ():
            if begun.get(name) != value:
                what = _HASHED.get(name, f"--{name} {_SHORT.repr(begun.get(name))}, not {_SHORT.repr(value)}")
                raise UserError(
                    f"{self.path} was created with {what}; choose another --output_dir, or start over with --overwrite"
                )
        if not begun:
            text = json.dumps(self._settings, indent=2, ensure_ascii=False)
            write_text(self.path / SETTINGS, f"{text}\n", "--output_dir")
        self._files = {name: self._opened.enter_context((self.path / name).open("ab")) for name in _LINES}

    def _read(self, name: str) -> None:
        file = self.path / name
        if not file.exists():
            return
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # the last line is incomplete
            os.truncate(file, whole)
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], start=1):
            try:
                self._take(_LINES[name].model_validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                where = "".join(f"{key}: " for key in first["loc"])
                raise UserError(f"{file}:{number}: damaged ({where}{first['msg']}); remove the line") from error
