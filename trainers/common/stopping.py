"""Ctrl-C and SIGTERM end a run with a checkpoint, after the update that is under way."""

import signal
import sys
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Interrupted(KeyboardInterrupt):
    """A run that was asked to end and has saved a checkpoint; the message says which.

    Attributes:
        status: the exit status that a shell expects after such a signal.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.status = 128 + signum


class StopOnSignal(TrainerCallback):
    """Asks the Trainer for a checkpoint and the end when a signal has come; a second signal ends the process at once.

    Attributes:
        signum: the signal that came, in this process or another one of the run; 0 for none.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._before: dict[int, Any] = {}
        self._group: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the signals; in a thread nobody may."""
        self.signum = 0
        if args.world_size > 1 and dist.is_initialized():
            # Of its own, for processors: agreeing must not wait for what the devices still compute.
            self._group = self._group or dist.new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore(self) -> None:
        """Gives the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self.restore()  # a second one is meant
        sys.stderr.write(f"\n{signal.Signals(signum).name}: ending after this update, with a checkpoint\n")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ends the run in all its processes after the same update."""
        if self._group is not None:
            noted = torch.tensor(self.signum)
            dist.all_reduce(noted, dist.ReduceOp.MAX, group=self._group)
            self.signum = int(noted)
        if self.signum:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The run ends in the middle of an epoch: nothing is to be measured or saved for its end."""
        if self.signum:
            control.should_evaluate = control.should_save = False
