"""The folder that synthetic data are written to, line by line as they come, so that a run can stop at any moment.

    pairs.jsonl      the examples: what training reads
    tasks.jsonl      the tasks of the first step
    rejected.jsonl   what was asked for and could not be used, with the reason and the beginning of the reply
    settings.json    the settings that the random draws depend on

Each line says which draw it came from. What is done is what is in these files: a restart draws the same again only for
requests whose replies had not come.
"""

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from revela_hub.data.synthesis.prompts import FORMS, Form
from revela_hub.errors import UserError

PAIRS, TASKS, REJECTED, SETTINGS = "pairs.jsonl", "tasks.jsonl", "rejected.jsonl", "settings.json"
TASK_PREFIX = "synthetic/"  # of the column `task`: synthetic/short-long

_FIELDS = {
    PAIRS: ("task", "instruction", "anchor", "positive", "negative_1", "draw"),
    TASKS: ("form", "task", "draw"),
    REJECTED: ("step", "form", "draw", "attempt", "reason"),
}
_SAMPLE_CHARACTERS = 500


class SyntheticFolder:
    """The folder, open for one run: what is in it, and what is added.

    Args:
        path: Made if it is not there.
        settings: What the draws depend on; must be what it was when the folder was begun.

    Attributes:
        pairs: The rows of `pairs.jsonl`, of this run and earlier ones.
        tasks: The tasks of each form, in order.
        attempts: How many replies to a draw were rejected: (step, form, draw) -> number.
        lists: Draws of the first step that have been answered, by form.

    Raises:
        UserError: The folder cannot be written, belongs to a run with other settings, is in use, or a line of it is
            damaged (but for the last line of a file, which a crash may have cut off: that is removed).
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(path).expanduser()
        self.pairs: list[dict[str, Any]] = []
        self.tasks: dict[Form, list[str]] = {form: [] for form in FORMS}
        self.attempts: dict[tuple[str, Form, int], int] = defaultdict(int)
        self.lists: dict[Form, set[int]] = {form: set() for form in FORMS}
        self._files: dict[str, IO[bytes]] = {}
        self._lock = FileLock(self.path / ".lock", timeout=0)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout as error:
            raise UserError(f"{self.path}: another run is writing there; choose another --output") from error
        except OSError as error:
            raise UserError(f"{self.path}: cannot write there ({error.strerror}); choose another --output") from error
        try:
            self._check_settings(dict(settings))
            for name in _FIELDS:
                self._read(name)
                self._files[name] = (self.path / name).open("ab")
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

    def count(self, form: Form) -> int:
        """How many examples of a form there are."""
        return sum(row["task"] == TASK_PREFIX + form for row in self.pairs)

    def draws(self, form: Form) -> set[int]:
        """The draws of a form that have led to an example."""
        return {row["draw"] for row in self.pairs if row["task"] == TASK_PREFIX + form}

    def add_pair(self, row: dict[str, Any]) -> None:
        """Writes an example; `row` has the columns of `pairs.jsonl`."""
        self._append(PAIRS, row)

    def add_tasks(self, form: Form, tasks: list[str], draw: int) -> None:
        """Writes the tasks that one reply of the first step has added."""
        for task in tasks:
            self._append(TASKS, {"form": form, "task": task, "draw": draw})

    def reject(self, step: str, form: Form, draw: int, attempt: int, reason: str, reply: str) -> None:
        """Writes down a reply that cannot be used, shortened."""
        row = {"step": step, "form": form, "draw": draw, "attempt": attempt, "reason": reason}
        self._append(REJECTED, row | {"reply": reply[:_SAMPLE_CHARACTERS]})

    def _take(self, name: str, row: dict[str, Any]) -> None:
        """Counts a line in, read or just written."""
        if name == PAIRS:
            self.pairs.append(row)
        elif name == TASKS:
            self.tasks[row["form"]].append(row["task"])
            self.lists[row["form"]].add(row["draw"])
        else:
            self.attempts[row["step"], row["form"], row["draw"]] += 1
            if row["step"] == "tasks":
                self.lists[row["form"]].add(row["draw"])

    def _append(self, name: str, row: dict[str, Any]) -> None:
        try:
            # errors="replace": a reply may hold half of a surrogate pair, which JSON escapes and UTF-8 has not.
            line = json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n"
            self._files[name].write(line)
            self._files[name].flush()
        except OSError as error:
            raise UserError(
                f"{self.path / name}: cannot write ({error.strerror}); make room and run again to go on from here"
            ) from error
        self._take(name, row)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        file = self.path / SETTINGS
        if not file.exists():
            draft = file.with_suffix(".tmp")
            draft.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(draft, file)
            return
        try:
            begun = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{file}: not valid JSON ({error}); choose another --output") from error
        for name, value in settings.items():
            if begun.get(name) != value:
                option = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{self.path} was begun with {option} {begun.get(name)!r}, not {value!r}; choose another --output"
                )

    def _read(self, name: str) -> None:
        file = self.path / name
        if not file.exists():
            return
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # the last line was not written to its end
            os.truncate(file, whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                row = json.loads(line)
                missing = [key for key in _FIELDS[name] if key not in row]
                if missing:
                    raise ValueError(f"no {missing[0]!r}")
                self._take(name, row)
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f"{file}:{number}: damaged ({error}); remove the line") from error
