"""`revela-hub search`, through the command line."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from revela_hub.cli.main import main

CODE = "import os\n\n\ndef area(width, height):\n    return width * height\n"
Search = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "docs").mkdir(parents=True)
    (folder / "area.py").write_text(CODE)
    (folder / "docs" / "rivers.md").write_text("# Water\n\nRivers carry sediment from the mountains to the sea.\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return folder


@pytest.fixture
def search(capsys: pytest.CaptureFixture[str]) -> Search:
    """Run `search --json`, and return its records."""

    def search(*words: object) -> list[dict[str, Any]]:
        assert main(["search", *map(str, words), "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return search


def test_prints_ranked_passages_with_file_and_line(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "bm25", "sediment in the river", "--corpus", "docs", "area.py"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("1. score 0.") and out[0].endswith("  docs/rivers.md:1-3")
    assert out[1:] == ["      # Water", "      Rivers carry sediment from the mountains to the sea.", ""]


def test_licences_and_addresses_of_links_are_no_passages_and_the_matching_lines_are_shown(
    corpus: Path, search: Search, capsys: pytest.CaptureFixture[str]
) -> None:
    notice = "# Copyright 2024 The Authors.\n#\n# Licensed under the Apache License, Version 2.0.\n\n"
    (corpus / "lakes.py").write_text(
        f"#!/bin/python\n{notice}# Lakes have\n{'#' * 9}\n" + "x = 1\n" * 8 + "lakes = 'boats'\n"
    )
    (corpus / "docs" / "rivers.md").write_text("Rivers [carry][1] sediment.\n\n[1]: https://example.org/canoes\n")
    rows = [
        {"text": "def canals(width):\n    depth = width\n    return depth\n"},
        {"text": "Public canals (of a city)."},
    ]
    (corpus / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for query in ("copyright apache", "canoes"):
        assert search("bm25", query, "--corpus", ".")[0]["hits"] == []
    [record] = search("bm25", "canals", "--corpus", "rows.jsonl")
    assert {hit["text"] for hit in record["hits"]} == {row["text"] for row in rows}  # code ends with its line
    assert main(["search", "bm25", "boats on lakes", "--corpus", "lakes.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("lakes.py:6-16") and lines[1] == "      ..." and lines[-2] == "      lakes = 'boats'"


def test_queries_come_from_standard_input(
    corpus: Path, search: Search, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffsediment\n\nzebra\nheight"))
    records = search("bm25", "--corpus", "docs", "area.py")
    assert [record["query"] for record in records] == ["sediment", "zebra", "height"]
    assert [[hit["path"] for hit in record["hits"]] for record in records] == [["docs/rivers.md"], [], ["area.py"]]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"width\ncaf\xe9 sediment\n"), "utf-8", "strict"))
    assert main(["search", "bm25", "--corpus", "docs", "area.py", "--json"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["query"] for line in printed.out.splitlines()] == ["width", "caf\ufffd sediment"]
    assert "warning: line 2 of standard input is not utf-8: caf\ufffd sediment\n" in printed.err


def test_a_model_is_searched_with_through_its_cache(
    corpus: Path, retriever_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["search", str(retriever_folder), "--corpus", ".", "--device", "cpu", "rivers", "--top_k", "1"]
    assert main(words) == 0
    first = capsys.readouterr()
    assert "2 documents, 2 passages\n" in first.err
    assert main(words) == 0
    second = capsys.readouterr()
    assert second.out == first.out
    assert second.out.startswith("1. ") and "\n2. " not in second.out
    assert list((corpus.parent / "xdg" / "revela-hub" / "passages").glob("vectors-*/*.npy"))
    assert main([*words, "--cache-dir", str(corpus.parent / "own"), "--max_length", "16"]) == 0
    assert "2 passages\n" in capsys.readouterr().err
    assert list((corpus.parent / "own").glob("vectors-*/*.npy"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bm25", "--corpus", "docs", "width?"], "width?"),  # not a query: those come from stdin
        (["bm25", "query"], "corpus"),
        (["bm25", " ", "--corpus", "docs"], "the query is empty"),
        (["bm25", "query", "--corpus", "docs", "--weights", "1", "2"], "weights requires mode hybrid"),
        (["bm25", "query", "--corpus", "docs", "--top_k", "0"], "top_k must be at least 1, not 0"),
        (["./nowhere", "query", "--corpus", "docs"], "./nowhere is not a folder"),
    ],
)
def test_mistakes_are_one_line(
    corpus: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("revela-hub: error: ") and message in last


def test_a_search_by_words_waits_for_no_deep_learning(corpus: Path) -> None:
    code = "\n".join(
        [
            "import sys",
            "from revela_hub.cli.main import main",
            "assert main(['search', 'bm25', 'sediment', '--corpus', 'docs']) == 0",
            "assert not {'torch', 'transformers', 'sentence_transformers', 'datasets'} & set(sys.modules)",
        ]
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_query_without_a_hit_says_why(
    corpus: Path, tiny_sparse_folder: Path, search: Search, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in tiny_sparse_folder.rglob("*.safetensors"):
        weights = load_file(file)
        weights["cls.predictions.bias"] -= 100  # every weight of a term is 0
        save_file(weights, file, metadata={"format": "pt"})
    hybrid = ["--mode", "hybrid", "--parts", "sparse", "bm25"]
    for model, query, options in (
        ("bm25", "the zebra", []),
        (tiny_sparse_folder, "river", []),  # --mode sparse
        (tiny_sparse_folder, "zebra", hybrid),
    ):
        assert main(["search", str(model), query, "--corpus", "docs", *options]) == 0
        assert "no passage has a word of the query" in capsys.readouterr().out
    assert search(tiny_sparse_folder, "rivers", "--corpus", "docs", *hybrid)[0]["hits"]
    [record] = search("bm25", "zebra", "--corpus", "docs")
    assert record["hits"] == [] and record["nothing_found"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no names of files that are not UTF-8")
@pytest.mark.parametrize("kind", ["bm25", "dense", "sparse"])
def test_lone_surrogates_in_queries_and_names_of_files(
    corpus: Path,
    kind: str,
    search: Search,
    retriever_folder: Path,
    tiny_sparse_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Input of a terminal with another encoding, or half of an emoji, gives no traceback."""
    model = {"bm25": "bm25", "dense": retriever_folder, "sparse": tiny_sparse_folder}[kind]
    Path(os.fsdecode(b"docs/caf\xe9.txt")).write_text("the rivers of the north")
    words = [model, "--corpus", "docs", "--mode", kind]
    words += [] if kind == "bm25" else ["--device", "cpu", "--query_prompt", "\ud83d "]
    [found] = search(*words, "--query", "rivers \ud83d caf\udce9")
    assert found["query"] == "rivers \ufffd caf\ufffd"
    assert "docs/caf\\udce9.txt" in [hit["path"] for hit in found["hits"]]
    monkeypatch.setattr("sys.stdin", io.StringIO("rivers \udcff\n\ud800\n"))
    assert len(search(*words)) == 2


