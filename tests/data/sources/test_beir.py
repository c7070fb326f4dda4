"""BEIR folders, and the errors of damaged ones."""

import gzip
import json
import logging
from pathlib import Path

import pytest

from revela_hub.data.sources.beir import read_beir
from revela_hub.errors import UserError

CORPUS = [
    {"_id": "d1", "title": "Rivers", "text": "carry sediment."},
    {"_id": "d2", "title": "", "text": " no title "},
    {"_id": 3, "text": "a number as id", "metadata": {}},
]
QUERIES = [{"_id": "q1", "text": "what do rivers carry?"}, {"_id": "q2", "text": "judged in train"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "task"
    (path / "qrels").mkdir(parents=True)
    (path / "corpus.jsonl").write_text("\n".join(map(json.dumps, CORPUS)) + "\n\n")
    (path / "queries.jsonl").write_text("\n".join(map(json.dumps, QUERIES)))
    (path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\t3\t0\n")
    (path / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\r\nq2\td2\t1\r\n")
    return path


def test_reads_corpus_queries_and_judgements_of_the_split(folder: Path) -> None:
    task = read_beir(folder)
    assert task.corpus == {"d1": "Rivers carry sediment.", "d2": "no title", "3": "a number as id"}
    assert task.queries == {"q1": "what do rivers carry?"}
    assert task.qrels == {"q1": {"d1": 2, "3": 0}}
    assert task.name == "task/test"
    train = read_beir(str(folder), "train")
    assert (train.queries, train.qrels) == ({"q2": "judged in train"}, {"q2": {"d2": 1}})


def test_reads_compressed_files_the_same(folder: Path) -> None:
    plain = read_beir(folder)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        path = folder / name
        (folder / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert read_beir(folder) == plain


def test_unknown_ids_in_judgements_are_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (folder / "qrels" / "test.tsv").open("a") as stream:
        stream.write("q1\tgone\t1\nq9\td1\t1\n")
    with caplog.at_level(logging.WARNING):
        task = read_beir(folder)
    assert task.qrels == {"q1": {"d1": 2, "3": 0, "gone": 1}}  # a document that cannot be found lowers the score
    assert "1 judged query missing from the queries file (skipped) (first: q9)" in caplog.text
    assert "1 judged document missing from the corpus (counted as not retrieved) (first: gone)" in caplog.text


def test_empty_texts_are_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": " "}\n')
    with (folder / "corpus.jsonl").open("a") as stream:
        stream.write('{"_id": "e1", "title": "", "text": ""}\n{"_id": "e2", "text": "\\n"}\n')
    with caplog.at_level(logging.WARNING):
        read_beir(folder)
    assert "1 empty query (first: " in caplog.text and "2 empty documents (first: e1)" in caplog.text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n{"_id": \n', r"corpus\.jsonl:2: not valid JSON"),
        ("corpus.jsonl", '\n["a"]\n', r"corpus\.jsonl:2: list instead of a JSON object"),
        ("corpus.jsonl", '{"id": "a", "text": "x"}', r'corpus\.jsonl:1: "_id"'),
        ("corpus.jsonl", '{"_id": "a", "contents": "x"}', r'jsonl:1: "_id" and "text"'),
        ("corpus.jsonl", '{"_id": "a", "text": null}', r"jsonl:1: "),
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}', r"jsonl:2: duplicate \"_id\" 'a'"),
        ("corpus.jsonl", "", r"corpus\.jsonl is empty"),
        ("corpus.jsonl", b'{"_id": "a", "text": "\xff\xfe"}\n', r"corpus\.jsonl: not UTF-8"),
        ("queries.jsonl", '{"_id": "other", "text": "x"}', r"none of the queries judged in .*test\.tsv is in"),
        ("qrels/test.tsv", "q1\td1\t1\n", r"test\.tsv:1: the first line must be the header"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1 d1 1\n", r"test\.tsv:2: "),
        (
            "qrels/test.tsv",
            "query-id\tcorpus-id\tscore\nq1\td1\thigh\n",
            r"test\.tsv:2: ",
        ),
        (
            "qrels/test.tsv",
            "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td1\t0\n",
            r"tsv:3: query q1, document d1 has grade 0 here and 1",
        ),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t0\n", r"test\.tsv: no grade is above 0"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n", r"test\.tsv has no judgements"),
    ],
)
def test_broken_files_are_named_with_the_line(folder: Path, file: str, content: str | bytes, message: str) -> None:
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        read_beir(folder)


def test_broken_compressed_file_is_named(folder: Path) -> None:
    whole = gzip.compress((folder / "corpus.jsonl").read_bytes())
    (folder / "corpus.jsonl").unlink()
    for content in (whole[: len(whole) // 2], b"not gzip"):
        (folder / "corpus.jsonl.gz").write_bytes(content)
        with pytest.raises(UserError, match=r"corpus\.jsonl\.gz: damaged or not gzip"):
            read_beir(folder)


def test_missing_files_are_named_with_what_is_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder .*elsewhere"):
        read_beir(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"no split 'dev' in .*qrels; the splits are test, train"):
        read_beir(folder, "dev")
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(
        UserError, match=r"no corpus\.jsonl \(or corpus\.jsonl\.gz\) in .*, which contains qrels, queries\.jsonl"
    ):
        read_beir(folder)


@pytest.mark.parametrize(
    ("judged", "message"),
    [
        (
            "q1\td1\t99999999999999999999",
            "test.tsv:2: ",
        ),
        ("q1\td1\t1_0", "test.tsv:2: "),
        ("q1\td1\tnan", "test.tsv:2: "),
        ("\td1\t1", "test.tsv:2: "),
        ("q1\t\t1", "test.tsv:2: "),
        ("q1\tgone\t1", "none of the relevant documents in .*test.tsv is in .*corpus.jsonl"),
        (b"q1\td\xff\t1", "test.tsv: not UTF-8 text"),
    ],
)
def test_judgements_that_join_nothing_are_an_error(folder: Path, judged: str | bytes, message: str) -> None:
    content = judged if isinstance(judged, bytes) else judged.encode()
    (folder / "qrels" / "test.tsv").write_bytes(b"query-id\tcorpus-id\tscore\n" + content + b"\n")
    with pytest.raises(UserError, match=message):
        read_beir(folder)
