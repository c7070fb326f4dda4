"""Every command that trains: the same seed gives the same run, and a corpus to measure on is measured on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from revela_hub.cli.main import main

METHODS = ("revela", "retromae", "nvembed", "cot-mote", "cot-mote --stage finetune", "imprag")
Words = Callable[[str, str], list[str]]


@pytest.fixture
def words(tmp_path: Path, documents: Path, labelled_files: Path, llama_folder: Path, mlm_folder: Path) -> Words:
    """(method, name of the output folder) -> the command of a run of three updates, with everything that is drawn."""
    texts, files = documents, labelled_files
    pre = f"--per_device_train_batch_size 4 --encoder {mlm_folder} --max_length 40 --cache_dir {tmp_path / 'cache'}"
    options = {
        "revela": f"--data {texts} --retriever {llama_folder} --lm {llama_folder} --max_words 20 --group_size 4"
        f" --max_length 24 --temperature 0.1 --lora_rank 4 --lora_dropout 0.1 --cache_dir {tmp_path / 'cache'}"
        " --gradient_accumulation_steps 1",
        "retromae": f"--data {texts} {pre}",
        "nvembed": f"--backbone {llama_folder} --mixture {files / 'mixture.yaml'} --num_negatives 1 --max_length 96"
        " --in_batch_negatives true --num_latents 8 --num_heads 2 --lora_rank 4 --per_device_train_batch_size 4"
        f" --cache_dir {tmp_path / 'cache'} --query_instruction Place",
        "cot-mote": f"--data {texts} {pre} --gradient_accumulation_steps 1",
        "cot-mote --stage finetune": f"--pairs {files / 'pairs.jsonl'} --num_negatives 1 {pre}",
        "imprag": f"--backbone {llama_folder} --data {files / 'prompts.jsonl'} --corpus {texts} --max_words 12"
        " --retrieval_layer 0 --last_reading_layer 1 --num_passages 2 --max_passage_length 32 --max_length 64 --num_positives 1 --num_negatives 2 --first_negative_rank 2"
        " --last_negative_rank 6 --num_candidates 3 --per_device_train_batch_size 4",
    }
    common = "--max_steps 3 --save_strategy no --learning_rate 1e-3 --warmup_steps 0 --bf16 false --report_to none"

    def made(method: str, name: str) -> list[str]:
        return f"train {method} {options[method]} {common} --logging_steps 1 --output_dir {tmp_path / name}".split()

    return made


def losses(out: Path) -> list[float]:
    return [e["loss"] for e in json.loads((out / "trainer_state.json").read_text())["log_history"] if "loss" in e]


@pytest.mark.parametrize(
    "method", [m if m == "nvembed" else pytest.param(m, marks=pytest.mark.exhaustive) for m in METHODS]
)
def test_the_same_seed_gives_the_same_run_bit_for_bit(words: Words, tmp_path: Path, method: str) -> None:
    """Whatever was drawn in the process before: fresh decoders, pooling, adapters, masks, order, dropout."""
    for number, name in enumerate(("one", "other")):
        torch.manual_seed(number)
        assert main(words(method, name)) == 0
    assert main([*words(method, "seed"), "--seed", "7"]) == 0
    assert losses(tmp_path / "one") == losses(tmp_path / "other") != losses(tmp_path / "seed")
    files = sorted(file.relative_to(tmp_path / "one") for file in (tmp_path / "one").rglob("*.safetensors"))
    assert files
    for file in files:
        a, b = load_file(tmp_path / "one" / file), load_file(tmp_path / "other" / file)
        assert all(torch.equal(a[name], b[name]) for name in a), file
