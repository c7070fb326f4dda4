"""The frame of a run: what it refuses, what it survives, and what it says; with the smallest trainer there is."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from filelock import FileLock
from parsed_arguments import parse_arguments
from processes import launch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast, TrainerCallback, TrainerControl, TrainerState

from revela_hub.cli.main import main
from revela_hub.data.own_folder import written_by_us
from revela_hub.trainers.base.checkpoints import Record, last_complete
from revela_hub.trainers.base.run import LOCK, TRAINING_CURVE
from revela_hub.trainers.base.trainer import MethodTrainer
from revela_hub.trainers.retromae import command as train_retromae

SENTENCES = "The river carries sediment to the sea. A fox jumps over a dog. Paris is the capital of France. "


@pytest.fixture
def bert(tmp_path: Path, wordpiece_tokenizer: BertTokenizerFast) -> Path:
    """A tiny BERT with its masked-LM head, and dropout, which a resumed run has to draw alike."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(wordpiece_tokenizer), max_position_embeddings=48, pad_token_id=0, **sizes)
    folder = tmp_path / "tiny-mlm"
    BertForMaskedLM(config).save_pretrained(folder)
    wordpiece_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def words(bert: Path, documents: Path, tmp_path: Path) -> list[str]:
    """The command of a run of six updates and three checkpoints into the folder `out`."""
    options = {
        "--data": documents, "--encoder": bert, "--output_dir": tmp_path / "out", "--max_length": 40, "--max_steps": 6,
        "--per_device_train_batch_size": 4, "--save_steps": 2, "--learning_rate": 1e-3, "--bf16": "false",
        "--cache_dir": tmp_path / "cache", "--report_to": "none", "--disable_tqdm": "true", "--logging_steps": 1,
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


def test_a_model_that_is_not_finite_is_not_trained(
    words: list[str], bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(bert / "model.safetensors")
    tensors["bert.encoder.layer.0.output.dense.bias"][3] = torch.nan
    save_file(tensors, bert / "model.safetensors", {"format": "pt"})
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "1 of 42 weights are not finite (first: lm.bert.encoder.layer.0.output.dense.bias)" in error
    assert not (tmp_path / "out" / "encoder").exists()


@pytest.mark.parametrize("logging", ["1", "100"])
def test_a_run_that_becomes_nan_is_not_exported_and_names_the_last_good_checkpoint(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], logging: str
) -> None:
    class Spoil(TrainerCallback):
        def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
            if state.global_step == 3:
                next(kwargs["model"].parameters()).data.fill_(torch.nan)  # type: ignore[attr-defined]

    from revela_hub.errors import UserError

    with pytest.raises(UserError, match=r"step 4: nothing is saved or exported.*last good.*checkpoint-2\.") as caught:
        run([*words, "--logging_steps", logging], Spoil())
    assert ("the loss became nan" in str(caught.value)) == (logging == "1")
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir() if path.name[0] != ".") == ["checkpoint-2"]
    assert all(value.isfinite().all() for value in weights(out).values())


# --- checkpoints that are complete, or skipped


@pytest.mark.parametrize("damage", ["cut", "missing", "state"])
def test_a_damaged_checkpoint_is_skipped_with_the_reason(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    out = tmp_path / "out"
    assert main(words) == 0
    expected = weights(out / "encoder")
    last = out / "checkpoint-6"
    if damage == "cut":
        (last / "optimizer.pt").write_bytes((last / "optimizer.pt").read_bytes()[:100])
    elif damage == "missing":
        (last / "model.safetensors").unlink()
    else:
        (last / "trainer_state.json").write_text('{"global_step"')
    (out / "run.json").unlink()  # killed before its end
    capsys.readouterr()
    assert main([*words, *LAST]) == 0
    printed = capsys.readouterr().out
    reason = {
        "cut": "optimizer.pt has 100 bytes of",
        "missing": "model.safetensors is missing",
        "state": "cannot be read",
    }
    assert "skipping checkpoint-6: " in printed and reason[damage] in printed
    assert f"resuming from {out / 'checkpoint-4'}" in printed
    assert weights(out / "encoder").keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in weights(out / "encoder").items())
    assert last_complete(out) == (last, [])  # written again
    assert main([*words, "--resume_from_checkpoint", str(tmp_path)]) == 2
    assert "is not a complete checkpoint: it has no trainer_state.json" in capsys.readouterr().err


