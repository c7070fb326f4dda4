"""`revela-hub evaluate`, through the command line."""

import json
from pathlib import Path

import pytest

from revela_hub.cli.main import main

DOCUMENTS = ["rivers carry sediment", "the capital of France", "a lazy dog", "width and height"]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    folder = tmp_path / "task"
    (folder / "qrels").mkdir(parents=True)
    corpus = [json.dumps({"_id": f"d{number}", "text": text}) for number, text in enumerate(DOCUMENTS)]
    (folder / "corpus.jsonl").write_text("\n".join(corpus))
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "sediment in rivers"}')
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td0\t1\n")
    return folder


def test_prints_a_table_of_the_models(task: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "bm25", str(retriever_folder), "--corpus", str(task), "--device", "cpu"]) == 0
    title, header, bm25, ours = capsys.readouterr().out.splitlines()
    assert title == "task/test: 1 queries, 4 documents"
    assert header.split() == ["model", "nDCG@10", "MRR@10", "Recall@100"]
    assert bm25.split() == ["bm25", "1.0000", "1.0000", "1.0000"]
    assert ours.split()[0] == str(retriever_folder)
    assert len({len(line) for line in (header, bm25, ours)}) == 1  # aligned


def test_prints_nothing_but_json(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "bm25", "--corpus", str(task), "--json"]) == 0
    [record] = json.loads(capsys.readouterr().out)
    assert record == {
        "model": "bm25",
        "name": "task/test",
        "ndcg_at_10": 1.0,
        "mrr_at_10": 1.0,
        "recall_at_100": 1.0,
        "queries": 1,
        "documents": 4,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bm25"], "give either --corpus BEIR_FOLDER or --tasks NAME"),
        (["bm25", "--corpus", "{task}", "--tasks", "SciFact"], "give either"),
        (["bm25", "--corpus", "{task}", "--split", "dev"], "no split 'dev'"),
        (["bm25", "--corpus", "{task}", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["./nowhere", "--corpus", "{task}"], "./nowhere is not a folder"),
        (["bm25", "--tasks", "NoSuchTask"], "no task or benchmark 'NoSuchTask'"),
    ],
)
def test_mistakes_are_one_line(task: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--tasks" in words and "either" not in message:
        pytest.importorskip("mteb")
    assert main(["evaluate", *(word.format(task=task) for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("revela-hub: error: ")
    assert message in captured.err.splitlines()[-1]
