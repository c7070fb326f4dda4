"""The frame of a run: what it refuses, what it survives, and what it says; with the smallest trainer there is."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
import yaml
from filelock import FileLock
from parsed_arguments import parse_arguments
from processes import launch
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainerControl, TrainerState

from revela_hub.checkpoints import publish
from revela_hub.cli.main import main
from revela_hub.errors import UserError
from revela_hub.files import is_ours
from revela_hub.interrupts import Interrupted
from revela_hub.trainers.base.checkpoints import RunRecord, last_checkpoint
from revela_hub.trainers.base.run import LOCK
from revela_hub.trainers.retromae import command as train_retromae

SENTENCES = "The river carries sediment to the sea. A fox jumps over a dog. Paris is the capital of France. "


@pytest.fixture
def words(mlm_folder: Path, documents: Path, tmp_path: Path) -> list[str]:
    """The command of a run of six updates and three checkpoints into the folder `out`."""
    options = {
        "--data": documents, "--encoder": mlm_folder, "--output_dir": tmp_path / "out", "--max_length": 40,
        "--max_steps": 6, "--per_device_train_batch_size": 4, "--save_steps": 2, "--learning_rate": 1e-3,
        "--bf16": "false", "--cache_dir": tmp_path / "cache", "--report_to": "none", "--disable_tqdm": "true",
        "--logging_steps": 1,
    }  # fmt: skip
    return ["train", "retromae", *(str(word) for pair in options.items() for word in pair)]


LAST = ["--resume_from_checkpoint", "last"]


def run(words: list[str], *callbacks: TrainerCallback) -> None:
    """The command with callbacks."""
    arguments = parse_arguments(train_retromae.Arguments, words[2:])
    assert arguments is not None
    train_retromae.train(arguments, callbacks=list(callbacks))


def weights(out: Path) -> dict[str, torch.Tensor]:
    return {f"{f.parent.name} {k}": v for f in out.glob("**/model.safetensors") for k, v in load_file(f).items()}


def same(one: Path, other: Path) -> bool:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Signal(TrainerCallback):
    """Sends this process a signal in the middle of an update."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


# --- nothing that is not finite


@pytest.mark.parametrize("logging", ["1", "100"])
def test_a_run_that_becomes_nan_is_not_exported(words: list[str], tmp_path: Path, logging: str) -> None:
    class Spoil(TrainerCallback):
        def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
            if state.global_step == 3:
                next(kwargs["model"].parameters()).data.fill_(torch.nan)  # type: ignore[attr-defined]

    with pytest.raises(UserError, match="step 4.*checkpoint-2"):
        run([*words, "--logging_steps", logging], Spoil())
    out = tmp_path / "out"
    assert last_checkpoint(out) == out / "checkpoint-2" and not (out / "encoder").exists()
    assert all(value.isfinite().all() for value in weights(out).values())


# --- checkpoints


@pytest.mark.parametrize("state", [None, '{"global_step"'], ids=["missing", "cut"])
def test_a_killed_run_resumes_from_the_last_complete_checkpoint_to_the_same_weights(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str | None
) -> None:
    out = tmp_path / "out"
    assert main(words) == 0
    expected = weights(out / "encoder")
    RunRecord(settings={}).write(out)  # killed while it wrote its last checkpoint
    (out / "checkpoint-6" / "trainer_state.json").unlink()
    if state is not None:
        (out / "checkpoint-6" / "trainer_state.json").write_text(state)
    capsys.readouterr()
    assert main([*words, *LAST]) == 0
    assert f"resuming from {out / 'checkpoint-4'}" in capsys.readouterr().out
    assert all(torch.equal(value, expected[name]) for name, value in weights(out / "encoder").items())
    assert last_checkpoint(out) == out / "checkpoint-6"  # written again
    assert main([*words, "--resume_from_checkpoint", str(tmp_path)]) == 2


