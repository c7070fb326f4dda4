"""Epochs of collators: random numbers that differ between epochs, and are the same after a resume."""

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class SharedEpoch:
    """Base of collators that keep the epoch in shared memory, so that persistent workers see it, too."""

    def __init__(self, epoch: int = 0) -> None:
        self._epoch = torch.tensor(epoch).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch of the next batches."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)


class NewEpoch(TrainerCallback):
    """Set `collator.epoch` at the start of every epoch, also after a resume."""

    def __init__(self, collator: SharedEpoch) -> None:
        self.collator = collator

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Set the epoch."""
        self.collator.epoch = int((state.epoch or 0.0) + 1e-6)
