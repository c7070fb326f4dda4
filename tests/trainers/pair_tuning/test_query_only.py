"""`--query_only`: documents are encoded by the base model, bit for bit, and its index stays valid."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from revela_hub.cli.main import main
from revela_hub.trainers.pair_tuning.query_route import with_query_route
from revela_hub.trainers.pair_tuning.trainer import PairsTrainer, PairsTrainingArguments

WORDS = "the quick brown fox jumps over a lazy dog and rivers carry sediment from mountains to the sea".split()
TEXTS = ["a river carries sediment", "the dog jumps over the quick brown fox"]


def pairs(number: int = 16) -> Dataset:
    def text(n: int, size: int) -> str:
        return " ".join(WORDS[(5 * n + 3 * i) % len(WORDS)] for i in range(size)) + f" {n}"

    return Dataset.from_dict(
        {"anchor": [text(n, 4) for n in range(number)], "positive": [text(n, 12) for n in range(number)]}
    )


def trainer(folder: Path, retriever: Path, **options: Any) -> PairsTrainer:
    given = {"per_device_train_batch_size": 4, "max_steps": 4, "report_to": [], "quiet": True, "learning_rate": 1e-3}
    args = PairsTrainingArguments(
        output_dir=str(folder), query_only=True, **(given | {"save_strategy": "no"} | options)
    )
    return PairsTrainer(str(retriever), args, train_dataset=pairs())


def loaded(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("rank", [0, 4])
def test_only_queries_change(rank: int, retriever_folder: Path, tmp_path: Path) -> None:
    run = trainer(tmp_path, retriever_folder, lora_rank=rank, mini_batch_size=2)
    run.train()
    tuned, base = loaded(run.write_models(tmp_path)[0]), loaded(retriever_folder)
    assert np.array_equal(tuned.encode_document(TEXTS), base.encode_document(TEXTS))
    assert not np.allclose(tuned.encode_query(TEXTS), base.encode_query(TEXTS), atol=1e-4)
    assert tuned.prompts == base.prompts
    with pytest.raises(ValueError, match="route"):  # encode() cannot choose
        tuned.encode(TEXTS)


def test_a_model_with_both_routes_is_trained_further(retriever_folder: Path, tmp_path: Path) -> None:
    first = trainer(tmp_path / "first", retriever_folder)
    first.train()
    folder = first.write_models(tmp_path / "first")[0]
    second = trainer(tmp_path / "second", folder)
    given = loaded(retriever_folder)
    with_query_route(given)
    assert all(parameter.requires_grad for parameter in given.parameters())
    second.train()
    tuned = loaded(second.write_models(tmp_path / "second")[0])
    assert np.array_equal(tuned.encode_document(TEXTS), loaded(retriever_folder).encode_document(TEXTS))
    assert second.documents == first.documents


def test_search_accepts_the_index_of_the_base_model(
    retriever_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.jsonl").write_text(
        "".join(json.dumps({"_id": str(n), "text": text}) + "\n" for n, text in enumerate(TEXTS))
    )
    rows = pairs()
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["index", str(retriever_folder), "--corpus", "corpus.jsonl", "--output_dir", "index"]) == 0
    words = ["train", "pairs", "--pairs", "pairs.jsonl", "--retriever", str(retriever_folder), "--output_dir", "tuned"]
    limits = "--max_steps 2 --per_device_train_batch_size 4 --max_length 16 --probe none --quiet".split()
    assert main([*words, "--query_only", "true", *limits]) == 0
    tuned = loaded(Path("tuned/retriever"))
    assert [modules[0].max_seq_length for modules in tuned[0].sub_modules.values()][0] == 16
    assert np.array_equal(
        tuned.encode_document([" ".join(WORDS * 3)]), loaded(retriever_folder).encode_document([" ".join(WORDS * 3)])
    )
    capsys.readouterr()
    assert main(["search", "tuned/retriever", "a river", "--index", "index"]) == 0
    assert "1. " in capsys.readouterr().out
    assert main([*words[:-1], "whole", *limits]) == 0
    assert main(["search", "whole/retriever", "a river", "--index", "index"]) == 2
    assert "built with tiny-retriever" in capsys.readouterr().err
