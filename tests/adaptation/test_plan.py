"""The time limit of a training, which continues after an interruption, and the length of its texts."""

from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer
from transformers import TrainerControl, TrainerState

from revela_hub.adaptation.candidates import TimeLimit
from revela_hub.adaptation.options import AdaptOptions
from revela_hub.adaptation.plan import pairs_in_memory, training_length
from revela_hub.errors import UserError
from revela_hub.retrieval.encoder import length_limit


def test_a_resumed_run_continues_with_the_time_of_its_checkpoint() -> None:
    arguments: Any = None
    limit, state = TimeLimit(1000.0), TrainerState()
    limit.on_train_begin(arguments, state, TrainerControl())
    limit.mark -= 400.0
    limit.on_step_end(arguments, state, control := TrainerControl())
    assert control.should_evaluate and control.should_save and not control.should_training_stop
    state.stateful_callbacks["TimeLimit"] = limit.state()  # as the Trainer does for a checkpoint
    resumed = TimeLimit(1000.0)
    resumed.on_train_begin(arguments, state, TrainerControl())
    resumed.on_step_end(arguments, state, control := TrainerControl())
    assert 400 <= resumed.spent < 410 and not control.should_evaluate  # this third was evaluated before
    resumed.mark -= 600.0
    resumed.on_step_end(arguments, state, control)
    assert control.should_training_stop


def test_slow_machines_cut_training_texts(static_folder: Path, retriever_folder: Path) -> None:
    assert training_length(256, budget=1e6, seconds=0.01) == 256
    assert training_length(256, budget=128, seconds=0.1) == 128  # time for 10 steps of 32 pairs
    assert training_length(256, budget=1.0, seconds=0.1) == 64
    assert training_length(32, budget=1.0, seconds=1.0) == 32
    assert length_limit(SentenceTransformer(str(static_folder), device="cpu")) is None
    assert length_limit(SentenceTransformer(str(retriever_folder), device="cpu")) == 128


def test_long_texts_are_computed_in_parts_of_a_batch() -> None:
    assert [pairs_in_memory(length) for length in (None, 64, 256, 512, 8192, 100_000)] == [32, 32, 32, 16, 1, 1]


@pytest.mark.parametrize("budget", ["30", "0m", "m", "-5m", "5d"])
def test_a_budget_needs_a_unit(budget: str) -> None:
    with pytest.raises(UserError, match="is not a duration"):
        _ = AdaptOptions(data=[], budget=budget).seconds
