"""The rows of a source: JSON lines, arrays, tables and parquet files, and what would be lost without an error."""

import csv
import gzip
import logging
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from revela_hub.data import ReadReport, Source, read_documents
from revela_hub.data.sources.rows import read_rows
from revela_hub.errors import UserError


def texts(path: Path | str) -> list[str]:
    return [row.text("text") for row in read_rows(Source(str(path)))]


def test_other_files_of_a_folder_are_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "README.md").write_text("About these rows.")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with caplog.at_level(logging.WARNING):
        assert [row.text("text") for row in read_rows(Source(str(tmp_path), max_documents=1))] == ["a"]
    assert "skipped 1 file without rows" in caplog.text
    with pytest.raises(UserError, match="README.md: rows are read from"):
        texts(tmp_path / "README.md")


def test_parquet_files_are_read_like_json_lines(tmp_path: Path) -> None:
    columns = {"text": ["Rivers carry sediment.", None, "Mud."], "title": ["Water"] * 3, "n": list(range(3))}
    parquet.write_table(pa.table(columns), tmp_path / "part-0.parquet", row_group_size=2)
    (tmp_path / "part-1.jsonl").write_text('{"text": "Stones."}\n')
    rows = list(read_rows(Source(str(tmp_path))))
    assert len(rows) == 4 and rows[2].columns == {"text": "Mud.", "title": "Water", "n": 2}
    assert rows[2].where.endswith("part-0.parquet:3")
    report = ReadReport()
    documents = list(read_documents(tmp_path, report=report))
    assert report.documents == 3 and report.skipped["empty"] == 1
    assert (documents[0].text, documents[-1].text) == ("Water\n\nRivers carry sediment.", "Stones.")
    with pytest.raises(UserError, match=r"part-0\.parquet:1: no column 'body'; the columns are 'text', 'title', 'n'"):
        list(read_documents(tmp_path, text_column="body"))


@pytest.mark.parametrize(("ending", "mark"), [(".csv", ","), (".csv", ";"), (".tsv", "\t")])
def test_tables_that_are_named_are_read_by_row(ending: str, mark: str, tmp_path: Path) -> None:
    file = tmp_path / f"notes{ending}"
    rows = [["_id", "title", "text"], ["007", "", "one, two"], ["b", "T", 'a "word";\ttwo\nlines'], ["c", "", ""]]
    with open(file, "w", encoding="utf-8-sig", newline="") as out:
        csv.writer(out, delimiter=mark).writerows(rows)
    for path in (file, f"{tmp_path}/*{ending}"):
        report = ReadReport()
        found = [(document.id, document.text) for document in read_documents(path, report=report)]
        assert found == [("007", "one, two"), ("b", 'T\n\na "word";\ttwo\nlines')]
        assert report.skipped == {"empty": 1}
    [whole] = read_documents(tmp_path)  # in a folder, it is text
    assert whole.kind == "code" and "_id" in whole.text
    file.write_text(f"{mark}text{mark}\n0{mark}x{mark}NA\n")  # columns without a name, as pandas writes them
    assert texts(file) == ["x"]


def test_an_array_that_is_named_is_read_by_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('\n[\n  {"text": "Rivers.", "query": "water"},\n  {"text": "Mud."}\n]')
    assert [document.text for document in read_documents(file)] == ["Rivers.", "Mud."]
    assert [row.where for row in read_rows(Source(str(file)))] == [f"{file}:1", f"{file}:2"]
    for source in (tmp_path, f"{tmp_path}/*.json", {"path": str(file), "kind": "code"}):
        [whole] = read_documents(source)
        assert whole.kind == "code"
    file.write_text('{"text": "Rivers."}')
    assert next(read_documents(file)).kind == "code"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        # A quote that is never closed, or that the next row would close: the rows between would be one text.
        ("a.csv", 'id,text\n1,a 3"" pipe\n2,"the river\n3,the sea\n4,the lake\n', r"a\.csv:"),
        ("a.tsv", 'text\tb\nwhere\tthere\n"To be" or not\tHamlet\nwhy\tso\n"Rivers" and lakes\twater\n', r"a\.tsv:2"),
        ("a.csv", "text,title\nx,y,z\n", r"a\.csv:2: more cells than columns"),
        # Of two columns with one name, only one would be read.
        ("a.jsonl", '{"id": 1, "text": "kept", "text": "lost"}\n', r"a\.jsonl:1.*same name"),
        ("a.json", '[{"id": 1, "text": "kept", "text": "lost"}]', r"a\.json.*same name"),
        ("a.json", '[{"text": "Rivers."}, 2]', r"a\.json:1"),
        ("a.parquet", b"PAR1", r"a\.parquet:0: damaged"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 1000, mtime=0)[:-20], r"a\.jsonl\.gz:\d+: damaged"),
        ("a.csv", "text;positive\nGröße;Maße\n".encode("cp1252"), r"a\.csv:0: damaged"),
    ],
)
def test_what_would_be_lost_is_an_error(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        texts(tmp_path / name)
