"""Save a checkpoint and stop training on Ctrl-C and SIGTERM, after the current step."""

import signal
import sys
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StopOnSignal(TrainerCallback):
    """Callback that saves a checkpoint and stops training after a signal; a second signal stops the process immediately.

    Attributes:
        signum: signal received by any process of the run; 0 for none.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._previous: dict[int, Any] = {}
        self._group: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Install the signal handlers, which Python allows in the main thread only."""
        self.signum = 0
        if args.world_size > 1 and dist.is_initialized():
            # A separate CPU group, so that the exchange does not wait for the devices.
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
        self.restore()  # the next signal stops the process
        sys.stderr.write(f"\n{signal.Signals(signum).name}: stopping after this step, with a checkpoint\n")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
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
