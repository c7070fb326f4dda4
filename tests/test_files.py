"""Files that are written as a whole, and output folders that never take the user's files."""

from pathlib import Path

import pytest

from revela_hub.data.sources.documents import read_documents
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import check_apart, parse_sources
from revela_hub.errors import UserError
from revela_hub.files import atomic, claim, content_digest, is_ours, write_text


def test_a_block_that_fails_leaves_the_earlier_file(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    write_text(file, "before")
    with pytest.raises(KeyError), atomic(file) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with atomic(tmp_path / "new" / "model") as folder:
            folder.mkdir()
            (folder / name).touch()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["new", "new/model", "new/model/second"]


def test_a_new_an_empty_and_a_marked_folder_are_claimed(tmp_path: Path) -> None:
    new = claim(tmp_path / "a" / "new")
    (new / "shard").touch()
    assert is_ours(claim(new)) and claim(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".DS_Store").touch()
    claim(tmp_path / "empty")


@pytest.mark.parametrize("names", [["notes.txt"], ["run.json", "trainer_state.json"]])
def test_a_folder_of_the_user_or_of_a_run_is_not_claimed(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="contains files"):
        claim(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_what_we_wrote_is_not_read_as_text_unless_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a note")
    ours = claim(tmp_path / "sub" / "index")
    (ours / "index.txt").write_text("made by us")
    report = ReadReport()
    assert [document.text for document in read_documents(tmp_path, report=report)] == ["a note"]
    assert report.skipped["written by revela-hub"] == 1
    assert [document.text for document in read_documents(ours)] == ["made by us"]


def test_an_output_in_the_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    sources = parse_sources(str(tmp_path / "docs"))
    check_apart(sources, tmp_path / "index")
    for output in (tmp_path / "docs", tmp_path / "docs" / "index"):
        with pytest.raises(UserError, match="is inside the data"):
            check_apart(sources, output)


def test_a_digest_is_of_the_content(tmp_path: Path) -> None:
    for name, text in {"a": "weights", "b": "weights", "c": "others"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(text)
    a, b, c = (content_digest(tmp_path / name) for name in "abc")
    assert a == b != c
    (tmp_path / "a" / "README.md").touch()
    assert content_digest(tmp_path / "a") == a
