"""The commands at the top of the recipes in examples/ run as they are printed, on tiny copies of their data sets and models."""

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from recipe_data import data_sets, local_files
from synthesis_server import Server
from test_pickles import pickle_weights

from revela_hub.cli.main import main
from revela_hub.data.mixture.tasks import parse_mixture

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUNS = [
    *(f"revela/{name}" for name in ("wikipedia", "code", "fineweb", "mixed")),
    *(f"revela/baselines/{name}-wikipedia" for name in ("contriever", "replug")),
    *(f"retromae/{name}" for name in ("pretrain", "pretrain_msmarco", "msmarco", "nq", "beir")),
    "cot-mote/pretrain cot-mote/finetune",
    "imprag/squad",
    "imprag/paper-3b imprag/paper-ra-it imprag/paper-ra-dit",
    "nvembed/paper",
    "nvembed/local",
    "quickstart/revela",
    "quickstart/adapt quickstart/pairs",
    "quickstart/training/general_retriever",
]
"""Recipes by name; those of one string run one after the other."""
TINY = "--max_steps 2 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --report_to none --save_strategy no --quiet"
PROMPTS = f"{TINY} --max_length 900 --bf16 false"
GROUPS = f"{TINY} --max_length 32 --max_words 12 --probe none --dataloader_num_workers 0"
MORE = {
    "train revela": f"{GROUPS} --total_groups_per_step 2 --retriever_start_step 0",
    "train contriever": f"{GROUPS} --max_words 24",
    "train replug": GROUPS,
    "train retromae": f"{TINY} --bf16 false --max_length 32 --probe none --dataloader_num_workers 0",
    "train cot-mote": f"{TINY} --bf16 false --max_length 32 --dataloader_num_workers 0",
    "train pairs": f"{TINY} --bf16 false --max_length 32 --probe none",
    "train imprag": f"{PROMPTS} --max_passage_length 60 --retrieval_layer 0 --last_reading_layer 1 --num_passages 2 --num_negatives 2"
    " --num_positives 2 --first_negative_rank 3 --last_negative_rank 6 --gradient_checkpointing false",
    "train ra-it": f"{PROMPTS} --num_passages 2 --gradient_checkpointing false",
    "train ra-dit": PROMPTS,
    "train nvembed": f"{TINY} --per_device_train_batch_size 4 --num_negatives 2 --max_length 192 --pooling mean --dtype float32"
    " --bf16 false --gradient_checkpointing false --probe none --lora_rank 4",
    "pseudo-queries": "--max_length 32 --max_new_tokens 6 --quiet",
    "mine": "--device cpu --quiet --positive_aware false",
    "index": "--device cpu --index_type exact --quiet",
    "evaluate": "--device cpu --quiet --num_passages 2",
    "synthesize": "--count 12",
}
"""What makes a command small, after its own options."""


def commands(recipe: str) -> Iterator[list[str]]:
    """The words of the commands at the top of a recipe."""
    command = ""
    for line in (EXAMPLES / f"{recipe}.yaml").read_text().splitlines():
        line = line.removeprefix("#   ")
        if command or re.match(r"(REVELA_HUB_DATA=\S+ )?(revela-hub|accelerate|python) ", line):
            command += f"{line}\n"
            try:
                words = shlex.split(command.replace("\\\n", " "))
            except ValueError:  # an open quotation
                continue
            if not line.endswith("\\"):
                yield words
                command = ""


def start(words: list[str]) -> None:
    """Run a command in this process."""
    if words[0] == "python":  # -c CODE > FILE
        with open(words[-1], "w") as file, redirect_stdout(file):
            exec(words[2], {})
        return
    first = next(n for n, word in enumerate(words) if word in ("revela-hub", "revela_hub"))
    command = words[first + 1 :]
    name = " ".join(command[: 1 + (command[0] == "train")])
    before = set(Path().glob("**/model*.safetensors"))
    shallow = "--retrieval_layer 0" if "--retrieval_layer" in command else ""
    assert main([*command, *f"{MORE[name]} {shallow}".split()]) == 0, words
    assert command[0] != "train" or set(Path().glob("**/model*.safetensors")) - before, words


