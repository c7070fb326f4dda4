"""Errors of a full disk, and files that are replaced as a whole."""

import errno
import os
from pathlib import Path

import pytest

from revela_hub.errors import UserError
from revela_hub.retrieval.disk import check_folder
from revela_hub.whole_files import naming_full_disk, whole_path, write_text


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), RuntimeError("I/O error: No space left (os error 28)")]
)
def test_a_full_disk_is_named_if_the_error_names_no_file(error: Exception) -> None:
    with pytest.raises(UserError, match=r"the disk is full at out: .* another folder with --output_dir"):
        with naming_full_disk(Path("out"), "--output_dir"):
            raise error


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left", "cache/rows"), OSError(errno.EACCES, "denied"), ValueError("x")]
)
def test_other_errors_are_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as found, naming_full_disk(Path("out"), "--output_dir"):
        raise error
    assert found.value is error


def test_a_check_leaves_the_folder_to_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = []

    def rmdir(path: Path) -> None:
        removed.append(path.name)
        os.rmdir(path)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    for folder in (tmp_path / "new" / "index", tmp_path):
        check_folder(folder, "--output_dir")
    assert all(name.startswith(".revela-hub-") for name in removed) and not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to .*file/index: .*choose another folder with --output_dir"):
        check_folder(tmp_path / "file" / "index", "--output_dir")


def test_a_text_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.json"
    write_text(file, "before")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("revela_hub.whole_files.os.fsync", fail)
        with pytest.raises(UserError, match="the disk is full at"):
            write_text(file, "after", "--output_dir")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_what_a_killed_process_left_is_removed_by_the_only_writer(tmp_path: Path) -> None:
    left = tmp_path / f"model.{'0' * 32}.tmp"
    for folder in (
        left,
        tmp_path / f"model-2.{'0' * 32}.tmp",
        tmp_path / "model.old.tmp",
    ):  # another path's; the user's
        folder.mkdir()
    with whole_path(tmp_path / "model") as folder:
        folder.mkdir()
    assert left.is_dir()
    with whole_path(tmp_path / "model", only_writer=True) as folder:
        folder.mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", f"model-2.{'0' * 32}.tmp", "model.old.tmp"]
