import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from revela_hub.data import Document, ReadReport, Source, read_documents
from revela_hub.data.sources.files import local_files
from revela_hub.data.sources.source import parse_source, parse_sources
from revela_hub.errors import UserError


def write_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    opened = gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w")
    with opened as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def ids(documents: Iterable[Document], root: Path) -> list[str]:
    return [Path(document.id).relative_to(root).as_posix() for document in documents]


def test_folder_in_the_order_of_names_with_kinds(tmp_path: Path) -> None:
    for name in ("b.txt", "a.py", "sub/c.md", "sub/Makefile", "README", "script"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"#!text of {name}" if name == "script" else f"text of {name}")
    report = ReadReport()

    documents = list(read_documents(tmp_path, report=report))

    assert ids(documents, tmp_path) == ["README", "a.py", "b.txt", "script", "sub/Makefile", "sub/c.md"]
    assert [document.kind for document in documents] == ["text", "code", "text", "code", "code", "text"]
    assert documents[1].text == "text of a.py"
    assert documents[1].path == documents[1].id == str(tmp_path / "a.py")
    assert str(report) == "6 documents"
    assert {document.kind for document in read_documents(tmp_path, kind="code")} == {"code"}


def test_everything_that_is_skipped_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in (".git", "__pycache__", "node_modules", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file.txt").write_text("not to be read")
    (tmp_path / ".hidden.txt").write_text("not to be read")
    (tmp_path / "app.min.js").write_text("not to be read")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\t\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG" + b"." * 8000 + b"\0")
    (tmp_path / "late-nul.txt").write_bytes(b"text " * 2000 + b"\0")
    (tmp_path / "latin.txt").write_bytes("déjà vu".encode("latin-1"))
    (tmp_path / "large.txt").write_bytes(b"x" * (1024 * 1024 + 1))
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "gone")
    (tmp_path / "zz-loop").symlink_to(tmp_path, target_is_directory=True)
    report = ReadReport()

    source = Source(str(tmp_path), exclude=("*.min.js", "tests"), max_file_mib=1)
    documents = list(read_documents(source, report=report))

    assert ids(documents, tmp_path) == ["late-nul.txt", "latin.txt"]
    assert documents[1].text == "d\ufffdj\ufffd vu"
    assert report.skipped == {
        "hidden": 2,
        "generated": 2,
        "excluded": 2,
        "empty": 2,
        "binary": 1,
        "too large": 1,
        "unreadable": 1,
        "already read": 1,
    }
    assert str(report) == (
        "2 documents; skipped: 2 empty, 2 excluded, 2 generated, 2 hidden, 1 already read, 1 binary (.png 1), 1 too large, "
        "1 unreadable; 1 file had invalid UTF-8 (replaced)"
    )
    assert not caplog.messages
    assert list(read_documents(source)) == documents  # without a report
    assert caplog.messages == [f"{tmp_path}: {'; '.join(report.remarks())}"]


def test_json_lines_fields(tmp_path: Path) -> None:
    rows = [
        {"_id": "w-1", "title": "Rivers", "text": "They flow."},
        {"_id": 2, "title": "They", "text": "They begin with the title."},
        {"_id": 3, "title": "Go", "text": "Google designed it."},
        {"text": None},
        {"body": "x", "text": "No id, no title."},
    ]
    path = write_json_lines(tmp_path / "rows.jsonl", rows)
    report = ReadReport()

    documents = list(read_documents(path, report=report))

    assert [(document.id, document.text, document.path, document.kind) for document in documents] == [
        ("w-1", "Rivers\n\nThey flow.", None, "text"),
        ("2", "They begin with the title.", None, "text"),
        ("3", "Go\n\nGoogle designed it.", None, "text"),
        (f"{path}:5", "No id, no title.", None, "text"),
    ]
    assert report.skipped == {"empty": 1}
    without = next(read_documents({"path": str(path), "title_column": "", "id_column": "", "kind": "code"}))
    assert (without.id, without.text, without.kind) == (f"{path}:1", "They flow.", "code")
    several = read_documents([path, path], text_column=["text", "title"], title_column="", max_documents=1)
    assert [document.text for document in several] == ["They flow.\n\nRivers"] * 2  # one of each source


def test_merged_rows(tmp_path: Path) -> None:
    rows = [("Aaron", "Aaron is", "p1"), ("Aaron", "a prophet.", "p2"), ("Aar", "A river.", "p3"), ("Aaron", "x", "p4")]
    path = write_json_lines(tmp_path / "p.jsonl", ({"title": t, "text": x, "docid": d} for t, x, d in rows))

    source = {"path": str(path), "merge_column": "title", "title_column": "", "id_column": "docid"}
    documents = list(read_documents(source))

    assert [(document.id, document.text) for document in documents] == [
        ("p1", "Aaron is a prophet."),
        ("p3", "A river."),
        ("p4", "x"),
    ]


