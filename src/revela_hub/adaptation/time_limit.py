"""Callback that ends a training when its time is over, and evaluates and saves three times."""

import json
import time
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from revela_hub.files import write_text
from revela_hub.output import shows_progress

TIMES_FILE = "time.json"
EVALUATIONS = 3


class TimeLimit(TrainerCallback):
    """Stops after a number of seconds of training, without evaluations; a resumed run continues to count."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.file, self.limit = folder / TIMES_FILE, seconds
        self.spent, self.mark, self.done = 0.0, 0.0, 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Continue from the time of the checkpoint."""
        if state.global_step and self.file.is_file():
            self.spent = float(self._times().get(str(state.global_step), 0.0))
            self.done = int(EVALUATIONS * self.spent / self.limit)
        self.bar = tqdm(total=round(self.limit), initial=round(self.spent), unit="s", disable=not shows_progress())
        self.mark = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Evaluate and save after each third, and stop after the last."""
        now = time.monotonic()
        self.spent, self.mark = self.spent + now - self.mark, now
        self.bar.update(round(min(self.spent, self.limit)) - self.bar.n)
        part = int(EVALUATIONS * self.spent / self.limit)
        if part > self.done:
            self.done = part
            control.should_evaluate = control.should_save = True
            control.should_training_stop = part >= EVALUATIONS
        if control.should_save:
            # The checkpoint is written after this, so an interrupted run may resume from an earlier one.
            self._write(state.global_step)

    def _write(self, step: int) -> None:
        """Write the seconds of training until a step."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.file, json.dumps(self._times() | {str(step): round(self.spent, 1)}))

    def _times(self) -> dict[str, float]:
        """Return the seconds of training by the step of each checkpoint."""
        if not self.file.is_file():
            return {}
        times: dict[str, float] = json.loads(self.file.read_text(encoding="utf-8"))
        return times

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Do not count evaluations and checkpoints, which come before this call; Ctrl-C saves without the call above."""
        self._write(state.global_step)
        self.mark = time.monotonic()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Close the progress bar."""
        self.bar.close()
