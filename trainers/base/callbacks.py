"""Callbacks of every run: stop on a signal, log progress, set the collator's epoch."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from revela_hub.output import clock
from revela_hub.trainers.base.arguments import RunArguments


class StopOnSignal(TrainerCallback):
    """Save a checkpoint and stop after the step in which Ctrl-C or SIGTERM arrives; a second signal ends the process."""

    def __init__(self) -> None:
        self.signum = 0  # received by any process of the run
        self._previous: dict[int, Any] = {}
        self._group: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Install the signal handlers, which Python allows in the main thread only."""
        self.signum = 0
        if args.world_size > 1 and dist.is_initialized():
            # A separate group, so that the exchange does not wait for the devices.
            self._group = self._group or dist.new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)
            }

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self.restore()
        sys.stderr.write(f"\n{signal.Signals(signum).name}: stopping after this step, with a checkpoint\n")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop all processes after the same step."""
        if self._group is not None:
            received = torch.tensor(self.signum)
            dist.all_reduce(received, dist.ReduceOp.MAX, group=self._group)
            self.signum = int(received)
        if self.signum:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Skip the evaluation and the checkpoint of an epoch's end: the run stops in the middle of it."""
        if self.signum:
            control.should_evaluate = control.should_save = False


class SharedEpoch(TrainerCallback):
    """Base of collators whose random numbers depend on the epoch, which they set as callbacks; persistent workers see it, too."""

    def __init__(self, epoch: int = 0) -> None:
        self._epoch = torch.tensor(epoch).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch of the next batches."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Set the epoch, also after a resume."""
        self.epoch = int((state.epoch or 0.0) + 1e-6)


class Progress(TrainerCallback):
    """Log the run and, without a progress bar, one line per log entry with the remaining time."""

    def __init__(self, arguments: RunArguments, describe: Callable[[], str]) -> None:
        self.arguments, self.describe = arguments, describe
        self._began = (0, 0.0)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log the description of the run."""
        self._began = (state.global_step, time.monotonic())
        if state.global_step < state.max_steps:
            self.arguments.log(self.describe())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Log the metrics in one line."""
        if not args.disable_tqdm:
            return
        logs: dict[str, Any] = given["logs"]
        line = [f"step {state.global_step}/{state.max_steps}" if state.max_steps else "before training"]
        line += [f"{name} {value:.4g}" for name, value in logs.items() if isinstance(value, (int, float))]
        step, since = self._began
        if "loss" in logs and state.global_step > step:
            per_step = (time.monotonic() - since) / (state.global_step - step)
            line.append(f"{clock(per_step * (state.max_steps - state.global_step))} left")
        self.arguments.log("  ".join(line))