def test_a_run_that_was_killed_before_its_export_is_exported(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(words) == 0
    expected = weights(out / "encoder")
    for name in ("run.json", "encoder/model.safetensors", "model.safetensors", "trainer_state.json"):
        (out / name).unlink()
    (out / "run.json").write_text(json.dumps({"settings": {}}))
    assert main([*words, *LAST]) == 0
    assert all(torch.equal(value, expected[name]) for name, value in weights(out / "encoder").items())
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 6


def test_a_finished_run_stays_as_it_is(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(words) == 0
    # They are not read as text.
    assert is_ours(out) and is_ours(out / "checkpoint-6") and is_ours(out / "encoder")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != LOCK}
    assert main([*words, *LAST]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != LOCK}


def test_a_run_that_resumes_with_other_options_warns_once(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(words) == 0
    capsys.readouterr()
    more = ["--max_steps", "8", "--learning_rate", "2e-3", "--seed", "7", "--logging_steps", "2"]
    assert main([*words, *LAST, *more]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "other options" in line]
    assert len(warnings) == 1
    assert all(each in warnings[0] for each in ("learning_rate 0.002 (before: 0.001)", "seed 7", "max_steps 8"))
    config = yaml.safe_load((out / "card.yaml").read_text())["config"]
    assert yaml.safe_load(config)["learning_rate"] == 0.002
    assert "# from step 6 on: learning_rate 0.002 (before: 0.001)" in config
    assert "logging_steps" not in config and str(tmp_path) not in config
    record = RunRecord.read(out)
    assert record is not None and record.finished and "from step 6 on: seed 7 (before: 42)" in record.changes


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_with_a_checkpoint_from_which_it_resumes(
    words: list[str], tmp_path: Path, number: int, status: int
) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    out, whole = tmp_path / "out", tmp_path / "whole"
    with pytest.raises(Interrupted, match="checkpoint-3 .* --resume_from_checkpoint last") as caught:
        run([*words, "--dataloader_num_workers", "0"], Signal(number, 2))
    assert caught.value.status == status
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert not (out / "encoder").exists()
    with pytest.raises(UserError, match="unfinished"):
        publish(out, "org/x")
    assert main([*words, *LAST]) == 0
    assert main([*words, "--output_dir", str(whole)]) == 0
    assert same(out, whole) and same(out / "encoder", whole / "encoder")


_ONE_OF_TWO = """
import os, sys
sys.path.insert(0, {tests!r})
from test_run import Signal, run
from revela_hub.interrupts import Interrupted
try:
    run({words!r}, *([Signal(15, 2)] if os.environ["RANK"] == "1" else []))
except Interrupted as error:
    sys.exit(error.status != 143)
sys.exit("was not stopped")
"""


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_after_the_same_step(words: list[str], tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(_ONE_OF_TWO.format(tests=str(Path(__file__).parent), words=words))
    written = "".join(launch(str(script), processes=2))
    assert "SIGTERM: stopping after this step" in written
    checkpoint = last_checkpoint(tmp_path / "out")
    assert checkpoint == tmp_path / "out" / "checkpoint-3", written[-3000:]
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in checkpoint.iterdir()}


_SLOW = """
import sys, time
from pathlib import Path
from datetime import timedelta
from torch import distributed
from revela_hub.cli.main import main
from revela_hub.data import row_cache
read = row_cache.read_documents
def slowly(*sources, **options):
    Path({script!r} + "-read").touch(exist_ok=False)  # by the process that uses the documents
    time.sleep({seconds})
    yield from read(*sources, **options)
row_cache.read_documents = slowly
# On CPUs, TrainingArguments leaves out --ddp_timeout.
distributed.init_process_group("gloo", timeout=timedelta(seconds={timeout}))
sys.exit(main({words!r}))
"""


@pytest.mark.slow
def test_text_may_take_longer_to_prepare_than_processes_wait_for_each_other(words: list[str], tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    words += ["--probe", "none", "--max_steps", "2"]
    script.write_text(_SLOW.format(seconds=12, timeout=8, script=str(script), words=words))
    launch(str(script), processes=2)
    assert (tmp_path / "out" / "encoder" / "modules.json").is_file()


# --- the output folder


def test_a_run_in_the_folder_is_kept_unless_it_may_be_overwritten(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("not of a run")
    assert main(words) == 0
    assert main(words) == 2
    assert last_checkpoint(out) == out / "checkpoint-6"
    assert main([*words, "--overwrite", "true", "--max_steps", "2"]) == 0
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
    assert (out / "notes.txt").is_file()


def test_two_processes_do_not_train_into_one_folder(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / LOCK), pytest.raises(UserError, match="in use"):
        run(words)


# --- the log


@pytest.mark.parametrize("warm_up", ["0.1", "100"])
def test_a_run_logs_its_length_and_loss(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], warm_up: str
) -> None:
    words += ["--warmup_steps", warm_up]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "it/s]" not in captured.err  # no progress bar of any library in a log file
    assert "6 steps of 4 rows" in captured.out
    assert ("the learning rate only reaches 6%" in captured.out) is (warm_up == "100")
    assert "step 3/6  loss " in captured.out
    card = (tmp_path / "out" / "encoder" / "README.md").read_text()
    assert re.search(r"Trained for 6 steps in \d+ s on CPU \(", card)
