"""Commands that start from a GGUF file: the same run as from the folder with the same weights, and no path in the card."""

import json
from pathlib import Path

import pytest
import yaml

from revela_hub.cli.main import main

COMMON = "--max_steps 2 --save_strategy no --learning_rate 1e-3 --warmup_steps 0 --bf16 false --report_to none --logging_steps 1"
TEXT = "--data {t} --max_words 20 --max_length 24 --cache_dir {c}"
QUESTIONS = (
    "--data {p} --corpus {t} --max_words 12 --max_passage_length 32 --max_length 64 --per_device_train_batch_size 4"
    " --gradient_accumulation_steps 1"
)
OPTIONS = {
    "revela": f"{TEXT} --retriever {{m}} --lm {{m}} --group_size 4 --temperature 0.1 --lora_rank 4"
    " --gradient_accumulation_steps 1",
    "replug": f"{TEXT} --retriever {{m}} --lm {{m}} --group_size 4 --gradient_accumulation_steps 1",
    "nvembed": "--backbone {m} --mixture {x} --num_negatives 1 --max_length 96 --num_latents 8 --num_heads 2 --lora_rank 4"
    " --per_device_train_batch_size 4 --cache_dir {c} --query_instruction Place --in_batch_negatives true --gradient_accumulation_steps 1",
    "imprag": f"{QUESTIONS} --backbone {{m}} --retrieval_layer 0 --last_reading_layer 1 --num_passages 2 --num_positives 1"
    " --num_negatives 2 --first_negative_rank 2 --last_negative_rank 6 --num_candidates 3",
    "ra-dit": f"{QUESTIONS} --backbone {{m}} --reader {{m}} --retrieval_layer 0 --num_candidates 3",
}


@pytest.fixture
def places(tmp_path: Path, documents: Path, labelled_files: Path) -> dict[str, Path]:
    """The files that the options name."""
    files = {"p": labelled_files / "prompts.jsonl", "x": labelled_files / "mixture.yaml"}
    return files | {"t": documents, "c": tmp_path / "cache"}


def losses(out: Path) -> list[float]:
    state = json.loads((out / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.mark.parametrize(
    "method", [m if m in ("nvembed", "ra-dit") else pytest.param(m, marks=pytest.mark.exhaustive) for m in OPTIONS]
)
def test_it_trains_as_the_folder_does(
    method: str, places: dict[str, Path], gguf_file: Path, llama_folder: Path, tmp_path: Path
) -> None:
    for model, name in ((llama_folder, "folder"), (gguf_file, "gguf")):
        options = f"{OPTIONS[method].format(m=model, **places)} {COMMON} --output_dir {tmp_path / name}"
        assert main(["train", method, *options.split()]) == 0
    assert losses(tmp_path / "gguf") == pytest.approx(losses(tmp_path / "folder"), rel=1e-6)
    cards = [file for file in (tmp_path / "gguf").rglob("*") if file.name in ("README.md", "card.yaml")]
    said = [card.read_text(encoding="utf-8") for card in cards]
    assert sum(gguf_file.name in text for text in said) >= 2  # card.yaml and the card of the exported model
    assert not any(str(tmp_path) in text or "revela-hub/gguf" in text for text in said)


def test_adapters_resume_and_are_exported(
    places: dict[str, Path], gguf_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"train revela {OPTIONS['revela'].format(m=gguf_file, **places)} {COMMON}".replace("strategy no", "steps 2")
    assert main([*words.split(), "--output_dir", str(tmp_path / "out")]) == 0
    longer = words.replace("max_steps 2", "max_steps 4").split()
    assert main([*longer, "--output_dir", str(tmp_path / "out"), "--resume_from_checkpoint", "last"]) == 0
    assert [file.name for file in (tmp_path / "out").glob("checkpoint-*")] != []
    checkpoint = tmp_path / "out" / "checkpoint-4"
    assert main(["export", str(checkpoint), "--output_dir", str(tmp_path / "exported")]) == 0
    assert main(["check", str(tmp_path / "exported" / "retriever")]) == 0, capsys.readouterr().out


def test_a_yaml_file_and_an_encoder(
    places: dict[str, Path], gguf_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {
        "retriever": str(gguf_file),
        "data": [str(places["t"])],
        "max_steps": 0,
        "output_dir": str(tmp_path / "o"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", "contriever", "--config", str(tmp_path / "recipe.yaml")]) == 0
    capsys.readouterr()
    options = f"--encoder {gguf_file} --data {places['t']} --output_dir {tmp_path / 'encoder'}"
    assert main(["train", "retromae", *options.split()]) == 2
    assert "is not an encoder" in capsys.readouterr().err
