"""The scores of smaller vectors, and the commands that print them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from revela_hub.cli.main import main
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.evaluation import score_run
from revela_hub.evaluation.vector_sizes import VectorSize, evaluate_sizes, sizes_of
from revela_hub.retrieval.ranking import RankerSettings


class Encoder:
    """Random vectors, the same for the same text; counts the queries that it encodes."""

    similarity_fn_name = "dot"
    queries = 0

    def encode_query(self, inputs: list[str], /, **_: object) -> np.ndarray:
        self.queries += len(inputs)
        return self.encode_document(inputs)

    def encode_document(self, inputs: list[str], /, **_: object) -> np.ndarray:
        return np.stack([np.random.default_rng(list(text.encode())).normal(size=16) for text in inputs])


def task() -> RetrievalTask:
    corpus = {f"d{number:03d}": f"document {number}" for number in range(120)}
    queries = {f"q{number}": f"query {number}" for number in range(6)}
    random = np.random.default_rng(0)
    qrels = {query: {str(one): 1 for one in random.choice(list(corpus), size=30, replace=False)} for query in queries}
    return RetrievalTask(corpus, queries, qrels, "random")


def test_scores_are_those_of_truncated_vectors() -> None:
    encoder, found = Encoder(), task()
    sizes = [VectorSize(), VectorSize(5), VectorSize(5, "int8"), VectorSize(5, "binary")]
    rows = list(evaluate_sizes(encoder, found, RankerSettings(), sizes))
    assert encoder.queries == 6  # once, not once for each size
    assert [(row.dims, row.precision, row.bytes_per_passage) for row in rows] == [
        (16, "float32", 64),
        (5, "float32", 20),
        (5, "int8", 5),
        (5, "binary", 1),
    ]
    for row in rows[:3]:
        run = {}
        for query, text in found.queries.items():
            [asked] = encoder.encode_document([text])
            scores = {}
            for one, content in found.corpus.items():
                [vector] = encoder.encode_document([content])
                scores[one] = float(sum(a * b for a, b in zip(asked[: row.dims], vector[: row.dims], strict=True)))
            run[query] = dict(sorted(scores.items(), key=lambda pair: -pair[1])[:100])
        expected = score_run(run, found)
        close = 0.02 if row.precision == "int8" else 1e-9
        for metric in ("ndcg_at_10", "mrr_at_10", "recall_at_100"):
            assert getattr(row.scores, metric) == pytest.approx(getattr(expected, metric), abs=close)
            mean = sum(row.scores.per_query[metric].values()) / len(found.queries)
            assert getattr(row.scores, metric) == pytest.approx(mean)
        assert row.milliseconds > 0


def test_all_combinations_are_measured_once() -> None:
    assert sizes_of([], []) == [VectorSize(None, "float32")]
    assert sizes_of([4, 2], ["float32", "int8"]) == [
        VectorSize(4, "float32"),
        VectorSize(4, "int8"),
        VectorSize(2, "float32"),
        VectorSize(2, "int8"),
    ]
    for dims, precisions, said in (
        ([4, 4], [], "--dims contains 4 twice"),
        ([], ["int4"], "--precision must be float32, int8 or binary, not 'int4'"),
    ):
        with pytest.raises(UserError, match=said):
            sizes_of(dims, precisions)


@pytest.fixture
def beir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = tmp_path / "probe"
    (folder / "qrels").mkdir(parents=True)
    rows = [f"note {number} about rivers and {number * 7} stones" for number in range(20)]
    corpus = ({"_id": f"d{number}", "title": "", "text": text} for number, text in enumerate(rows))
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    queries = ({"_id": f"q{number}", "text": f"note {number}"} for number in range(5))
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    judged = "".join(f"q{number}\td{number}\t1\n" for number in range(5))
    (folder / "qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    return folder


def test_evaluate_prints_quality_bytes_and_time(
    beir: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["evaluate", str(retriever_folder), "bm25", "--corpus", str(beir), "--device", "cpu"]
    assert main([*common, "--dims", "32", "8", "--precision", "float32", "binary"]) == 0
    table = capsys.readouterr().out.partition("bytes per passage")[2].splitlines()[1:]
    assert [line.rsplit(None, 3)[2] for line in table] == ["128", "4", "32", "1"]
    assert main([*common, "--precision", "int8", "--json"]) == 0
    small, bm25 = json.loads(capsys.readouterr().out)
    assert (small["dims"], small["precision"], small["bytes_per_passage"]) == (32, "int8", 32)
    assert small["milliseconds"] > 0 and "precision" not in bm25
    for options, said in (
        (["--dims", "33"], "the model's vectors have 32 dimensions, fewer than the 33 requested: lower the number"),
        (
            ["--dims", "8", "--mode", "hybrid"],
            "--dims and --precision require --corpus and dense retrieval without --rerank",
        ),
    ):
        assert main([*common, *options]) == 2
        assert said in capsys.readouterr().err


def test_index_reports_the_cost_and_search_uses_the_size(
    beir: Path, retriever_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index, model = str(tmp_path / "index"), str(retriever_folder)
    common = ["index", model, "--corpus", str(beir / "corpus.jsonl"), "--output_dir", index, "--device", "cpu"]
    assert main([*common, "--truncate_dim", "16", "--precision", "binary", "--probe", str(beir)]) == 0
    said = capsys.readouterr().out
    assert "20 passages, 16-dimensional vectors (binary)" in said
    assert "with 128 bytes per passage" in said and "with 2: " in said
    single = tmp_path / "single"
    shutil.copytree(beir, single)
    (single / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\n")  # nothing to compare
    assert main([*common, "--truncate_dim", "16", "--precision", "binary", "--probe", str(single)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" with 2")
    assert main([*common, "--probe", str(beir)]) == 2
    assert "--probe measures --truncate_dim and --precision: give one of them" in capsys.readouterr().err
    search = ["search", model, "note 3", "--index", index, "--device", "cpu"]
    assert main([*search, "--json", "--mode", "hybrid"]) == 0
    assert len(json.loads(capsys.readouterr().out)["hits"]) == 5
    assert main([*search, "--precision", "int8"]) == 2
    assert "the index was built with --precision binary, not int8" in capsys.readouterr().err
