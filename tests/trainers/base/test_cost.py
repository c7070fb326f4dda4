"""The cost of a run in its card, and the tools that record it."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers.integrations import CodeCarbonCallback

from revela_hub.cli.main import main
from revela_hub.trainers.base.callbacks import clock
from revela_hub.trainers.base.run import co2_emissions, describe_cost, hardware


@pytest.fixture
def words(mlm_folder: Path, documents: Path, tmp_path: Path) -> list[str]:
    """The command of a run of four steps and two checkpoints into the folder `out`."""
    options = {
        "--data": documents, "--encoder": mlm_folder, "--output_dir": tmp_path / "out", "--max_length": 40,
        "--per_device_train_batch_size": 4, "--max_steps": 4, "--save_steps": 2, "--bf16": "false", "--logging_steps": 1,
        "--cache_dir": tmp_path / "cache", "--disable_tqdm": "true",
    }  # fmt: skip
    return ["train", "retromae", *(str(word) for pair in options.items() for word in pair)]


def metadata(out: Path) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load((out / "card.yaml").read_text(encoding="utf-8"))
    return found


def test_the_card_tells_steps_time_and_hardware(words: list[str], tmp_path: Path) -> None:
    assert main(words) == 0
    threads = torch.get_num_threads()
    cpu = f"CPU ({threads} thread{'s' if threads > 1 else ''}, {torch.backends.cpu.get_cpu_capability()})"
    sentence = str(metadata(tmp_path / "out")["training_run"])
    assert re.fullmatch(rf"Trained for 4 steps in \d+ s on {re.escape(cpu)}\.", sentence)
    assert sentence in (tmp_path / "out" / "encoder" / "README.md").read_text(encoding="utf-8")
    assert hardware(torch.device("cpu"), 2) == f"2 x {cpu}"


@pytest.mark.parametrize("known", [True, False])
def test_a_resumed_run_counts_the_time_before(words: list[str], tmp_path: Path, known: bool) -> None:
    """A checkpoint of an earlier version, which does not know its time, counts from zero."""
    assert main(words) == 0
    kept = tmp_path / "out" / "checkpoint-4" / "trainer_state.json"
    state = json.loads(kept.read_text(encoding="utf-8"))
    assert state["stateful_callbacks"].pop("WallTime")["attributes"]["earlier"] > 0
    if known:
        state["stateful_callbacks"]["WallTime"] = {"args": {}, "attributes": {"earlier": 7200.0}}
    kept.write_text(
        json.dumps(state).ljust(kept.stat().st_size), encoding="utf-8"
    )  # a checkpoint knows the size of its files
    assert main([*words, "--max_steps", "5", "--resume_from_checkpoint", "last"]) == 0
    sentence = str(metadata(tmp_path / "out")["training_run"])
    assert sentence.startswith("Trained for 5 steps in ") and (f"in {clock(7200)} on" in sentence) == known


def test_codecarbon_adds_energy_and_co2_without_a_place(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("codecarbon", reason="codecarbon is not installed")
    monkeypatch.setenv("CODECARBON_ALLOW_MULTIPLE_RUNS", "true")
    assert main([*words, "--report_to", "codecarbon"]) == 0
    found = metadata(tmp_path / "out")
    assert "codecarbon estimates" in str(found["training_run"])
    card = ModelCard.load(tmp_path / "out" / "encoder" / "README.md")
    emissions = card.data.to_dict()["co2_eq_emissions"]
    assert emissions == found["co2_eq_emissions"] and emissions["source"] == "codecarbon"
    assert set(emissions) <= {"emissions", "energy_consumed", "source", "training_type", "hardware_used"}
    assert emissions["energy_consumed"] > 0


def test_energy_and_co2_in_the_units_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """codecarbon measures kilograms; its place, and a part before a resumption that it does not know, are not claimed."""
    measured = SimpleNamespace(
        emissions=0.00123449,
        energy_consumed=0.004,
        cpu_model="AMD EPYC",
        gpu_model=None,
        country_name="Utopia",
        latitude=1.0,
    )
    monkeypatch.setattr(CodeCarbonCallback, "__init__", lambda self: None)
    callback = CodeCarbonCallback()
    callback.tracker = SimpleNamespace(final_emissions_data=measured)
    arguments = SimpleNamespace(world_size=1, n_gpu=0, device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(
        args=arguments, state=SimpleNamespace(global_step=4), callback_handler=SimpleNamespace(callbacks=[callback])
    )
    assert co2_emissions(trainer) == {
        "emissions": 1.234,
        "energy_consumed": 0.004,
        "source": "codecarbon",
        "training_type": "fine-tuning",
        "hardware_used": "AMD EPYC",
    }
    assert describe_cost(trainer).endswith("codecarbon estimates 4 Wh of energy and 1.23 g of CO2.")
    assert describe_cost(trainer, resumed=True).endswith("1.23 g of CO2 since the run was last resumed.")
    callback.tracker = None  # not started
    assert co2_emissions(trainer) == {}


def test_trackio_records_the_loss_of_every_step(words: list[str]) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    assert main([*words, "--report_to", "trackio", "--project", "papers", "--run_name", "first"]) == 0
    logs = SQLiteStorage.get_logs("papers", "first")
    assert len([log["train/loss"] for log in logs if "train/loss" in log]) == 4
