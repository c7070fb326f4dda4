"""Every command that trains writes the same bytes whatever Python's hash seed is: weights, configurations, cards."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

pytestmark = pytest.mark.slow

TRAIN = "--max_steps 2 --save_strategy steps --save_steps 2 --learning_rate 1e-3 --warmup_steps 0 --bf16 false --report_to none"
TEXTS = "--data texts --cache_dir cache"
BATCH = "--per_device_train_batch_size 4"
READ = "--data prompts.jsonl --corpus texts --max_words 12 --max_passage_length 32 --max_length 96"
RUNS = {
    "revela": f"revela {TEXTS} --retriever llama --lm llama --max_words 20 --group_size 4 --max_length 24"
    " --temperature 0.1 --lora_rank 4 --lora_dropout 0.1 --gradient_accumulation_steps 1",
    "replug": f"replug {TEXTS} --retriever bert --lm llama --max_words 20 --group_size 4 --max_length 24",
    "contriever": f"contriever {TEXTS} {BATCH} --retriever bert",
    "retromae": f"retromae {TEXTS} {BATCH} --encoder bert --max_length 40",
    "cot-mote": f"cot-mote {TEXTS} {BATCH} --encoder bert --max_length 40 --gradient_accumulation_steps 1",
    "cot-mote-ft": f"cot-mote --stage finetune --pairs pairs.jsonl --num_negatives 1 {BATCH} --encoder cot-mote-out"
    " --max_length 40 --cache_dir cache --passage_flops_weight 0.01",
    "nvembed": f"nvembed --backbone llama --mixture mixture.yaml --num_negatives 1 --max_length 96 {BATCH}"
    " --in_batch_negatives true --num_latents 8 --num_heads 2 --lora_rank 4 --cache_dir cache --query_instruction P",
    "nvembed-2": f"nvembed --stage 2 --backbone nvembed-out --mixture mixture.yaml --num_negatives 1 --max_length 96"
    f" {BATCH} --cache_dir cache --query_instruction P --lora_rank 4",
    "imprag": f"imprag --backbone llama {READ} --retrieval_layer 0 --last_reading_layer 1 --num_passages 2 --num_positives 1 --num_negatives 2"
    f" --first_negative_rank 2 --last_negative_rank 6 --num_candidates 3 --lora_rank 4 {BATCH}",
    "ra-it": f"ra-it --backbone llama {READ} --num_passages 2 {BATCH}",
    "ra-dit": f"ra-dit --reader ra-it-out/model --retriever bert {READ} --num_candidates 3 --num_positives 1 {BATCH}",
    "ra-dit-llama": f"ra-dit --reader ra-it-out/model --backbone llama --retrieval_layer 0 {READ} --num_candidates 3"
    f" --num_positives 1 {BATCH}",
}
SAMPLE = ("revela", "nvembed", "imprag")
TIMES = ("trainer_state.json", "run.json")  # they say how long the run took
SCRIPT = """
import gc, json, os, sys, torch
from revela_hub.cli.main import main
torch.manual_seed(int(sys.argv[2]))  # what was drawn in the process before does not matter, either
for name, words in json.loads(sys.argv[1]).items():
    gc.freeze()  # garbage collections skip what has been imported
    assert main(["train", *words.split(), "--output_dir", name + "-out"]) == 0, name
"""


@pytest.fixture
def inputs(tmp_path: Path, llama_folder: Path, wordpiece_tokenizer: BertTokenizerFast) -> Path:
    """Texts, pairs, prompts and two models: what all the runs start from."""
    folder = tmp_path / "inputs"
    (folder / "texts").mkdir(parents=True)
    sentences = "The river carries sediment to the sea. A fox jumps over a dog. Paris is the capital of France. "
    for i in range(4):
        (folder / "texts" / f"{i}.txt").write_text(f"Document {i}. " + sentences * 6)
    rows = [{"anchor": f"Where is {i}?", "positive": f"{i} in Paris", "negative_1": f"{i} in Tokyo"} for i in range(16)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"question": f"Where does document {i % 4} lead?", "answers": ["to the sea"]} for i in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    task = {"name": "qa", "type": "pairs", "source": "pairs.jsonl", "instruction": "Find the place"}
    (folder / "mixture.yaml").write_text(yaml.safe_dump({"tasks": [task]}))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertForMaskedLM(BertConfig(vocab_size=len(wordpiece_tokenizer), **sizes)).save_pretrained(folder / "bert")
    wordpiece_tokenizer.save_pretrained(folder / "bert")
    (folder / "llama").symlink_to(llama_folder)
    return folder


def digests(folder: Path) -> dict[str, str]:
    """The hash of every file that the runs wrote into their output folders, without the time that a card gives."""
    files = sorted(file for file in folder.glob("*-out/**/*") if file.is_file() and file.name not in TIMES)
    texts = {file: re.sub(rb"(Trained for \d+ steps) in \d+ s on", rb"\1 on", file.read_bytes()) for file in files}
    return {str(file.relative_to(folder)): hashlib.sha256(text).hexdigest() for file, text in texts.items()}


@pytest.mark.parametrize("methods", [SAMPLE, pytest.param(tuple(RUNS), marks=pytest.mark.exhaustive)])
def test_every_method_writes_the_same_bytes_under_two_hash_seeds(
    methods: tuple[str, ...], inputs: Path, tmp_path: Path
) -> None:
    found = []
    # A new Python has its own hash seed, and a random one if it is not set, as in the fork server.
    runs = json.dumps({name: f"{RUNS[name]} {TRAIN}" for name in methods})
    for seed, interpreter, environment in (
        ("1", [sys.executable], os.environ | {"PYTHONHASHSEED": "1"}),
        ("2", [sys.executable], os.environ),
    ):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        for file in inputs.iterdir():
            (folder / file.name).symlink_to(file)
        done = subprocess.run(
            [*interpreter, "-c", SCRIPT, runs, seed],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        found.append(digests(folder))
    one, other = found
    assert {name.split("-out")[0] for name in one} == set(methods)
    assert [name for name in one if one[name] != other.get(name)] == [] and one.keys() == other.keys()