@pytest.fixture(autouse=True)
def place(
    hub: LoopbackHub,
    tmp_path: Path,
    mlm_folder: Path,
    llama_folder: Path,
    t5_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """A folder with the files that the recipes read, and the Hub with what they download."""
    server = Server()
    monkeypatch.setitem(MORE, "synthesize", f"{MORE['synthesize']} --endpoint {server.url}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("REVELA_HUB_DATA", str(tmp_path / "local"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    data_sets(hub, (EXAMPLES / "nvembed" / "paper.yaml").read_text())
    local_files(tmp_path)
    models = {
        mlm_folder: "google-bert/bert-base-uncased facebook/contriever-msmarco",
        t5_folder: "castorini/doc2query-t5-base-msmarco",
        llama_folder: "meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-3B mistralai/Mistral-7B-v0.1 Qwen/Qwen3-0.6B-Base"
        " intfloat/e5-mistral-7b-instruct",
    }
    for folder, name in ((folder, name) for folder, names in models.items() for name in names.split()):
        hub.add(name, {path.name: path.read_bytes() for path in folder.iterdir()})
    for name in ("MODEL", "base_lm", "contrastive"):  # in the commands
        (tmp_path / name).symlink_to(llama_folder)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    hub.add("Shitao/RetroMAE", {path.name: path.read_bytes() for path in pickle_weights(mlm_folder).iterdir()})
    yield tmp_path
    server.close()


@pytest.mark.parametrize("run", RUNS)
def test_the_printed_commands_run(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    for recipe in run.split():
        found = [words for words in commands(recipe) if "--tasks" not in words]  # which need mteb's data
        assert found, recipe
        for words in found:
            start(
                [
                    re.sub("NAME", "ra-dit-llama", re.sub("^examples/quickstart/(lm|retriever)$", "MODEL", word))
                    for word in words
                ]
            )
    if run == "nvembed/paper":
        files = (Path("examples/nvembed/paper.yaml"), Path("outputs/nvembed-mined/mixture.yaml"))
        given, mined = map(parse_mixture, files)
        assert [(task.name, task.in_stages) for task in given] == [(task.name, task.in_stages) for task in mined]
        assert (
            sum("nvembed-mined" in task.source.path for task in mined) == 18
        )  # retrieval and similarity, not the synthetic
        settings = Path("outputs/nvembed-2/embedder/config_sentence_transformers.json")
        prompts = json.loads(settings.read_text())["prompts"]
        assert all(task.instruction in prompts[task.name] for task in given)


def test_every_recipe_is_run() -> None:
    named = " ".join(word for run in RUNS for recipe in run.split() for words in commands(recipe) for word in words)
    files = {str(file.relative_to(EXAMPLES).with_suffix("")) for file in EXAMPLES.glob("*/**/*.yaml")}
    assert {file for file in files if file not in " ".join(RUNS).split() and f"examples/{file}.yaml" not in named} == {
        "accelerate/fsdp"  # tests/trainers/revela/test_sharded.py
    }


def test_the_groups_of_revelas_authors_are_read(place: Path) -> None:
    own = "--data hf:trumancai/revela_training_corpus --groups_column text".split()
    start(["revela-hub", "train", "revela", "--config", "examples/revela/wikipedia.yaml", *own])


def test_a_cross_encoder_is_distilled(place: Path, monkeypatch: pytest.MonkeyPatch, retriever_folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("distill", EXAMPLES / "retromae" / "distill.py")
    assert spec is not None and spec.loader is not None
    distill = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(distill)
    start("revela-hub mine bm25 --beir data/beir/msmarco --num_negatives 2 --output mined.jsonl".split())
    for words in (
        "teacher google-bert/bert-base-uncased --pairs mined.jsonl --output teacher --max_steps 1",
        "score teacher --pairs mined.jsonl --output scored.jsonl",
        f"student {retriever_folder} --pairs scored.jsonl --output out --max_steps 1",
    ):
        monkeypatch.setattr(sys, "argv", ["distill.py", *words.split()])
        distill.main()
    rows = [json.loads(line) for line in (place / "scored.jsonl").read_text().splitlines()]
    assert all(len(row["label"]) == 3 for row in rows) and max(row["label"][0] for row in rows) != min(rows[0]["label"])
    assert (place / "out" / "retriever" / "modules.json").is_file()
