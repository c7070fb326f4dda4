"""Folders that the program writes, and those of the user."""

from pathlib import Path

import pytest

from revela_hub.data.own_folder import MARKER, check_apart, check_free, claim, is_ours, names_in
from revela_hub.data.row_cache import cache_folder
from revela_hub.data.sources.documents import read_documents
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import parse_sources
from revela_hub.errors import UserError


def test_a_new_an_empty_and_a_marked_folder_are_claimed(tmp_path: Path) -> None:
    new = claim(tmp_path / "a" / "new", "--output")
    assert is_ours(new)
    (new / "shard").write_text("")
    assert claim(new, "--output") == new
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".DS_Store").write_text("")
    assert is_ours(claim(tmp_path / "empty", "--output"))


def test_a_folder_of_the_user_is_not(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for action in (check_free, claim):
        with pytest.raises(
            UserError, match=r"--output .* contains files that revela-hub did not write.*: use a new folder"
        ):
            action(tmp_path, "--output")
    with pytest.raises(UserError, match="is a file, not a folder"):
        claim(tmp_path / "notes.txt", "--output")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_another_process_may_claim_the_folder_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(folder: Path) -> set[str]:
        (folder / MARKER).write_text("")
        (folder / "texts.arrow").write_text("")
        return names_in(folder)

    monkeypatch.setattr("revela_hub.data.own_folder.names_in", meanwhile)
    assert claim(tmp_path, "--output") == tmp_path


def test_rows_are_kept_in_a_folder_of_ours(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert is_ours(cache_folder(tmp_path)) and not is_ours(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "revela_hub"]


def test_what_we_wrote_is_not_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a note")
    ours = claim(tmp_path / "sub" / "index", "--output")
    (ours / "deep").mkdir()
    for place in (ours, ours / "deep"):
        (place / "index.json").write_text('{"model": "x"}')
    for source in (tmp_path, f"{tmp_path}/**/*", f"{tmp_path}/**"):
        report = ReadReport()
        assert [document.text for document in read_documents(source, report=report)] == ["a note"]
        assert report.skipped["written by revela-hub"] >= 1
    # Named outright, it is.
    for source in (ours, f"{ours}/**/*"):
        assert len(list(read_documents(source))) == 2


def test_an_output_in_the_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    sources = parse_sources(str(tmp_path / "docs"))
    check_apart(sources, tmp_path / "index", "--output")
    for output in (tmp_path / "docs", tmp_path / "docs" / "index"):
        with pytest.raises(UserError, match="--output .* is inside the data"):
            check_apart(sources, output, "--output")
