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
    assert title == "task/test: 1 query, 4 documents"
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
        (["bm25", "--corpus", "{task}", "--batch_size", "0"], "batch_size must be at least 1"),
        (["./nowhere", "--corpus", "{task}"], "./nowhere is not a folder"),
        pytest.param(["bm25", "--tasks", "NoSuchTask"], "'NoSuchTask'", marks=pytest.mark.slow),  # imports mteb
    ],
)
def test_mistakes_are_one_line(task: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "NoSuchTask" in words:
        pytest.importorskip("mteb", reason="needs the extra mteb")
    assert main(["evaluate", *(word.format(task=task) for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("revela-hub: error: ")
    assert message in captured.err.splitlines()[-1]


@pytest.fixture
def larger(task: Path) -> Path:
    """Three queries, so that there is something to compare."""
    rows = [("q", "sediment in rivers", "d0"), ("r", "capital", "d1"), ("s", "an animal that sleeps", "d2")]
    (task / "queries.jsonl").write_text("\n".join(json.dumps({"_id": id_, "text": text}) for id_, text, _ in rows))
    lines = "".join(f"{id_}\t{document}\t1\n" for id_, _, document in rows)
    (task / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{lines}")
    return task


def test_rows_are_compared_query_by_query(
    larger: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", "bm25", str(retriever_folder), "--corpus", str(larger), "--device", "cpu"]
    assert main([*words, "--mode", "dense", "hybrid", "--cache-dir", str(larger.parent / "cache")]) == 0
    lines = capsys.readouterr().out.splitlines()
    labels = [line.split("  ")[0] for line in lines[2:5]]
    assert labels == ["bm25", f"{retriever_folder} [dense]", f"{retriever_folder} [hybrid]"]
    compared = lines[lines.index("compared with bm25 (paired bootstrap over queries, 95% interval):") + 1 :]
    assert len(compared) == 2 * 3
    assert all(", p = " in line or ", p < " in line for line in compared)
    assert main([*words, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert "difference" not in first
    assert second["compared_with"] == "bm25"
    found = second["difference"]["ndcg_at_10"]
    assert found["difference"] == pytest.approx(second["ndcg_at_10"] - first["ndcg_at_10"])
    assert found["low"] <= found["difference"] <= found["high"] and 0 < found["p_value"] <= 1


def test_presets_and_options_of_bm25(larger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "bm25", "--corpus", str(larger), "--bm25", "anserini", "--bm25-stemmer", "none"]) == 0


def test_learned_sparse_and_all_three(
    larger: Path, retriever_folder: Path, tiny_sparse_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", "--corpus", str(larger), "--device", "cpu", "--json"]
    assert main([*words, str(tiny_sparse_folder), "--mode", "sparse"]) == 0
    three = ["--mode", "hybrid", "--parts", "dense", "sparse", "bm25"]
    assert main([*words, str(retriever_folder), *three, "--sparse-model", str(tiny_sparse_folder)]) == 0
    assert main([*words, str(retriever_folder), "--mode", "sparse"]) == 2
    assert f"{retriever_folder} is not a sparse model" in capsys.readouterr().err


def test_queries_without_a_hit_are_counted(larger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A query with no term in the corpus scores 0, and the table says how many did; one of the fixture's has none."""
    queries = larger / "queries.jsonl"
    first, *rest = queries.read_text().splitlines()
    lost = json.loads(first) | {"text": "zzz the qqq"}
    queries.write_text("\n".join([json.dumps(lost), *rest]) + "\n")
    assert main(["evaluate", "bm25", "--corpus", str(larger)]) == 0
    assert "bm25 found nothing for 2 of the queries" in capsys.readouterr().out
    assert main(["evaluate", "bm25", "--corpus", str(larger), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["unanswered"] == 2