def test_resuming_without_a_checkpoint_starts_from_the_beginning(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "out" / ".incomplete" / "checkpoint-2"
    half.mkdir(parents=True)
    (tmp_path / "out" / ".lock").touch()  # a run has had the folder
    assert main([*words, *LAST]) == 0
    assert "has no complete checkpoint: training from scratch" in capsys.readouterr().out
    assert not half.exists() and (tmp_path / "out" / "encoder" / "model.safetensors").is_file()


def test_a_full_disk_leaves_the_checkpoint_from_before(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = torch.save, []

    def full(value: object, file: object, *args: object, **kwargs: object) -> None:
        calls.append(str(file))
        if "checkpoint-4" in str(file) and str(file).endswith("optimizer.pt"):
            raise OSError(28, "No space left on device")
        save(value, file, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    assert main(words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    out = tmp_path / "out"
    assert f"cannot write {out / 'checkpoint-4'}: " in error
    assert error.endswith(f"the last good checkpoint is {out / 'checkpoint-2'}")
    assert last_complete(out) == (out / "checkpoint-2", [])
    assert any("checkpoint-4" in name for name in calls)


def test_old_checkpoints_are_deleted_but_not_the_newest(words: list[str], tmp_path: Path) -> None:
    assert main([*words, "--save_total_limit", "2"]) == 0
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


# --- resuming


def test_a_finished_run_stays_as_it_is(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(words) == 0
    # They are not read as text.
    assert written_by_us(out) and written_by_us(out / "checkpoint-6") and written_by_us(out / "encoder")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != LOCK}
    for more, said in (([], "finished at step 6"), (["--max_steps", "4"], "checkpoint-6 is beyond --max_steps 4")):
        capsys.readouterr()
        assert main([*words, *LAST, *more]) == 0
        assert said in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != LOCK}


def test_a_run_of_more_epochs_stays_as_it_is(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words += ["--max_steps", "-1", "--save_strategy", "epoch", "--num_train_epochs"]
    assert main([*words, "2"]) == 0
    written = (tmp_path / "out" / "encoder" / "model.safetensors").stat().st_mtime_ns
    for epochs, said in (("2", "finished at step"), ("1", "is beyond --num_train_epochs 1\n")):
        capsys.readouterr()
        assert main([*words, epochs, *LAST]) == 0
        assert said in capsys.readouterr().out
    assert (tmp_path / "out" / "encoder" / "model.safetensors").stat().st_mtime_ns == written


def test_a_run_that_was_killed_before_its_export_is_exported(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(words) == 0
    expected = weights(out / "encoder")
    for name in ("run.json", "encoder/model.safetensors", "model.safetensors", "trainer_state.json"):
        (out / name).unlink()
    assert main([*words, *LAST]) == 0
    assert all(torch.equal(value, expected[name]) for name, value in weights(out / "encoder").items())
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 6


def test_a_finished_run_without_checkpoints_is_left_untouched(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words, "--save_strategy", "no"]
    assert main(words) == 0
    written = (tmp_path / "out" / "encoder" / "model.safetensors").stat().st_mtime_ns
    assert main([*words, *LAST]) == 0
    assert f"nothing to do: the run in {tmp_path / 'out'} finished\n" in capsys.readouterr().out
    assert (tmp_path / "out" / "encoder" / "model.safetensors").stat().st_mtime_ns == written
    assert main([*words, *LAST, "--max_steps", "7"]) == 0
    assert "has no complete checkpoint: training from scratch" in capsys.readouterr().out


def test_other_settings_are_refused_with_their_list_unless_allowed(
    words: list[str], documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(words) == 0
    (documents / "9.txt").write_text("A document more. " + SENTENCES * 6)
    more = ["--max_steps", "8", "--learning_rate", "2e-3", "--seed", "7", "--optim", "adamw_torch"]
    assert main([*words, *LAST, *more]) == 2
    error = capsys.readouterr().err
    for listed in ("learning_rate 0.001 -> 0.002", "seed 42 -> 7", "optim 'adamw_torch_fused' -> 'adamw_torch'",
                   "max_steps 6 -> 8", "train_dataset '"):  # fmt: skip
        assert listed in error
    assert "--allow_changes" in error
    assert main([*words, *LAST, *more, "--allow_changes", "true", "--logging_steps", "2"]) == 0
    config = yaml.safe_load((out / "card.yaml").read_text())["config"]
    assert yaml.safe_load(config)["learning_rate"] == 0.002
    assert "# from step 6 on: learning_rate 0.002 (before: 0.001)" in config
    assert "logging_steps" not in config and str(tmp_path) not in config
    record = Record.read(out / "checkpoint-8")
    assert record is not None and record.changes[0]["seed"] == [42, 7]


def test_a_longer_run_is_no_other_run(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert main([*words, *LAST, "--max_steps", "8"]) == 0
    assert "changed since checkpoint-6: max_steps 6 -> 8" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_with_a_checkpoint_and_it_goes_on_from_there(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, status: int
) -> None:
    from revela_hub.interrupts import Interrupted

    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    out, whole = tmp_path / "out", tmp_path / "whole"
    with pytest.raises(Interrupted, match=r"checkpoint-3: resume with --resume_from_checkpoint last") as caught:
        run([*words, "--dataloader_num_workers", "0"], Signal(number, 2))
    assert caught.value.status == status
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert not (out / "encoder").exists()
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
def test_a_signal_to_one_process_ends_all_after_the_same_update(words: list[str], tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(_ONE_OF_TWO.format(tests=str(Path(__file__).parent), words=words))
    written = "".join(launch(str(script), processes=2))
    assert "SIGTERM: stopping after this step" in written
    checkpoint, passed = last_complete(tmp_path / "out")
    assert (checkpoint, passed) == (tmp_path / "out" / "checkpoint-3", []), written[-3000:]
    record = Record.read(checkpoint)
    assert record is not None and {"rng_state_0.pth", "rng_state_1.pth"} <= record.files.keys()


# --- the output folder


def test_a_used_output_folder_is_refused_unless_it_may_be_overwritten(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("not of a run")
    assert main(words) == 0
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "already contains a run (checkpoint-6)" in error and "--resume_from_checkpoint last" in error
    assert main([*words, "--overwrite", "true", "--max_steps", "2"]) == 0
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
    assert (out / "notes.txt").is_file()


def test_two_processes_do_not_train_into_one_folder(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / LOCK):
        assert main(words) == 2
    assert "is in use by another training process" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([*words, "--output_dir", str(tmp_path / "file" / "out")]) == 2
    assert "cannot write to --output_dir" in capsys.readouterr().err


# --- what it says


@pytest.mark.parametrize("warm_up", ["0.1", "100"])
def test_a_run_says_what_it_is_and_leaves_its_curve(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], warm_up: str
) -> None:
    words += ["--warmup_steps", warm_up]
    assert main(words) == 0
    captured = capsys.readouterr()
    printed = captured.out
    assert "it/s]" not in captured.err  # no bar of any library in what is no terminal
    assert "parameters, on cpu in float32; 6 steps of 4 rows, about " in printed and " tokens" in printed
    assert ("--warmup_steps 100 exceeds them, so the learning rate only reaches 6%" in printed) is (warm_up == "100")
    assert "s per step: about " in printed
    assert "step 3/6  loss " in printed and "tokens_per_second" in printed
    assert (tmp_path / "out" / TRAINING_CURVE).read_bytes().startswith(b"\x89PNG")
    assert main([*words, "--overwrite", "true", "--quiet", "true"]) == 0
    quiet = capsys.readouterr()
    assert quiet.out.strip().splitlines()[0].startswith("encoder: ") and "step " not in quiet.out


def test_the_speed_is_that_of_training(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second; preparing the run, and each evaluation, takes an hour."""
    seconds, trainers = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: seconds[0], time=time.time)
    monkeypatch.setattr("revela_hub.trainers.base.trainer.time", clock)
    settings = MethodTrainer.settings

    def prepared(self: MethodTrainer) -> dict[str, object]:
        seconds[0] += 3600
        trainers[:] = [self]
        return settings(self)

    def metrics(self: MethodTrainer, prefix: str) -> dict[str, float]:
        seconds[0] += 3600
        return {f"{prefix}_ndcg_at_10": 0.5}

    class Step(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            seconds[0] += 1
            trainers[0].evaluate()

    monkeypatch.setattr(MethodTrainer, "settings", prepared)
    monkeypatch.setattr(MethodTrainer, "_retrieval_metrics", metrics)
    run(words, Step())
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    speeds = [entry["tokens_per_second"] for entry in history if "loss" in entry]
    assert len(speeds) == 6 and min(speeds) > 10 and seconds[0] > 7 * 3600


@pytest.mark.parametrize("option", [("--max_steps", "0"), ("--num_train_epochs", "0", "--max_steps", "-1")])
def test_no_updates_train_nothing_and_say_so(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, ...]
) -> None:
    assert main([*words, *option]) == 0
    assert "nothing to train: --max_steps" in capsys.readouterr().out
    assert not (tmp_path / "out" / "encoder").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--seed", "-1"), "--seed: must be at least 0"),
        (("--learning_rate", "inf"), "--learning_rate: must be a finite number"),
        (("--num_train_epochs", "nan"), "--num_train_epochs: must be a finite number"),
        (("--per_device_train_batch_size", "0"), "--per_device_train_batch_size: must be at least 1"),
        (("--gradient_accumulation_steps", "0"), "--gradient_accumulation_steps: must be at least 1"),
        (("--adam_beta1", "1"), "--adam_beta1: must be"),
        (("--weight_decay", "-0.1"), "--weight_decay: must be at least 0"),
        (("--max_documents", "0"), "--max_documents: must be at least 1"),
        (("--max_length", "0"), "--max_length: must be at least 1"),
        (("--encoder_mask_ratio", "nan"), "--encoder_mask_ratio: must be a finite number"),
        (("--bag_of_words_weight", "-1"), "--bag_of_words_weight: must be at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_loaded(
    words: list[str], capsys: pytest.CaptureFixture[str], option: tuple[str, str], message: str
) -> None:
    assert main([*words, *option]) == 2
    assert message in capsys.readouterr().err
