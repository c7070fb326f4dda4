"""`revela-hub pseudo-queries` as a user runs it, and the training that reads its files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from transformers import BertTokenizerFast

from revela_hub.cli.main import main
from revela_hub.trainers import CoTMoTECollator, CoTMoTETrainer, CoTMoTETrainingArguments


@pytest.fixture
def words(tmp_path: Path, texts: list[str], mlm_folder: Path, t5_folder: Path) -> list[str]:
    """The command, with a tiny T5 and three documents of eight sentences."""
    documents = tmp_path / "documents.jsonl"
    rows = [{"text": " ".join(texts[n:4] + texts[:4])} for n in range(3)]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"--data": documents, "--encoder": mlm_folder, "--max_length": 26, "--queries_per_span": 2}
    options |= {"--max_new_tokens": 6, "--batch_tokens": 60}
    return [
        "pseudo-queries",
        str(tmp_path / "t5"),
        *(str(word) for pair in options.items() for word in pair),
        "--quiet",
    ]


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def test_shards_hold_the_spans_of_the_whole_and_resume(words: list[str], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*words, "--output_dir", str(whole)]) == 0
    for shard in ("0/2", "1/2"):
        assert main([*words, "--output_dir", str(parts), "--shard", shard]) == 0
    key = json.dumps
    spans = [{**row, "queries": None} for row in read(whole)]
    assert sorted(map(key, spans)) == sorted(key({**row, "queries": None}) for row in read(parts))
    assert "The quick brown fox" in spans[0]["text"], "the original text, not the tokens of an uncased model"
    assert all(len(row["queries"]) <= 2 for row in read(whole)) and any(row["queries"] for row in read(whole))
    [file] = whole.glob("*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.unlink()
    file.with_suffix(".jsonl.part").write_bytes(b"".join(lines[:3]) + lines[3][:9])  # a killed process
    assert main([*words, "--output_dir", str(whole)]) == 0
    assert [{**row, "queries": None} for row in read(whole)] == spans
    assert file.read_bytes().splitlines(keepends=True)[:3] == lines[:3]


def test_other_settings_need_another_folder(words: list[str], tmp_path: Path) -> None:
    assert main([*words, "--output_dir", str(tmp_path / "out")]) == 0
    with FileLock(tmp_path / "out" / ".00000-of-00001.jsonl.lock"):  # by another process
        assert main([*words, "--output_dir", str(tmp_path / "out")]) != 0
    assert main([*words, "--output_dir", str(tmp_path / "out"), "--seed", "1"]) == 2
    with (tmp_path / "documents.jsonl").open("a") as documents:
        documents.write('{"text": "Another document."}\n')
    assert main([*words, "--output_dir", str(tmp_path / "out")]) == 2


def test_pre_training_needs_all_shards(words: list[str], tmp_path: Path, mlm_folder: Path, capsys: Any) -> None:
    assert main([*words, "--output_dir", str(tmp_path / "queries")]) == 0
    (tmp_path / "queries" / "00000-of-00001.jsonl").rename(tmp_path / "queries" / "00000-of-00002.jsonl")
    train = f"--pseudo_queries {tmp_path}/queries --encoder {mlm_folder} --output_dir {tmp_path}/run --max_length 26"
    assert main(["train", "cot-mote", *train.split(), "--bf16", "false"]) == 2
    assert "1 of 2 shards are complete" in capsys.readouterr().err


def test_each_epoch_draws_a_query_and_a_direction(wordpiece_tokenizer: BertTokenizerFast, texts: list[str]) -> None:
    rows = [{"text": texts[0], "queries": [texts[1], texts[2]]}]
    collator, seen = CoTMoTECollator(wordpiece_tokenizer), set()
    for epoch in range(40):
        collator.epoch = epoch
        batch = collator(rows)
        ids = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])[0]
        read, decoded = (
            wordpiece_tokenizer.decode(each, skip_special_tokens=True) for each in (ids, batch["decoder_input_ids"][0])
        )
        seen.add((int(batch["expert"]), read, decoded))
    assert collator([{"text": texts[0], "queries": ["\u200b"]}])["expert"].shape == (1,)  # a query without tokens
    text, *queries = (
        wordpiece_tokenizer.decode(wordpiece_tokenizer(each)["input_ids"], skip_special_tokens=True)
        for each in texts[:3]
    )
    assert seen == {(1, text, query) for query in queries} | {(0, query, text) for query in queries}


def test_rows_of_the_hub_are_trained_on_in_python(tmp_path: Path, mlm_folder: Path, texts: list[str]) -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"text": texts[:4], "queries": [[text[:20]] for text in texts[:4]]})
    options = {"max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "report_to": "none"}
    arguments = CoTMoTETrainingArguments(str(tmp_path), bf16=False, save_strategy="no", **options)
    trainer = CoTMoTETrainer(str(mlm_folder), arguments, train_dataset=rows, max_length=20)
    trainer.train()
    assert trainer.state.global_step == 1
