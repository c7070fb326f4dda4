"""Tells a collator which epoch it makes batches for."""

from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class EpochCollator(Protocol):
    """A collator that draws other masks in every epoch."""

    epoch: int


class NewEpoch(TrainerCallback):
    """Sets `collator.epoch`, after a resume too, so that the same masks are drawn as if nothing had happened."""

    def __init__(self, collator: EpochCollator) -> None:
        self.collator = collator

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called by the trainer."""
        self.collator.epoch = int((state.epoch or 0.0) + 1e-6)