def test_patterns(tmp_path: Path) -> None:
    for name in ("a/one.md", "a/b/two.md", "a/three.txt", "a/.hidden.md", "a/[x].md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a" / "z").symlink_to(".")  # a loop

    assert ids(read_documents(f"{tmp_path}/**/*.md"), tmp_path) == ["a/[x].md", "a/b/two.md", "a/one.md"]
    assert ids(read_documents(f"{tmp_path}/a/[x].md"), tmp_path) == ["a/[x].md"]  # there is a file of this name
    assert ids(read_documents(f"{tmp_path}/**/*.md", exclude=["one*"]), tmp_path) == ["a/[x].md", "a/b/two.md"]
    with pytest.raises(UserError, match="no such file or folder"):
        list(read_documents(f"{tmp_path}/*.rst"))


def test_of_a_beir_folder_only_the_passages_are_text(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "corpus.jsonl.gz", [{"_id": "d1", "title": "", "text": "Rivers carry sediment."}])
    write_json_lines(tmp_path / "queries.jsonl", [{"_id": "q1", "text": "what do rivers carry"}])
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    report = ReadReport()
    assert [document.id for document in read_documents(tmp_path, report=report)] == ["d1"]
    assert report.skipped == {"with queries or judgements": 2}


def dataset_folder(tmp_path: Path, form: str) -> str:
    dataset = Dataset.from_dict({"body": ["Alpha.", "Beta."], "name": ["a", "b"], "text": [1, 2]})
    folder = tmp_path / form
    folder.mkdir()
    if form == "parquet":
        dataset.to_parquet(str(folder / "train-00000.parquet"))
    elif form == "json":
        dataset.to_json(str(folder / "train.jsonl"))
    elif form == "saved":
        DatasetDict({"train": dataset}).save_to_disk(str(folder))
    else:
        dataset.save_to_disk(str(folder))
    return f"hf:{folder}"


@pytest.mark.parametrize("form", ["parquet", "json", "saved", "saved split"])
def test_local_data_sets(tmp_path: Path, form: str) -> None:
    path = dataset_folder(tmp_path, form)

    documents = list(read_documents({"path": path, "text_column": "body", "id_column": "name", "kind": "code"}))

    assert documents == [Document("a", "Alpha.", None, "code"), Document("b", "Beta.", None, "code")]
    assert next(read_documents(path, text_column="body")).id == path.removeprefix("hf:") + ":0"
    with pytest.raises(UserError, match=r":0: no column 'missing'; the columns are 'body', 'name', 'text'"):
        next(read_documents(path, text_column="missing"))
    with pytest.raises(UserError, match=r":0: column 'text' holds int, not text"):
        next(read_documents(path))
    with pytest.raises(UserError, match="no split 'dev'; the splits are train"):
        next(read_documents(f"{path}::dev", text_column="body"))


def test_loader_with_data_files(tmp_path: Path) -> None:
    path = write_json_lines(
        tmp_path / "corpus.jsonl.gz", ({"docid": str(n), "text": f"Passage {n}."} for n in range(3))
    )

    documents = list(read_documents({"path": "hf:json", "data_files": str(path), "id_column": "docid"}))

    assert [(document.id, document.text) for document in documents] == [(str(n), f"Passage {n}.") for n in range(3)]
    numbered = read_documents({"path": "hf:json", "data_files": str(path)})
    assert next(numbered).id == "json:corpus.jsonl.gz:0"  # not that of a row of another file
    for files in (str(path), f"{tmp_path}/*.gz", {"train": [str(path)]}):  # whose changes make prepared rows stale
        assert list(local_files(parse_source({"path": "hf:json", "data_files": files}))) == [path]


def test_sources_as_they_are_written() -> None:
    assert parse_source("hf:owner/name:config:dev") == Source("hf:owner/name", name="config", split="dev")
    assert parse_source("hf:owner/name::dev") == Source("hf:owner/name", split="dev")
    assert parse_source("hf:owner/name:config") == Source("hf:owner/name", name="config")
    mapping = {"path": "hf:owner/name:config", "split": "dev", "text_column": ["a", "b"], "exclude": "*.js"}
    parsed = Source("hf:owner/name", name="config", split="dev", text_column=("a", "b"), exclude=("*.js",))
    assert parse_source(mapping, kind=None) == parsed
    address = "hf://datasets/owner/name@refs%2Fconvert/data/*.parquet"
    assert parse_source(address) == Source("hf:owner/name", revision="refs/convert", data_files="data/*.parquet")
    plain = "hf://datasets/owner/name@refs/convert/parquet/default/*.parquet"
    assert parse_source(plain) == Source(
        "hf:owner/name", revision="refs/convert/parquet", data_files="default/*.parquet"
    )
    assert parse_source("hf://datasets/owner/name") == Source("hf:owner/name")
    assert parse_source({"path": "docs", "exclude": None, "max_documents": None}) == Source("docs")
    assert parse_sources("docs", text_column="body") == [Source("docs", text_column="body")]
    assert parse_source({"path": "docs", "text_column": "own"}, text_column="body").text_column == "own"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"path": "x", "column": "body"}, "the fields name, split"),
        ({"text_column": "body"}, "it needs a path"),
        ({"path": "x", "split": "test"}, "split is for a data set"),
        ("hf:owner/name:a:b:c", "a data set is written hf:"),
    ],
)
def test_sources_that_are_not_well_written(source: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_source(source)
