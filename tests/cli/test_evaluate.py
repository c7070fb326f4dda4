"""`revela-hub evaluate`, through the command line."""

import json
from pathlib import Path

import pytest

from revela_hub.cli.main import main

DOCUMENTS = ["rivers carry sediment", "the capital of France", "a lazy dog", "width and height"]
QUERIES = [("q", "sediment in rivers", "d0"), ("r", "capital", "d1"), ("s", "zzz the qqq", "d2")]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task of which BM25 answers two queries, and has no hit for the third."""
    folder = tmp_path / "task"
    (folder / "qrels").mkdir(parents=True)
    corpus = [json.dumps({"_id": f"d{number}", "text": text}) for number, text in enumerate(DOCUMENTS)]
    (folder / "corpus.jsonl").write_text("\n".join(corpus))
    (folder / "queries.jsonl").write_text("\n".join(json.dumps({"_id": id_, "text": text}) for id_, text, _ in QUERIES))
    lines = "".join(f"{id_}\t{document}\t1\n" for id_, _, document in QUERIES)
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{lines}")
    return folder


def test_rows_are_compared_query_by_query(
    task: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", "bm25", str(retriever_folder), "--corpus", str(task), "--device", "cpu"]
    assert main([*words, "--mode", "dense", "hybrid", "--cache-dir", str(task.parent / "cache")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "task/test: 3 queries, 4 documents"
    assert lines[1].split() == ["model", "nDCG@10", "MRR@10", "Recall@100"]
    assert lines[2].split() == ["bm25", "0.6667", "0.6667", "0.6667"]
    labels = [line.split("  ")[0] for line in lines[2:5]]
    assert labels == ["bm25", f"{retriever_folder} [dense]", f"{retriever_folder} [hybrid]"]
    assert len({len(line) for line in lines[1:5]}) == 1  # aligned
    assert lines[5].startswith("bm25 found nothing for 1 of the queries")
    *compared, few = lines[lines.index("compared with bm25 (paired bootstrap, 95% interval):") + 1 :]
    assert len(compared) == 2 * 3 and few.startswith("3 queries are too few")
    assert all(", p = " in line or ", p < " in line for line in compared)


def test_a_saved_run_is_scored_again(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, words = str(tmp_path / "run.trec"), ["--corpus", str(task), "--metrics", "mrr@1", "ndcg@3", "recall@200"]
    assert main(["evaluate", "bm25", *words, "--save_run", run]) == 0
    saved = capsys.readouterr().out.splitlines()
    assert Path(run).read_text().splitlines()[0].split()[:4] == ["q", "Q0", "d0", "1"]
    assert main(["evaluate", run, "bm25", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["model", "MRR@1", "nDCG@3", "Recall@200"]
    assert lines[2].split()[1:] == lines[3].split()[1:] == saved[2].split()[1:]
    assert main(["evaluate", "bm25", *words, "--save_run", run]) == 2  # it is not replaced


def test_shorter_vectors(task: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", str(retriever_folder), "bm25", "--corpus", str(task), "--device", "cpu", "--json", "--dims"]
    assert main([*words, "32", "1"]) == 0
    whole, short, bm25 = json.loads(capsys.readouterr().out)
    assert whole["model"].endswith("[32 dimensions]") and bm25["model"] == "bm25"
    assert short["mrr_at_10"] < whole["mrr_at_10"]
    assert main([*words, "33"]) == 2


def test_answer_recall_of_an_index(task: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = [{"question": "sediment", "answers": ["Carry"]}, {"question": "France", "answers": ["a lazy", "Dog."]}]
    (task.parent / "nq.jsonl").write_text("\n".join(map(json.dumps, questions)))
    model, index = str(retriever_folder), str(task.parent / "index")
    assert main(["index", model, "--corpus", str(task / "corpus.jsonl"), "--output_dir", index, "--device", "cpu"]) == 0
    words = [
        "--data",
        str(task.parent / "nq.jsonl"),
        "--index",
        index,
        "--metrics",
        "answer_recall@1",
        "answer_recall@4",
    ]
    capsys.readouterr()
    assert main(["evaluate", "bm25", model, *words, "--json", "--device", "cpu"]) == 0
    bm25, dense = json.loads(capsys.readouterr().out)
    assert (bm25["answer_recall_at_1"], bm25["answer_recall_at_4"], bm25["documents"]) == (0.5, 0.5, 4)
    assert dense["answer_recall_at_4"] == 1 and "answer_recall_at_1" in dense["difference"]
    assert main(["evaluate", "bm25", *words[:4]]) == 2  # nDCG needs judgements


def test_prints_nothing_but_json(task: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--corpus", str(task), "--device", "cpu", "--json", "--bm25", "anserini", "--bm25-stemmer", "none"]
    assert main(["evaluate", "bm25", str(retriever_folder), *words]) == 0
    first, second = json.loads(capsys.readouterr().out)
    scores = dict.fromkeys(("ndcg_at_10", "mrr_at_10", "recall_at_100"), pytest.approx(2 / 3))
    assert first == {"model": "bm25", "name": "task/test", **scores, "queries": 3, "documents": 4, "unanswered": 1}
    assert second["compared_with"] == "bm25"
    found = second["difference"]["ndcg_at_10"]
    assert found["difference"] == pytest.approx(second["ndcg_at_10"] - first["ndcg_at_10"])
    assert found["low"] <= found["difference"] <= found["high"] and 0 < found["p_value"] <= 1


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["bm25"], "give either --corpus BEIR_FOLDER, --tasks NAME"),
        (["bm25", "--corpus", "{task}", "--split", "dev"], "no split 'dev'"),
        (["bm25", "--corpus", "{task}", "--batch_size", "0"], "batch_size must be at least 1"),
        (["./nowhere", "--corpus", "{task}"], "./nowhere"),
        (["bm25", "--corpus", "{task}", "--fusion", "sum"], "fusion requires mode hybrid"),
        pytest.param(["bm25", "--tasks", "NoSuchTask"], "'NoSuchTask'", marks=pytest.mark.slow),  # imports mteb
    ],
)
def test_mistakes_are_one_line(task: Path, words: list[str], fact: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "NoSuchTask" in words:
        pytest.importorskip("mteb", reason="needs the extra mteb")
    assert main(["evaluate", *(word.format(task=task) for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and fact in captured.err.splitlines()[-1]


def test_learned_sparse_and_all_three(
    task: Path, retriever_folder: Path, tiny_sparse_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", "--corpus", str(task), "--device", "cpu", "--json"]
    assert main([*words, str(tiny_sparse_folder), "--mode", "sparse"]) == 0
    three = ["--mode", "hybrid", "--parts", "dense", "sparse", "bm25"]
    assert main([*words, str(retriever_folder), *three, "--sparse-model", str(tiny_sparse_folder)]) == 0
    assert main([*words, str(retriever_folder), "--mode", "sparse"]) == 2
    assert f"{retriever_folder} is not a sparse model" in capsys.readouterr().err
