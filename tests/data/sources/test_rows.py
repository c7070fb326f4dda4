"""The rows of a source: files of several forms in one folder, and BEIR folders as they are met."""

import csv
import gzip
import json
import logging
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from revela_hub.data.mixture.rows import read_task
from revela_hub.data.mixture.tasks import parse_mixture
from revela_hub.data.sources.beir import read_beir, read_beir_pairs
from revela_hub.data.sources.documents import read_documents
from revela_hub.data.sources.queries import read_queries
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.rows import read_rows
from revela_hub.data.sources.source import Source
from revela_hub.errors import UserError
from revela_hub.retrieval.mining.sources import read_corpus


def test_other_files_of_a_folder_are_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "README.md").write_text("About these rows.")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with caplog.at_level(logging.WARNING):
        assert [row.columns["text"] for row in read_rows(Source(str(tmp_path), max_documents=1))] == ["a"]
    assert "skipped 1 file without rows" in caplog.text
    with pytest.raises(
        UserError,
        match="README.md: rows are read from",
    ):
        list(read_rows(Source(str(tmp_path / "README.md"))))


def test_parquet_files_are_read_like_json_lines(tmp_path: Path) -> None:
    columns = {
        "text": ["Rivers carry sediment.", None, "Mud."] * 1000,
        "title": ["Water"] * 3000,
        "n": list(range(3000)),
    }
    parquet.write_table(pa.table(columns), tmp_path / "part-0.parquet", row_group_size=700)
    (tmp_path / "part-1.jsonl").write_text('{"text": "Stones."}\n')
    rows = list(read_rows(Source(str(tmp_path))))
    assert len(rows) == 3001 and rows[2999].columns == {"text": "Mud.", "title": "Water", "n": 2999}
    assert rows[2999].where.endswith("part-0.parquet:3000")
    report = ReadReport()
    documents = list(read_documents([str(tmp_path)], report=report))
    assert report.documents == 2001 and report.skipped["empty"] == 1000
    assert (documents[0].text, documents[-1].text) == ("Water\n\nRivers carry sediment.", "Stones.")
    assert list(read_corpus(str(tmp_path / "part-0.parquet"), "text"))[:1] == ["Water Rivers carry sediment."]
    with pytest.raises(UserError, match=r"part-0\.parquet:1: no column 'body'; the columns are 'text', 'title', 'n'"):
        list(read_documents([str(tmp_path)], text_column="body"))


