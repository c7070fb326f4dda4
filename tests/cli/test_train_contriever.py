"""`train contriever`: a run on raw text that measures itself on a probe of that text."""

import json
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from revela_hub.cli.main import main
from revela_hub.data import read_beir

SHORT = ["--max_steps", "4", "--per_device_train_batch_size", "4", "--logging_steps", "1", "--report_to", "none"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = "quick brown fox jumps lazy dog rivers carry sediment from mountains to sea layer upon".split()

    def sentence(number: int) -> str:
        return " ".join(
            words[(number * (3 + 2 * i) + i * i) % len(words)] + f"{number % 7}" * (i % 2) for i in range(11)
        )

    rows = [
        {"_id": f"r{n}", "text": " ".join(f"{sentence(5 * n + part).capitalize()} {n}." for part in range(4))}
        for n in range(60)
    ]
    file = tmp_path / "text.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def test_the_run_says_what_it_was_worth(
    text: Path, retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    options = ["--data", str(text), "--retriever", str(retriever_folder), "--output_dir", str(output), *SHORT]
    options += ["--cache_dir", str(tmp_path / "cache"), "--learning_rate", "1e-6", "--quiet", "true"]
    assert main(["train", "contriever", *options]) == 0
    out = capsys.readouterr().out
    assert "base model " in out and "(" in out and "BM25 " in out and "hybrid (" in out
    assert "Training kept the base model" in out  # the steps are too small to change a rank
    task = read_beir(output / "probe")
    state = json.loads((output / "trainer_state.json").read_text())
    measured = [entry["step"] for entry in state["log_history"] if "eval_ndcg_at_10" in entry]
    assert measured == [0, 1, 2, 3]  # the run stops
    assert json.loads((output / "outcome.json").read_text())["curve"].keys() == {"0", "1", "2", "3"}
    card = (output / "retriever" / "README.md").read_text()
    assert (
        "the base model, unchanged" in card
        and "removed from the text" in card
        and "@article{izacard2021unsupervised,\n" in card
    )
    assert "base model" in card and "Trained for 3 steps" in card
    assert str(tmp_path) not in card.replace(str(output / "retriever"), "")  # the code loads this folder
    model = SentenceTransformer(str(output / "retriever"), device="cpu")
    assert model.encode_query(["a river"]).shape == (1, 32)
    # what the queries say was not trained on
    from datasets import Dataset

    [rows] = (tmp_path / "cache" / "revela_hub").glob("generator/*passages-*/*/*.arrow")
    trained = " ".join(" ".join(row["text"].split()) for row in Dataset.from_file(str(rows)))
    assert len(task.queries) >= 20 and not any(query in trained for query in task.queries.values())


def test_text_without_queries_is_trained_on_unmeasured(
    retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.jsonl").write_text('{"text": "Rivers carry sediment from the mountains down to the sea."}\n' * 9)
    output = tmp_path / "out"
    options = [
        "--data",
        str(tmp_path / "short.jsonl"),
        "--retriever",
        str(retriever_folder),
        "--output_dir",
        str(output),
    ]
    assert main(["train", "contriever", *options, *SHORT, "--cache_dir", str(tmp_path / "cache")]) == 0
    out = capsys.readouterr().out
    assert "no evaluation: the text has 0 candidate queries" in out and (output / "retriever").is_dir()
    large = ["--dataloader_drop_last", "true", "--per_device_train_batch_size", "64", "--overwrite", "true"]
    assert main(["train", "contriever", *options, *SHORT, *large]) == 2
    assert "no training steps: " in capsys.readouterr().err
