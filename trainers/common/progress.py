"""What a run says while it goes on: what it is, how long it will take, and a line for each log."""

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from revela_hub.trainers.common.arguments import RunArguments


class Progress(TrainerCallback):
    """Says when the run will end, as soon as two updates are done, and where no bar shows it, each log in a line."""

    def __init__(self, arguments: RunArguments, describe: Callable[[], str]) -> None:
        self.arguments, self.describe = arguments, describe
        self._first: tuple[int, float] | None = None
        self._told = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Says what the run is."""
        self._first, self._told = None, False
        if state.global_step < state.max_steps:
            self.arguments.say(self.describe())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measures from the end of the first update, which pays for warming up."""
        if self._first is None:
            self._first = (state.global_step, time.monotonic())
        elif not self._told:
            self._told = True
            since = time.monotonic() - self._first[1]
            each = since / (state.global_step - self._first[0])
            left = each * (state.max_steps - state.global_step)
            self.arguments.say(f"{each:.2f} s per update: about {clock(left)} left")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """One line, the rate and the rest of the time with it."""
        if not args.disable_tqdm or not logs or not state.is_world_process_zero:
            return
        line = [f"update {state.global_step}/{state.max_steps}" if state.max_steps else "before training"]
        line += [f"{name} {value:.4g}" for name, value in logs.items() if isinstance(value, (int, float))]
        if self._first is not None and "loss" in logs and state.global_step > self._first[0]:
            each = (time.monotonic() - self._first[1]) / (state.global_step - self._first[0])
            line.append(f"{clock(each * (state.max_steps - state.global_step))} left")
        self.arguments.say("  ".join(line))


def clock(seconds: float) -> str:
    """A time as one says it: `40 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def count(number: float) -> str:
    """A count as one says it: `812`, `12.3 K`, `7.2 B`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "K")):
        if number >= size:
            return f"{number / (1e3 if unit == 'K' else size):.3g} {unit}"
    return f"{number:.0f}"