@pytest.mark.parametrize("cut", [0, 4, 100])
def test_a_damaged_parquet_file(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": ["Rivers carry sediment."] * 50}), file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"rows\.parquet: damaged or not a parquet file"):
        list(read_rows(Source(str(file))))


def test_parquet_files_are_streamed(tmp_path: Path) -> None:
    """Reading 400 MB of text in row groups of 4 MB needs a small part of that; in a separate process."""
    file = tmp_path / "large.parquet"
    with parquet.ParquetWriter(file, pa.schema([("text", pa.large_string())]), compression="none") as writer:
        for number in range(100):
            writer.write_table(pa.table({"text": pa.array([f"{number} " * 1000] * 1500, pa.large_string())}))
    code = f"""
import resource
from revela_hub.data.sources.documents import read_documents
next(iter(read_documents([{str(file)!r}])))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(sum(len(document.text) for document in read_documents([{str(file)!r}])) > 4e8)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    large, mebibytes = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert large == "True" and float(mebibytes) < 60


def test_a_compressed_beir_folder_is_one(tmp_path: Path) -> None:
    """Only queries.jsonl told one: the queries of a folder with queries.jsonl.gz were taken for passages of its corpus."""
    corpus = [{"_id": "d1", "title": "Rivers", "text": "carry sediment."}, {"_id": "d2", "text": "Mud."}]
    for name, rows in {"corpus": corpus, "queries": [{"_id": "q", "text": "what do rivers carry?"}]}.items():
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq\td1\t1\nq\td2\t0\n")
    assert list(read_corpus(str(tmp_path), "text")) == ["Rivers carry sediment.", "Mud."]
    assert list(read_beir_pairs(tmp_path, "train")) == [("what do rivers carry?", "Rivers carry sediment.")]


@pytest.mark.parametrize(("ending", "mark"), [(".csv", ","), (".csv", ";"), (".tsv", "\t")])
def test_tables_that_are_named_are_read_by_row(ending: str, mark: str, tmp_path: Path) -> None:
    file = tmp_path / f"notes{ending}"
    rows = [["_id", "title", "text"], ["a", "", "one, two"], ["b", "T", 'a "word";\ttwo\nlines'], ["c", "", ""]]
    with open(file, "w", encoding="utf-8-sig", newline="") as out:
        csv.writer(out, delimiter=mark).writerows(rows)
    expected = [("a", "one, two"), ("b", 'T\n\na "word";\ttwo\nlines')]
    for path in (file, f"{tmp_path}/*{ending}"):
        report = ReadReport()
        assert [(document.id, document.text) for document in read_documents(str(path), report=report)] == expected
        assert report.skipped == {"empty": 1}
    assert [row.columns["title"] for row in read_rows(Source(str(file)))] == ["", "T", ""]
    [whole] = read_documents(str(tmp_path))  # in a folder, it is text
    assert whole.kind == "code" and "_id" in whole.text
    file.write_text(f"body{mark}title\nx{mark}y\n")
    with pytest.raises(UserError, match=rf"notes\{ending}:2: no column 'text'; the columns are 'body', 'title'"):
        list(read_documents(str(file)))
    file.write_text(f"{mark}text{mark}title\n0{mark}x{mark}y\n")  # an index without a name, as pandas writes it
    assert [document.text for document in read_documents(str(file))] == ["y\n\nx"]
    file.write_text(f"text{mark}title\nx{mark}y{mark}z\n")
    with pytest.raises(UserError, match=rf"notes\{ending}:2: more cells than the 2 columns of the first line"):
        list(read_documents(str(file)))
    file.write_text("")
    with pytest.raises(UserError, match="no documents"):
        list(read_documents(str(file)))


def test_an_array_that_is_named_is_read_by_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('\n[\n  {"text": "Rivers.", "query": "water"},\n  {"text": "Mud."}\n]')
    assert [each.text for each in read_documents(file)] == ["Rivers.", "Mud."]
    assert [row.where for row in read_rows(Source(str(file)))] == [f"{file}:1", f"{file}:2"]
    for source in (tmp_path, f"{tmp_path}/*.json", {"path": str(file), "kind": "code"}):
        [whole] = read_documents(source)
        assert whole.kind == "code"
    file.write_text('[{"text": "Rivers."}, 2]')
    with pytest.raises(UserError, match=r"rows\.json:2: int instead of a JSON object"):
        list(read_documents(file))
    file.write_text('[{"text": "Rivers."}')
    with pytest.raises(UserError, match=r"rows\.json: "):
        list(read_documents(file))
    file.write_text('{"text": "Rivers."}')
    assert next(read_documents(file)).kind == "code"


@pytest.mark.parametrize("name", ["ROWS.CSV", "Rows.TSV", "ROWS.JSONL", "rows.ndjson", "ROWS.JSONL.GZ"])
def test_endings_in_upper_case_and_the_other_name_of_json_lines(name: str, tmp_path: Path) -> None:
    content = b"text\nRivers carry sediment.\n" if name[-2:] == "SV" else b'{"text": "Rivers carry sediment."}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".GZ") else content)
    for path in (tmp_path / name, f"{tmp_path}/*{Path(name).suffix}"):
        assert [row.columns["text"] for row in read_rows(Source(str(path)))] == ["Rivers carry sediment."]
        assert [document.text for document in read_documents(path)] == ["Rivers carry sediment."]
    assert list(read_queries(tmp_path / name).values()) == ["Rivers carry sediment."]


def test_a_quote_that_is_never_closed(tmp_path: Path) -> None:
    """The rows behind it would be one long passage."""
    file = tmp_path / "notes.csv"
    file.write_text('id,text\n1,a 3"" pipe\n2,"the river\n3,the sea\n4,the lake\n')
    with pytest.raises(UserError, match=r"notes\.csv: "):
        list(read_rows(Source(str(file))))
    file.write_text('id,text\n1,"a ""long"" pipe\nof 3"" "\n2,a 3" pipe\n')
    assert [row.columns["text"] for row in read_rows(Source(str(file)))][1:] == ['a 3" pipe']


def test_a_table_that_does_not_quote_its_cells(tmp_path: Path) -> None:
    """The quote of the next row would close this one, and the rows between would be lost."""
    file = tmp_path / "pairs.tsv"
    file.write_text('anchor\tpositive\nwhere\tthere\n"To be" or not\tHamlet\nwhy\tso\n"Rivers" and lakes\twater\n')
    with pytest.raises(UserError, match=r"pairs\.tsv: after line 2"):
        list(read_rows(Source(str(file))))


def test_queries_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("day,query\n1,where is it\n2,where is it\n3,why\n")
    assert list(read_queries(tmp_path / "log.csv").values()) == ["where is it", "why"]


def test_letters_that_are_lost_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "pairs.csv"
    file.write_bytes("anchor;positive\nGröße;Maße\n".encode("cp1252"))
    with caplog.at_level(logging.WARNING):
        assert [dict(row.columns) for row in read_rows(Source(str(file)))] == [
            {"anchor": "Gr\ufffd\ufffde", "positive": "Ma\ufffde"}
        ]
    assert "pairs.csv: invalid UTF-8" in caplog.text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "id,text,text\n1,kept,lost\n"),
        ("a.tsv", "id\ttext\ttext\n1\tkept\tlost\n"),
        ("a.csv", "id;text;text\n1;kept;lost\n"),
        ("a.jsonl", '{"id": 1, "text": "kept", "text": "lost"}\n'),
        ("a.json", '[{"id": 1, "text": "kept", "text": "lost"}]'),
    ],
)
def test_two_columns_with_one_name_are_an_error(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}.*'text'"):
        list(read_rows(Source(str(tmp_path / name))))


def test_two_parquet_columns_with_one_name_are_an_error(tmp_path: Path) -> None:
    parquet.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), tmp_path / "a.parquet"
    )
    with pytest.raises(UserError, match=r"a\.parquet.*'text'"):
        list(read_rows(Source(str(tmp_path / "a.parquet"))))


def test_empty_columns_of_a_spreadsheet_may_repeat(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,,\nfox,,\n")
    assert [row.columns["text"] for row in read_rows(Source(str(tmp_path / "a.csv")))] == ["fox"]


def test_ids_meet_whatever_the_white_space_around_them(tmp_path: Path) -> None:
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text('{"_id": " d1 ", "text": "a sea"}\n{"_id": "d2\\u00a0", "text": "a lake"}\n')
    (folder / "queries.jsonl").write_text('{"_id": "q1\\t", "text": "where"}\n')
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1 \td1\t1\n q1\t d2\t1\n")
    task = read_beir(folder)
    assert task.corpus == {"d1": "a sea", "d2": "a lake"}
    assert task.qrels == {"q1": {"d1": 1, "d2": 1}} and task.queries == {"q1": "where"}
    assert sorted(read_beir_pairs(folder, "test")) == [("where", "a lake"), ("where", "a sea")]
    assert read_queries(folder) == {"q1": "where"}
    assert [document.id for document in read_documents(str(folder / "corpus.jsonl"))] == ["d1", "d2"]
    [task_of_mixture] = parse_mixture(
        {"tasks": [{"name": "a", "type": "retrieval", "source": str(folder), "split": "test", "instruction": "find"}]}
    ).tasks
    rows = read_task(task_of_mixture, tmp_path).rows
    assert sorted(rows["positive"]) == ["a lake", "a sea"]
