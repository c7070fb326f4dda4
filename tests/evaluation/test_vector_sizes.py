"""The scores of smaller vectors."""

import json
from pathlib import Path

import numpy as np
import pytest

from revela_hub.cli.main import main
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation import score_run
from revela_hub.evaluation.vector_sizes import evaluate_sizes


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
    rows = list(evaluate_sizes(encoder, found, [16, 5], ["float32", "int8", "binary"]))
    assert encoder.queries == 6  # once, not once for each size
    assert [(row.dims, row.bytes_per_passage) for row in rows] == [
        *((16, 64), (16, 16), (16, 2)),
        *((5, 20), (5, 5), (5, 1)),
    ]
    for row in rows[:-1]:  # the last one has many equal scores
        run = {}
        for query, text in found.queries.items():
            [asked] = encoder.encode_document([text])
            scores = {}
            for one, content in found.corpus.items():
                [vector] = encoder.encode_document([content])
                vector = np.sign(vector) if row.precision == "binary" else vector
                scores[one] = float(sum(a * b for a, b in zip(asked[: row.dims], vector[: row.dims], strict=True)))
            run[query] = dict(sorted(scores.items(), key=lambda pair: -pair[1])[:100])
        expected = score_run(run, found)
        close = 0.02 if row.precision == "int8" else 1e-9
        for metric in ("ndcg_at_10", "mrr_at_10", "recall_at_100"):
            assert getattr(row.scores, metric) == pytest.approx(getattr(expected, metric), abs=close)


def test_evaluate_prints_quality_and_bytes(
    tmp_path: Path, retriever_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "probe/qrels").mkdir(parents=True)
    corpus = ({"_id": f"d{number}", "text": f"note {number} of {number * 7} stones"} for number in range(20))
    (tmp_path / "probe/corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    queries = ({"_id": f"q{number}", "text": f"note {number}"} for number in range(5))
    (tmp_path / "probe/queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    judged = "".join(f"q{number}\td{number}\t1\n" for number in range(5))
    (tmp_path / "probe/qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    common = ["evaluate", str(retriever_folder), "bm25", "--corpus", str(tmp_path / "probe"), "--device", "cpu"]
    assert main([*common, "--dims", "32", "8", "--precision", "float32", "binary", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row.get("bytes_per_passage") for row in rows] == [128, 4, 32, 1, None]
    assert rows[0]["ndcg_at_10"] > 0
    assert main([*common, "--dims", "33"]) == 2
    assert main([*common, "--precision", "int4"]) == 2
