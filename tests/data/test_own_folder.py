"""Folders that the program writes, and those of the user."""

from collections.abc import Callable
from pathlib import Path

import pytest

from revela_hub.data.own_folder import MARKER, check_apart, check_free, claim, is_ours, names_in
from revela_hub.data.row_cache import cache_folder
from revela_hub.data.sources.documents import read_documents
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import parse_sources
from revela_hub.errors import UserError
from revela_hub.retrieval.disk import default_cache_folder


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
    assert len(list(read_documents(f"{tmp_path}/*/*/index.json"))) == 1


@pytest.mark.parametrize("names", [["run.json", "trainer_state.json"], [".revela_hub"]])
def test_folders_that_we_wrote_but_did_not_mark_are_not_read_as_text(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "outputs").mkdir()
    for name in names[1:]:
        (tmp_path / "outputs" / name).write_text('{"text": "made by us"}')
    (tmp_path / "outputs" / "README.md").write_text("a model card")
    if len(names) > 1:  # one of these names alone may be the user's
        assert list(read_documents(f"{tmp_path}/*/README.md"))
        assert "a model card" in [document.text for document in read_documents(tmp_path)]
    (tmp_path / "outputs" / names[0]).mkdir()
    (tmp_path / "notes.txt").write_text("a note")
    for source in (tmp_path, f"{tmp_path}/**/*"):
        assert [document.text for document in read_documents(source)] == ["a note"]
    assert list(read_documents(f"{tmp_path}/*/README.md"))
    for action in (check_free, claim):  # other commands must not replace its files
        with pytest.raises(UserError, match="contains files that revela-hub did not write"):
            action(tmp_path / "outputs", "--output")


@pytest.mark.parametrize("folder", [lambda: default_cache_folder("passages"), lambda: cache_folder(None)])
def test_a_user_without_a_home_folder_is_told_so(folder: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def getpwuid(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", getpwuid)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("~/.cache/huggingface/datasets"))
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"no home folder for the cache: set HOME; or use --cache_dir FOLDER"):
        folder()


def test_an_output_in_the_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    sources = parse_sources(str(tmp_path / "docs"))
    check_apart(sources, tmp_path / "index", "--output")
    for output in (tmp_path / "docs", tmp_path / "docs" / "index"):
        with pytest.raises(UserError, match="--output .* is inside the data"):
            check_apart(sources, output, "--output")
