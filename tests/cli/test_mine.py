"""`revela-hub mine`, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from revela_hub.cli.main import main
from revela_hub.data.sources.beir import RetrievalTask, write_beir
from revela_hub.data.sources.rows import read_rows
from revela_hub.data.sources.source import parse_source

CORPUS = {
    "a": "Rivers carry sediment from the mountains to the sea.",
    "b": "Sediment of rivers settles layer upon layer.",
    "c": "The sea is deep.",
    "d": "Rivers carry sediment from the mountains to the sea.",  # of a
    "e": "Mountains and rivers.",
}
QUERIES = {"1": "how do rivers carry sediment", "2": "how deep is the sea", "3": "not in the split"}
QRELS = {"1": {"a": 2, "c": 0, "gone": 1}, "2": {"c": 1}}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    write_beir(RetrievalTask(CORPUS, QUERIES, QRELS, "tiny"), tmp_path / "beir", "train")
    write(
        "pairs.jsonl", [{"anchor": QUERIES["1"], "positive": CORPUS["a"]}, {"anchor": QUERIES["2"], "positive": None}]
    )
    return tmp_path


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_mines_a_beir_folder_with_bm25(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mine", "bm25", "--beir", "beir", "--output", "new/mined.jsonl", "--scores", "--fewer", "keep"]
    assert main(words) == 0
    first, second = read("new/mined.jsonl")
    assert list(first) == ["anchor", "positive", "negative_1", "scores"]
    assert (first["anchor"], first["positive"]) == (QUERIES["1"], CORPUS["a"])
    assert first["negative_1"] == CORPUS["b"]  # not d, which is a copy of the positive
    assert first["scores"][0] > first["scores"][1] / 0.95 > 0
    assert (second["anchor"], second["negative_1"]) == (QUERIES["2"], CORPUS["a"])
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == ["2 pairs of 2 anchors", "4 documents; skipped: 1 duplicate documents"]
    assert "2 by being a positive" in out
    assert "2 pairs with all negatives, 0 with fewer" in out
    words[words.index("--output") + 1] = "new/mined.jsonl.gz"
    assert main(words) == 0
    assert [row.columns for row in read_rows(parse_source("new/mined.jsonl.gz"))] == [first, second]


def test_mines_with_a_model_and_resumes(place: Path, retriever_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sentence_transformers import SentenceTransformer

    words = ["mine", str(retriever_folder), "--beir", "beir", "--device", "cpu", "--no_positive_aware", "--scores"]
    assert main([*words, "--output", "first.jsonl"]) == 0
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    for row in read("first.jsonl"):
        texts = [row["positive"], row["negative_1"]]
        cosines = model.similarity(model.encode_query([row["anchor"]]), model.encode_document(texts))[0].tolist()
        assert row["scores"] == pytest.approx(cosines, abs=1e-5)
    with monkeypatch.context() as patched:
        patched.setattr(SentenceTransformer, "encode", None)  # nothing is encoded a second time
        assert main([*words, "--output", "second.jsonl"]) == 0
    assert read("second.jsonl") == read("first.jsonl")
    for name, options in (("prompted", ["--query-prompt", "river "]), ("hybrid", ["--mode", "hybrid"])):
        assert main([*words, "--output", f"{name}.jsonl", *options]) == 0
        assert read(f"{name}.jsonl") != read("first.jsonl")


def test_columns_lists_of_positives_and_a_corpus_with_titles(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("pairs.jsonl", [{"q": "river sea", "answers": ["river sea lamp", "sea", ""]}, {"q": "moon", "answers": []}])
    write(
        "corpus.jsonl", [{"title": "River", "body": "and rope"}, {"title": "", "body": "river sea lamp"}, {"body": " "}]
    )
    columns = ["--anchor_column", "q", "--positive_column", "answers", "--text_column", "body"]
    words = ["mine", "bm25", "--pairs", "pairs.jsonl", "--corpus", "corpus.jsonl", "--output", "mined.jsonl"]
    assert main([*words, *columns, "--positive-aware", "false"]) == 0
    assert [row["positive"] for row in read("mined.jsonl")] == ["river sea lamp", "sea"]
    assert {row["negative_1"] for row in read("mined.jsonl")} == {"River and rope"}
    assert "3 documents; skipped: 1 empty pairs, 1 empty documents" in capsys.readouterr().out


def test_without_a_corpus_the_positives_are_searched(place: Path) -> None:
    texts = [text for id_, text in CORPUS.items() if id_ != "d"]
    write("pairs.jsonl", [{"anchor": text.split()[0], "positive": text} for text in texts])
    words = ["mine", "--model", "bm25", "--pairs", "pairs.jsonl", "--output", "mined.jsonl", "--fewer", "keep"]
    assert main([*words, "--num-negatives", "2"]) == 0
    rows = read("mined.jsonl")
    assert [row["positive"] for row in rows] == texts
    assert all(row[name] in {*texts, None} - {row["positive"]} for row in rows for name in ("negative_1", "negative_2"))


def test_pairs_from_a_data_set_and_options_from_a_file(place: Path) -> None:
    from datasets import Dataset

    Dataset.from_list([{"query": QUERIES["1"], "positive": CORPUS["a"]}]).save_to_disk("saved")
    Path("mine.yaml").write_text(
        "pairs: hf:saved\nanchor_column: query\ncorpus: beir\nnum_negatives: 2\nrange_max: 4\noutput: mined.jsonl\n"
    )
    assert main(["mine", "bm25", "--config", "mine.yaml"]) == 0
    [row] = read("mined.jsonl")
    assert (row["negative_1"], row["negative_2"]) == (CORPUS["b"], CORPUS["e"])


MIXTURE = """
tasks:
- {name: claims, type: retrieval, source: beir, split: train, instruction: Find the passage}
- {name: given, type: triplets, source: "hf:given"}
- {name: similar, type: sts, source: sts.jsonl, instruction: Find similar text}
- {name: topics, type: classification, source: topics.jsonl}
"""


def test_mines_every_task_of_a_mixture_for_training(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from datasets import Dataset

    from revela_hub.data import load_mixture

    Path("mixture.yaml").write_text(MIXTURE)
    texts = list(CORPUS.values())
    triplets = [{"anchor": t[:9], "positive": t, "negative": f"not {t}"} for t in texts[:3]]
    Dataset.from_list(triplets).save_to_disk("given")
    sts = [(texts[0], texts[1], 4.5), (texts[0], texts[4], 3), (texts[2], "A deep sea.", 5), ("Rivers.", texts[3], 0)]
    write("sts.jsonl", [{"sentence1": a, "sentence2": b, "score": score} for a, b, score in sts])
    write("topics.jsonl", [{"text": f"{t} {n}", "label": t} for t in "ab" for n in range(3)])
    words = ["mine", "bm25", "--mixture", "mixture.yaml", "--output", "mined", "--no_positive_aware"]

    assert main([*words, "--num_negatives", "2"]) == 0
    out = capsys.readouterr().out
    assert "claims: 2 pairs of 2 anchors" in out and "topics" not in out
    files = {path.name.rpartition("-")[0]: path for path in Path("mined").glob("*.jsonl")}
    claim, _ = sorted(read(str(files["claims"])), key=lambda row: row["anchor"], reverse=True)
    assert claim == {
        "anchor": QUERIES["1"],
        "positive": CORPUS["a"],
        "negative_1": CORPUS["b"],
        "negative_2": CORPUS["e"],
    }
    assert all(row["negative_1"] == f"not {row['positive']}" for row in read(str(files["given"])))
    similar = [row for row in read(str(files["similar"])) if row["anchor"] == texts[0]]
    assert len(read(str(files["similar"]))) == 4 and texts[4] not in similar[0].values()  # judged half similar

    given, mined = (load_mixture(f, num_negatives=2, stage=2) for f in ("mixture.yaml", "mined/mixture.yaml"))
    assert [task.in_stages for task in mined.tasks] == [task.in_stages for task in given.tasks]
    assert [task.mined_from for task in mined.tasks] == [None, "hf:given", None, None]  # for the card
    columns = ("task", "anchor", "positive", "anchor_prompt", "document_prompt", "kind")
    assert {tuple(row[name] for name in columns) for row in mined.dataset} == {
        tuple(row[name] for name in columns) for row in given.dataset
    }
    assert main([*words, "--num_negatives", "2"]) == 0
    assert capsys.readouterr().out.count("mined before") == 3
    assert main([*words, "--num_negatives", "1"]) == 0
    assert "mined before" not in capsys.readouterr().out


def test_the_output_appears_whole_and_replaces_nothing_without_leave(place: Path) -> None:
    words = ["mine", "bm25", "--beir", "beir", "--output", "mined.jsonl"]
    assert main(words) == 0
    before = Path("mined.jsonl").read_bytes()
    assert main(words) == 2
    assert main([*words, "--overwrite", "--relative-margin", "0.9999"]) == 2  # which leaves nothing
    assert Path("mined.jsonl").read_bytes() == before
    assert list(place.glob("*.tmp")) == []
    Path("link.jsonl").symlink_to("mined.jsonl")
    words[words.index("mined.jsonl")] = "link.jsonl"
    assert main([*words, "--overwrite", "--scores"]) == 0
    assert Path("link.jsonl").is_symlink() and Path("mined.jsonl").read_bytes() != before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pairs", "pairs.jsonl", "--beir", "beir"], "give one of --pairs FILE"),
        (["--pairs", "pairs.jsonl", "--anchor_column", "query"], "pairs.jsonl:1: no column 'query'"),
        (["--pairs", "pairs.jsonl"], "is too small for"),
        (["--pairs", "pairs.jsonl", "--output", "./pairs.jsonl", "--overwrite"], "one of the files that --pairs reads"),
        (["--pairs", "pairs.jsonl", "--corpus", "docs", "--output", "docs/new.jsonl"], "that --corpus reads"),
    ],
)
def test_mistakes_are_one_line(place: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("docs").mkdir()
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    words = words if "--output" in words else [*words, "--output", "mined.jsonl"]
    assert main(["mine", "bm25", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err.splitlines()[-1]
    after = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file() and "xdg" not in path.parts}
    assert after == before
