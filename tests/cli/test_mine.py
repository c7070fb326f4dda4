"""`revela-hub mine`, through the command line."""

import json
import os
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
    assert out.splitlines()[:2] == ["2 pairs of 2 anchors", "4 documents; skipped 1 duplicate"]
    assert "2 by being a positive" in out
    assert "2 pairs with all negatives, 0 with fewer (kept)" in out
    for name in ("new/mined.jsonl.gz",):
        words[words.index("--output") + 1] = name
        assert main(words) == 0
        written = [row.columns for row in read_rows(parse_source(name))]
        assert [{**row, "scores": None} for row in written] == [{**row, "scores": None} for row in (first, second)]
        assert written[0]["scores"] == pytest.approx(first["scores"])


def test_mines_with_a_model_and_resumes(
    place: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentence_transformers import SentenceTransformer

    words = ["mine", str(retriever_folder), "--beir", "beir", "--device", "cpu", "--no_positive_aware", "--scores"]
    assert main([*words, "--output", "first.jsonl"]) == 0
    model = SentenceTransformer(str(retriever_folder), device="cpu")
    for row in read("first.jsonl"):
        texts = [row["positive"], row["negative_1"]]
        cosines = model.similarity(model.encode_query([row["anchor"]]), model.encode_document(texts))[0].tolist()
        assert row["scores"] == pytest.approx(cosines, abs=1e-5)
    assert list((place / "xdg" / "revela-hub" / "mining").glob("vectors-*/*.npy"))
    with monkeypatch.context() as patched:
        patched.setattr(SentenceTransformer, "encode", None)  # nothing is encoded a second time
        assert main([*words, "--output", "second.jsonl"]) == 0
    assert read("second.jsonl") == read("first.jsonl")
    assert main([*words, "--output", "third.jsonl", "--query-prompt", "river "]) == 0
    assert read("third.jsonl") != read("first.jsonl")
    assert "cache: " in capsys.readouterr().err


def test_a_model_with_code_of_its_own(place: Path, bert_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    transformer = Transformer(str(bert_folder))
    model = SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension())], device="cpu")
    folder = place / "remote"
    model.save(str(folder), create_model_card=False)
    (folder / "own_pooling.py").write_text(
        "from sentence_transformers.sentence_transformer.modules import Pooling\n\n\nclass OwnPooling(Pooling):\n    pass\n"
    )
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "own_pooling.OwnPooling"
    (folder / "modules.json").write_text(json.dumps(modules))
    words = ["mine", "./remote", "--beir", "beir", "--device", "cpu", "--output", "mined.jsonl", "--no_positive_aware"]
    assert main([*words, "--trust-remote-code"]) == 0
    assert len(read("mined.jsonl")) == 2


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
    out = capsys.readouterr().out
    assert "skipped: 1 empty pairs, 1 empty documents" in out
    assert "3 documents, including 1 positive from outside the corpus" in out


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


def test_the_output_is_a_data_set_and_appears_whole(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from datasets import load_dataset

    words = ["mine", "bm25", "--beir", "beir", "--output", "mined.jsonl"]
    assert main(words) == 0
    loaded = load_dataset("json", data_files="mined.jsonl", split="train", cache_dir=str(place / "datasets"))
    assert loaded.column_names == ["anchor", "positive", "negative_1"]
    before = Path("mined.jsonl").read_bytes()
    assert main(words) == 2
    assert "mined.jsonl already exists; choose another --output, or replace it with --overwrite" in (
        capsys.readouterr().err
    )
    assert main([*words, "--overwrite", "--max-score", "0.0001"]) == 2  # which leaves nothing
    assert "no pair has 1 negative" in capsys.readouterr().err
    assert Path("mined.jsonl").read_bytes() == before
    assert list(place.glob("*.tmp")) == []
    Path("link.jsonl").symlink_to("mined.jsonl")
    words[words.index("mined.jsonl")] = "link.jsonl"
    assert main([*words, "--overwrite", "--scores"]) == 0
    assert Path("link.jsonl").is_symlink() and Path("mined.jsonl").read_bytes() != before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either --pairs FILE or --beir FOLDER"),
        (["--pairs", "pairs.jsonl", "--beir", "beir"], "give either --pairs FILE or --beir FOLDER"),
        (["--pairs", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--pairs", "pairs.jsonl", "--anchor_column", "query"], "pairs.jsonl:1: no column 'query'"),
        (["--pairs", "numbers.jsonl"], "numbers.jsonl:1: column 'positive' holds int, not text"),
        (["--pairs", "broken.jsonl"], "broken.jsonl:2: not valid JSON"),
        (["--pairs", "pairs.jsonl"], "the corpus is too small"),
        (["--beir", "beir", "--split", "test"], "no split 'test'"),
        (["--beir", "beir", "--num_negatives", "0"], "num_negatives must be at least 1"),
        (["--beir", "beir", "--model", "./nowhere"], "./nowhere is not a folder"),
        (["--beir", "beir", "--output", "beir"], "--output beir is a folder or a device"),
        (["--beir", "beir", "--output", "pipe", "--overwrite"], "--output pipe is a folder or a device"),
    ],
)
def test_mistakes_are_one_line(place: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write("numbers.jsonl", [{"anchor": "a", "positive": 1}])
    Path("empty").mkdir()
    os.mkfifo("pipe")
    Path("broken.jsonl").write_text('{"anchor": "a", "positive": "b"}\n{"anchor"\n')
    words = words if "--output" in words else [*words, "--output", "mined.jsonl"]
    words = words if "--model" in words else ["bm25", *words]
    assert main(["mine", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("revela-hub: error: ")
    assert message in captured.err.splitlines()[-1]
    assert not Path("mined.jsonl").exists()


def test_the_output_is_never_the_input(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("pairs.jsonl").read_text()
    words = ["mine", "bm25", "--pairs", "pairs.jsonl", "--output", "./pairs.jsonl", "--overwrite"]
    assert main(words) == 2
    assert "one of the files that --pairs reads" in capsys.readouterr().err
    words = ["mine", "bm25", "--beir", "beir", "--output", "beir/corpus.jsonl", "--overwrite"]
    assert main(words) == 2
    assert Path("pairs.jsonl").read_text() == before


def test_mines_with_a_hybrid(place: Path, retriever_folder: Path) -> None:
    words = ["mine", str(retriever_folder), "--beir", "beir", "--device", "cpu", "--no_positive_aware"]
    assert main([*words, "--output", "dense.jsonl"]) == 0
    assert main([*words, "--output", "hybrid.jsonl", "--mode", "hybrid", "--weights", "0", "1", "--scores"]) == 0
    assert all(row["scores"][0] >= 0 for row in read("hybrid.jsonl"))


def test_the_output_is_not_written_where_the_next_run_reads_it(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("documents")
    folder.mkdir()
    (folder / "part-1.jsonl").write_text(json.dumps({"text": "rivers carry sediment"}) + "\n")
    words = ["mine", "bm25", "--pairs", "pairs.jsonl", "--corpus", "documents", "--output", "documents/mined.jsonl"]
    assert main(words) == 2
    assert "one of the files that --corpus reads" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["part-1.jsonl"]
