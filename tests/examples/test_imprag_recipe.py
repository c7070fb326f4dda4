"""The recipe of ImpRAG's paper starts, trains and exports, from tiny copies of its data sets with the same columns."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from revela_hub.cli.main import main

TEXT = "The river Dart flows past the town Dartford. The river Esk rises in the hills of Eskdale, and reaches the sea."
QUESTION = {"context": TEXT, "question": "Where is the Dart?", "answers": {"text": ["Dartford"], "answer_start": [31]}}
KILT = {"input": "Where is the Esk?", "output": [{"answer": "Eskdale", "meta": {"score": 0}, "provenance": []}]}
ROWS: dict[str, dict[str, Any]] = {
    "google-research-datasets/nq_open": {"question": "where is the dart", "answer": ["Dartford"]},
    "facebook/kilt_tasks": KILT,
    "stanfordnlp/coqa": {
        "source": "wikipedia",
        "story": TEXT,
        "questions": ["Which river?", "Where?"],
        "answers": {"input_text": ["the Dart", "Dartford"], "answer_start": [4, 31], "answer_end": [8, 39]},
    },
    "ucinlp/drop": {"passage": TEXT, "question": "How many rivers?", "answers_spans": {"spans": ["2"], "types": ["n"]}},
    "lucadiliello/newsqa": {"context": TEXT, "question": "Where is the Dart?", "answers": ["Dartford"], "key": "a"},
    "qiaojin/PubMedQA": {
        "pubid": 1,
        "question": "Do rivers flow?",
        "context": {"contexts": [TEXT, "They do."], "labels": ["METHODS", "RESULTS"]},
        "final_decision": "yes",
    },
    "textmachinelab/quail": {
        "context": TEXT,
        "question": "Where does it rise?",
        "answers": ["in the sea", "in the hills"],
        "correct_answer_id": 1,
    },
    "rajpurkar/squad": QUESTION | {"id": "1", "title": "Dart"},
    "abisee/cnn_dailymail": {"article": TEXT, "highlights": "Rivers flow.", "id": "1"},
}
TURNS = [
    ("a", None, "Hi", "prompter", "en"),
    ("b", "a", "Hello", "assistant", "en"),
    ("c", "a", "Hallo", "assistant", "de"),
]
SMALL = (
    "--retrieval_layer 0 --last_reading_layer 1 --num_passages 2 --max_passage_length 60 --max_length 900 --max_words 40"
    " --first_negative_rank 3 --last_negative_rank 6 --num_positives 2 --num_negatives 2 --per_device_train_batch_size 2"
    " --pseudo_labels bm25 --bf16 false --gradient_checkpointing false --max_steps 2 --report_to none --quiet true"
)


def test_the_recipe_of_the_paper(
    tmp_path: Path, repository: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = repository / "examples" / "imprag" / "paper-3b.yaml"
    sources = yaml.safe_load(recipe.read_text())["data"]
    assert (
        yaml.safe_load(recipe.with_name("paper-ra-it.yaml").read_text())["data"] == sources
    )  # the baseline's are the same
    names = ("message_id", "parent_id", "text", "role", "lang")
    messages = [dict(zip(names, turn, strict=True)) for turn in TURNS]
    for source in sources:
        name, configuration, *_ = [*source["path"].removeprefix("hf:").split(":"), "default"]
        folder = tmp_path / name
        folder.mkdir(parents=True)
        rows = messages if name == "OpenAssistant/oasst1" else [ROWS[name]] * 3
        (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        card = {"configs": [{"config_name": configuration, "data_files": [{"split": "train", "path": "train.jsonl"}]}]}
        (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    passages = [{"id": str(n), "title": f"Esk {n}", "section": "Course", "text": f"{TEXT} Part {n}."} for n in range(9)]
    (tmp_path / "wiki.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in passages))
    monkeypatch.chdir(tmp_path)
    own = ["--config", str(recipe), "--backbone", str(llama_folder), "--corpus", "wiki.jsonl", "--output_dir", "out"]
    assert main(["train", "imprag", *own, *SMALL.split()]) == 0
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
