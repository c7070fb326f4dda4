"""`revela-hub train nvembed` as a user runs it: a mixture in, a sentence-transformers folder out, and mistakes reported."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from processes import reader
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from revela_hub.cli.main import main
from revela_hub.data.sources.beir import RetrievalTask, read_beir, write_beir
from revela_hub.trainers.nvembed import command as train_nvembed

ANIMALS, PLACES = ("fox", "dog", "cat", "owl"), ("Paris", "Tokyo", "river", "sea")
QUERY = "Instruct: Find the place\nQuery: "


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A retrieval task for both stages, and a classification task for the second."""
    qa = [
        {"anchor": f"Where is the {animal} {at}?", "positive": f"The {animal} {at} is in {PLACES[at]}"}
        for animal in ANIMALS
        for at in range(4)
    ]
    classes = [{"text": f"a {animal} jumps over {at}", "label": animal} for animal in ANIMALS for at in range(3)]
    for name, rows in (("qa", qa), ("animals", classes)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks: list[dict[str, Any]] = [
        {"name": "qa", "type": "pairs", "source": str(tmp_path / "qa.jsonl"), "instruction": "Find the place"},
        {
            "name": "animals",
            "type": "classification",
            "source": str(tmp_path / "animals.jsonl"),
            "instruction": "Find the same animal",
        },
    ]
    file = tmp_path / "mixture.yaml"
    file.write_text(yaml.safe_dump({"tasks": tasks}))
    return file


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    corpus = {f"d{at}": f"The {animal} is in {PLACES[at]}" for at, animal in enumerate(ANIMALS)}
    task = RetrievalTask(corpus, {"q": "Where is the fox?"}, {"q": {"d0": 1}}, "tiny")
    return write_beir(task, tmp_path / "beir")


def words(backbone: Path, mixture: Path, out: Path, stage: int | None, *more: str) -> list[str]:
    options = {
        "--backbone": backbone, "--mixture": mixture, "--output_dir": out, "--num_negatives": 2, "--max_length": 48,
        "--temperature": 0.1, "--lora_rank": 4, "--max_steps": 4, "--save_steps": 2, "--warmup_steps": 1,
        "--per_device_train_batch_size": 4, "--cache_dir": out.parent / "cache", "--report_to": "none",
        "--disable_tqdm": "true", "--logging_steps": 1, "--bf16": "false", "--query_instruction": "Find the place",
    }  # fmt: skip
    if stage is not None:
        options["--stage"] = stage
    if stage == 1:
        options |= {"--num_latents": 8, "--num_heads": 2}
    return ["train", "nvembed", *(str(word) for pair in options.items() for word in pair), *more]


def test_two_stages_give_an_embedder_that_needs_no_package_of_ours(
    tmp_path: Path, llama_folder: Path, mixture: Path, beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    bf16 = ("--dtype", "bfloat16", "--bf16", "true", "--learning_rate", "1e-2")
    assert main(words(llama_folder, mixture, one, 1, *bf16, "--eval_corpus", str(beir))) == 0
    printed = capsys.readouterr().out
    assert "16 rows of 1 task" in printed
    assert "before training  eval_ndcg_at_10" in printed and printed.count("eval_ndcg_at_10") > 1
    assert "embedder:" in printed
    stored = load_file(one / "embedder" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    assert not any("lora" in name for name in stored)

    assert main(words(one, mixture, two, 2, "--lora_rank", "0")) == 0
    assert "28 rows of 2 tasks" in capsys.readouterr().out
    started = load_file(two / "embedder" / "model.safetensors")["latent_attention_model.latents"]
    assert 0 < (started - stored["latent_attention_model.latents"].float()).abs().max() < 1e-3  # went on from there
    texts = ["The river.", "", "word " * 300, "Москва и 東京"]
    here = SentenceTransformer(str(two / "embedder"), trust_remote_code=True, device="cpu")
    torch.save({"texts": texts, "vectors": here.encode_query(texts, convert_to_tensor=True)}, tmp_path / "expected.pt")
    code = f"""
import sys; sys.modules["revela_hub"] = None; sys.modules["peft"] = None
import torch
from sentence_transformers import SentenceTransformer
saved = torch.load({str(tmp_path / "expected.pt")!r})
model = SentenceTransformer({str(two / "embedder")!r}, trust_remote_code=True, device="cpu")
assert model.max_seq_length == 48, model.max_seq_length
assert model.prompts["query"] == model.prompts["qa"] == {QUERY!r}, model.prompts
assert "Find the same animal" in model.prompts["animals"], model.prompts
torch.testing.assert_close(model.encode_query(saved["texts"], convert_to_tensor=True), saved["vectors"])
"""
    done = subprocess.run(reader(code), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for folder in (one, two):
        for file in (folder / "card.yaml", *(folder / "embedder").rglob("*.json"), folder / "embedder" / "README.md"):
            assert str(tmp_path) not in file.read_text(), file
    config = yaml.safe_load(yaml.safe_load((two / "card.yaml").read_text())["config"])
    assert config["stage"] == 2 and config["in_batch_negatives"] is False and config["learning_rate"] == 1.5e-5
    assert "2405.17428" in (two / "embedder" / "README.md").read_text()


def test_questions_that_are_not_trained_on_say_whether_it_helped(
    tmp_path: Path, llama_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"anchor": f"where is the {animal} {n}?", "positive": f"The {animal} {n} sits at place {n * 7} of {animal}s"}
        for animal in ANIMALS
        for n in range(60)
    ]
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "mixture.yaml"
    task = {"name": "qa", "type": "pairs", "source": str(tmp_path / "qa.jsonl"), "instruction": "Find the place"}
    file.write_text(yaml.safe_dump({"tasks": [task]}))
    out = tmp_path / "out"
    assert main(words(llama_folder, file, out, 1, "--learning_rate", "1e-2", "--probe_passages", "40")) == 0
    printed = capsys.readouterr().out
    assert "held out for evaluation: 24 queries with 40 passages" in printed
    assert "Training " in printed and "95% interval" in printed and "BM25 " in printed
    task_made = read_beir(out / "probe")
    trained = json.loads((out / "trainer_state.json").read_text())
    measured = sorted({e["step"] for e in trained["log_history"] if "eval_ndcg_at_10" in e})
    assert measured in ([0, 1, 2, 3], [0, 1, 2, 3, 4])  # two evaluations significantly below the first one end the run
    assert set(task_made.queries.values()) < {row["anchor"] for row in rows}
    outcome = json.loads((out / "outcome.json").read_text())
    assert outcome["difference"]["verdict"] != "worse" or outcome["step"] == 0
    card = (out / "embedder" / "README.md").read_text()
    assert "\n216 of 240 rows of 1 task\n" in card
    assert "base model" in card and "held-out pairs" in card


@pytest.mark.parametrize(
    ("stage", "expected"), [(1, (True, 2e-5)), (2, (False, 1.5e-5)), (None, (False, 2e-5))], ids=str
)
def test_the_stage_decides_defaults(tmp_path: Path, stage: Any, expected: tuple[bool, float]) -> None:
    common = {"backbone": "b", "mixture": "m", "output_dir": str(tmp_path), "stage": stage, "bf16": False}
    arguments = train_nvembed.Arguments(**common, **({} if stage else {"in_batch_negatives": False}))
    assert (arguments.in_batch_negatives, arguments.learning_rate) == expected
    other = train_nvembed.Arguments(**common, in_batch_negatives=True, learning_rate=0.1)
    assert (other.in_batch_negatives, other.learning_rate) == (True, 0.1)


@pytest.mark.parametrize("name", ["stage_one", "stage_two"])
def test_the_papers_configurations_are_read(tmp_path: Path, repository: Path, name: str) -> None:
    from parsed_arguments import parse_arguments

    file = repository / "examples" / "nvembed" / f"{name}.yaml"
    words = ["--config", str(file), "--output_dir", str(tmp_path)]
    read = parse_arguments(train_nvembed.Arguments, words)
    assert read is not None
    assert read.in_batch_negatives == (name == "stage_one")
    assert 8 * read.per_device_train_batch_size == 128
    default = train_nvembed.Arguments(backbone="b", mixture="m", output_dir=str(tmp_path), stage=read.stage)
    for setting in ("learning_rate", "lora_rank", "lora_alpha", "lora_dropout", "temperature", "warmup_steps",
                    "weight_decay", "num_negatives", "max_length", "lr_scheduler_type"):  # fmt: skip
        assert getattr(read, setting) == getattr(default, setting), setting  # the defaults are the paper's, too


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--backbone", "nowhere/model"], "nowhere/model"),
        (["--dtype", "bfloat16", "--lora_rank", "0"], "--dtype bfloat16 is for LoRA"),
        (["--max_length", "4096"], "2048 positions"),
        (["--max_length", "8"], "leaves no room"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(
    tmp_path: Path, llama_folder: Path, mixture: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(words(llama_folder, mixture, tmp_path / "out", 1, *more)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("revela-hub: error:") and message in error


def test_a_trained_model_keeps_its_pooling(
    tmp_path: Path, llama_folder: Path, mixture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(words(llama_folder, mixture, out, 1, "--max_steps", "1", "--pooling", "mean")) == 0
    assert main(words(out, mixture, tmp_path / "two", 2, "--pooling", "latent")) == 2
    assert "is an NV-Embed model with pooling=mean" in capsys.readouterr().err
