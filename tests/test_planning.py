"""`train METHOD --plan`: what a run needs, without a GPU and without weights."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from tiny_runs import commands
from transformers import MistralConfig

from revela_hub.cli.main import COMMANDS, main, parser_of
from revela_hub.planning.fake_gpu import Meter, fake_gpu
from revela_hub.planning.plan import Needs, measure, record

GIB = 2**30


def needs_of(words: list[str]) -> Needs:
    name = " ".join(words[:2])
    values = parser_of(name).read(words[2:])
    assert values is not None
    return measure(importlib.import_module(COMMANDS[name].module), values)


def test_memory_is_that_of_a_hand_computed_step() -> None:
    rows, narrow, wide, outputs = 128, 256, 1024, 128
    first, second, hidden = narrow * wide, wide * outputs, rows * wide
    with fake_gpu() as meter:
        layers = torch.nn.Linear(narrow, wide, bias=False), torch.nn.Linear(wide, outputs, bias=False)
        inputs = torch.zeros(rows, narrow)
        start = meter.now
        assert start == 4 * (first + second + rows * narrow)
        with torch.autocast("cuda", torch.bfloat16):
            states = layers[0](inputs).view(rows, 2, -1).flatten(1).t().t()  # views take nothing
            loss = layers[1](torch.nn.functional.dropout(states, 0.5)).sum(dtype=torch.bfloat16)
            # In half precision: both weights, the inputs, the hidden states before and after dropout; and a byte of its mask.
            kept = 2 * (first + second + rows * narrow + 2 * hidden) + hidden
            assert meter.now == start + kept + 512  # the allocator's smallest block
            assert meter.peak == meter.now + 2 * rows * outputs
        del states  # not needed for gradients; nor is the first weight, as the inputs get none
        assert meter.now == start + kept - 2 * (hidden + first) + 512
        loss.backward()
        assert meter.now == start + 4 * (first + second) + 512
        # The last gradient is that of the first weight, in half precision and in float32; and there is that of the loss.
        assert meter.peak == start + 4 * (first + second) + 2 * first + 2 * 512


def test_weights_gradients_and_states_are_those_of_the_run(tmp_path: Path) -> None:
    words = commands(tmp_path)["retromae"]
    planned = needs_of(words)
    module = importlib.import_module(COMMANDS["train retromae"].module)
    values = parser_of("train retromae").read([*words[2:], "--output_dir", str(tmp_path / "run"), "--probe", "none"])
    arguments = module.Arguments(**(values or {}), max_steps=1)
    needs = record(module, arguments, Meter())
    for name in ("parameters", "trained", "weights", "gradients", "states"):
        assert getattr(planned, name) == getattr(needs, name), name
    assert planned.peak > planned.weights + planned.gradients + planned.states


def test_the_command_prints_it_with_the_configuration_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = commands(tmp_path)["pair_tuning"]
    for file in (tmp_path / "bert").iterdir():
        if file.name != "config.json":
            file.unlink()
    assert main([*words, "--plan", "--output_dir", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\| 8 \| 1 \| 32 \| 3 \|", printed)  # 32 pairs, 3 epochs, 8 GPUs of 4 pairs
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_reached_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word if word != str(tmp_path / "bert") else "nobody/nothing" for word in commands(tmp_path)["retromae"]]
    assert main([*words, "--plan"]) == 2
    assert "nobody/nothing" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["revela", "nvembed", "cot_mote", "imprag", "contriever", "replug", "ra_it", "ra_dit"]
)
def test_every_method_can_be_planned(method: str, tmp_path: Path) -> None:
    needs = needs_of(commands(tmp_path)[method])
    assert needs.peak > needs.weights + needs.gradients + needs.states
    assert needs.flops


@pytest.mark.exhaustive
def test_nv_embed_7b_fits_on_48_gb(tmp_path: Path) -> None:
    MistralConfig(architectures=["MistralForCausalLM"], dtype=torch.bfloat16).save_pretrained(tmp_path)
    recipe = Path(__file__).parents[1] / "examples" / "nvembed" / "stage_one.yaml"
    needs = needs_of(["train", "nvembed", "--config", str(recipe), "--backbone", str(tmp_path)])
    together = needs.weights + needs.gradients + needs.states
    assert needs.weights / GIB == pytest.approx(16.2, rel=0.05)
    assert together / GIB == pytest.approx(25.2, rel=0.05)
    # An earlier computation, 37.5, had dropout masks of four bytes per number; GPUs keep one.
    assert needs.peak / GIB == pytest.approx(36.4, rel=0.02)