def test_a_text_that_the_output_has_not_is_escaped(tmp_path: Path) -> None:
    """A stream of bytes in ASCII, as under LC_ALL=C: the result is there all the same."""
    (tmp_path / "docs.jsonl").write_text(
        '{"_id": "d", "text": "rivers \\u00e9 \\ud83d\\ude00"}\n{"_id": "e", "text": "stones"}'
    )
    words = [sys.executable, "-m", "revela_hub", "search", "bm25", "rivers", "--corpus", "docs.jsonl", "--json"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["hits"][0]["text"] == "rivers \u00e9 \U0001f600"


def test_an_adapted_retriever_is_searched_with_its_own_bm25(
    corpus: Path, retriever_folder: Path, search: Search
) -> None:
    folder = corpus / "adapted"
    folder.mkdir()
    shutil.copytree(retriever_folder, "plain")
    retriever_folder.rename(folder / "retriever")
    hybrid = folder / "retriever" / "hybrid.json"
    hybrid.write_text(json.dumps({"bm25_weight": 0.9, "bm25": {"split_identifiers": True}}))
    for name in ("widthOf", "height_of_a_box", "depth"):
        (corpus / "docs" / f"{name}.txt").write_text(f"{name} and the width, the height and the depth of the {name}")
    weights = ["--mode", "hybrid", "--weights", "0.1", "0.9"]  # in the order of the parts: dense, bm25
    found, *same = (
        search(*words, "--query", "width height", "--corpus", "docs")
        for words in (
            ["adapted"],
            ["adapted/retriever"],
            ["adapted", "--mode", "hybrid"],
            ["plain", *weights, "--bm25_split_identifiers", "true"],
        )
    )
    assert all(each == found for each in same)
    for words in (
        ["adapted", "--weights", "0.5", "0.5"],
        ["adapted", "--bm25", "anserini"],
        ["plain", *weights],
    ):
        assert search(*words, "--query", "width height", "--corpus", "docs") != found
    for wrong in (-0.1, 1.5, float("nan")):
        hybrid.write_text(json.dumps({"bm25_weight": wrong}))
        assert main(["search", "adapted", "width", "--corpus", "docs"]) == 2
    assert search("adapted", "width", "--corpus", "docs", "--mode", "dense")
