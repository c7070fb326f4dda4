"""Runs that end as a power cut would end them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState


class Kill(TrainerCallback):
    """End the run before the step after this one."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def whole_and_resumed(folder: Path, step: int, make: Callable[..., Any]) -> tuple[Any, Any]:
    """Return a run that was left alone, and one that was killed after its checkpoint of a step and resumed.

    `make(output_dir)` returns the trainer of a run, also with `callbacks`.
    """
    whole = make(folder / "whole")
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        make(folder / "killed", callbacks=[Kill(step)]).train()
    resumed = make(folder / "killed")
    resumed.train(resume_from_checkpoint=str(folder / "killed" / f"checkpoint-{step}"))
    return whole, resumed
