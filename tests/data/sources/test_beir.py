"""BEIR folders and queries, and the errors of damaged ones."""

import gzip
import json
import logging
from pathlib import Path

import pytest

from revela_hub.data import read_documents
from revela_hub.data.mixture.rows import Corpus
from revela_hub.data.sources.beir import read_beir, read_beir_pairs, read_queries
from revela_hub.data.sources.source import Source
from revela_hub.errors import UserError

CORPUS = [
    {"_id": "d1", "title": "Rivers", "text": "carry sediment."},
    {"_id": "d2", "title": "", "text": " no title "},
    {"_id": 3, "text": "a number as id", "metadata": {}},
]
QUERIES = [{"_id": "q1", "text": "what do rivers carry?"}, {"_id": "q2", "text": "judged in train"}]
HEADER = "query-id\tcorpus-id\tscore\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "task"
    (path / "qrels").mkdir(parents=True)
    (path / "corpus.jsonl").write_text("\n".join(map(json.dumps, CORPUS)) + "\n\n")
    (path / "queries.jsonl").write_text("\n".join(map(json.dumps, QUERIES)))
    (path / "qrels" / "test.tsv").write_text(f"{HEADER}q1\td1\t2\nq1\t3\t0\n")
    (path / "qrels" / "train.tsv").write_text(f"{HEADER}q2\td2\t1\r\n")
    return path


@pytest.mark.parametrize("compressed", [False, True])
def test_corpus_queries_and_judgements_of_a_split(folder: Path, compressed: bool) -> None:
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv") if compressed else ():
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
        (folder / name).unlink()
    task = read_beir(folder)
    assert task.corpus == {"d1": "Rivers carry sediment.", "d2": "no title", "3": "a number as id"}
    assert task.queries == {"q1": "what do rivers carry?"}
    assert task.qrels == {"q1": {"d1": 2, "3": 0}}
    assert task.name == "task/test"
    train = read_beir(str(folder), "train")
    assert (train.queries, train.qrels) == ({"q2": "judged in train"}, {"q2": {"d2": 1}})
    assert list(read_beir_pairs(folder, "test")) == [("what do rivers carry?", "Rivers carry sediment.")]
    assert read_queries(folder) == {"q1": "what do rivers carry?", "q2": "judged in train"}


def test_unknown_ids_and_empty_texts_are_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (folder / "qrels" / "test.tsv").open("a") as stream:
        stream.write("q1\tgone\t1\nq9\td1\t1\n")
    with (folder / "corpus.jsonl").open("a") as stream:
        stream.write('{"_id": "e1", "title": "", "text": ""}\n{"_id": "e2", "text": "\\n"}\n')
    with caplog.at_level(logging.WARNING):
        task = read_beir(folder)
    assert task.qrels == {"q1": {"d1": 2, "3": 0, "gone": 1}}  # a document that cannot be found lowers the score
    assert "1 id missing from the queries file (skipped) (first: q9)" in caplog.text
    assert "1 id missing from the corpus (counted as not retrieved) (first: gone)" in caplog.text
    assert "2 ids empty (first: e1)" in caplog.text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n{"_id": \n', r"corpus\.jsonl:2: not valid JSON"),
        ("corpus.jsonl", '{"_id": "a", "contents": "x"}', r'jsonl:1: "_id" and "text"'),
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}', r"jsonl:2: duplicate"),
        ("corpus.jsonl", b'{"_id": "a", "text": "\xff\xfe"}\n', r"corpus\.jsonl: not UTF-8"),
        ("qrels/test.tsv", "q1\td1\t1\n", r"test\.tsv:1: "),
        *(("qrels/test.tsv", f"{HEADER}{line}\n", r"test\.tsv:2: ") for line in ("q1 d1 1", "q1\td1\thigh", "\td1\t1")),
        ("qrels/test.tsv", f"{HEADER}q1\td1\t1\nq1\td1\t0\n", r"tsv:3: .*grade 0 here and 1"),
        ("qrels/test.tsv", f"{HEADER}q1\tgone\t1\n", "no document .* is relevant"),
    ],
)
def test_broken_files_are_named_with_the_line(folder: Path, file: str, content: str | bytes, message: str) -> None:
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        read_beir(folder)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no corpus\.jsonl .*elsewhere"):
        read_beir(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"no split 'dev' in .*qrels; the splits are test, train"):
        read_beir(folder, "dev")


def test_ids_meet_whatever_the_white_space_around_them(folder: Path) -> None:
    (folder / "corpus.jsonl").write_text('{"_id": " d1 ", "text": "a sea"}\n{"_id": "d2\\u00a0", "text": "a lake"}\n')
    (folder / "queries.jsonl").write_text('{"_id": "q1\\t", "text": "where"}\n')
    (folder / "qrels" / "test.tsv").write_text(f"{HEADER}q1 \td1\t1\n q1\t d2\t1\n")
    task = read_beir(folder)
    assert task.corpus == {"d1": "a sea", "d2": "a lake"}
    assert task.qrels == {"q1": {"d1": 1, "d2": 1}} and task.queries == {"q1": "where"}
    assert sorted(read_beir_pairs(folder, "test")) == [("where", "a lake"), ("where", "a sea")]
    assert read_queries(folder) == {"q1": "where"}
    corpus = Corpus(Source(str(folder / "corpus.jsonl")), folder.parent)
    assert list(corpus) == ["a sea", "a lake"] and corpus.find("d2") == "a lake" and corpus.find("d3") is None
    assert [document.id for document in read_documents(folder / "corpus.jsonl")] == ["d1", "d2"]


def test_queries_of_lines_json_lines_and_tables(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {
        "log.txt": "how do  rivers bend\n\nwhy is the sea salty\nhow do rivers bend?\n",
        "log.jsonl": '{"query": "one"}\n{"_id": "q7", "question": "two"}\n{"text": "three", "query": "unused"}\n',
        "log.csv": "day,query\n1,where is it\n2,where is it\n3,why\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert list(read_queries(tmp_path / "log.txt").values()) == ["how do rivers bend", "why is the sea salty"]
    assert list(read_queries(tmp_path / "log.jsonl").values()) == ["one", "two", "three"]
    assert read_queries(tmp_path / "log.jsonl")["q7"] == "two"
    assert list(read_queries(tmp_path / "log.csv").values()) == ["where is it", "why"]
    assert not caplog.messages
