"""Log what a run trains, how long it will take, and its metrics."""

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from revela_hub.trainers.base.arguments import RunArguments


class Progress(TrainerCallback):
    """Callback that logs the remaining time after two steps and, if there is no progress bar, one line per log entry."""

    def __init__(self, arguments: RunArguments, describe: Callable[[], str]) -> None:
        self.arguments, self.describe = arguments, describe
        self._first: tuple[int, float] | None = None
        self._announced = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log the description of the run."""
        self._first, self._announced = None, False
        if state.global_step < state.max_steps:
            self.arguments.log(self.describe())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Estimate the remaining time, not counting the slower first step."""
        if self._first is None:
            self._first = (state.global_step, time.monotonic())
        elif not self._announced:
            self._announced = True
            since = time.monotonic() - self._first[1]
            each = since / (state.global_step - self._first[0])
            left = each * (state.max_steps - state.global_step)
            self.arguments.log(f"{each:.2f} s per step: about {clock(left)} left")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Log the metrics in one line, with the remaining time."""
        if not args.disable_tqdm or not logs or not state.is_world_process_zero:
            return
        line = [f"step {state.global_step}/{state.max_steps}" if state.max_steps else "before training"]
        line += [f"{name} {value:.4g}" for name, value in logs.items() if isinstance(value, (int, float))]
        if self._first is not None and "loss" in logs and state.global_step > self._first[0]:
            each = (time.monotonic() - self._first[1]) / (state.global_step - self._first[0])
            line.append(f"{clock(each * (state.max_steps - state.global_step))} left")
        self.arguments.log("  ".join(line))


def clock(seconds: float) -> str:
    """Format a duration: `40 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def count(number: float) -> str:
    """Format a count: `812`, `12.3 K`, `7.2 B`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "K")):
        if number >= size:
            return f"{number / (1e3 if unit == 'K' else size):.3g} {unit}"
    return f"{number:.0f}"
