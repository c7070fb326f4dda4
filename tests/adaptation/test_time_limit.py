"""The time limit of a training, which continues after an interruption."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState

from revela_hub.adaptation.time_limit import TIMES_FILE, TimeLimit


def test_a_run_continues_with_the_time_of_the_checkpoint_that_it_resumes_from(tmp_path: Path) -> None:
    """The time is written before its checkpoint, so the newest entry may be of one that was never completed."""
    arguments: Any = None
    limit = TimeLimit(tmp_path, 1000.0)
    limit.on_train_begin(arguments, TrainerState(global_step=0), TrainerControl())
    for step, spent in ((10, 100.0), (20, 200.0)):
        limit.spent = spent
        limit.on_step_end(arguments, TrainerState(global_step=step), TrainerControl(should_save=True))
    assert list(json.loads((tmp_path / TIMES_FILE).read_text())) == ["10", "20"]

    resumed = TimeLimit(tmp_path, 1000.0)
    resumed.on_train_begin(arguments, TrainerState(global_step=10), TrainerControl())
    assert 100 <= resumed.spent < 200


def test_a_checkpoint_that_ctrl_c_asked_for_has_its_time(tmp_path: Path) -> None:
    arguments: Any = None
    limit = TimeLimit(tmp_path, 1000.0)
    limit.on_train_begin(arguments, TrainerState(global_step=0), TrainerControl())
    limit.spent = 100.0
    limit.on_step_end(arguments, TrainerState(global_step=10), TrainerControl())
    limit.on_save(arguments, TrainerState(global_step=10), TrainerControl())
    assert json.loads((tmp_path / TIMES_FILE).read_text())["10"] >= 100
