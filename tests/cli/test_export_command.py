"""`revela-hub export` of an output folder; tests/hub_cards/test_onnx.py tests the ONNX files."""

import shutil
from pathlib import Path

import pytest

from revela_hub.cli.commands import export
from revela_hub.cli.main import main


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders to convert, instead of a conversion."""
    folders: list[Path] = []
    monkeypatch.setattr(export, "_add_onnx", lambda folder, shown=None: folders.append(shown or folder))
    return folders


def test_the_only_model_in_an_output_folder_is_converted(
    retriever_folder: Path, tmp_path: Path, converted: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    output, new = tmp_path / "tuned", tmp_path / "new"
    shutil.copytree(retriever_folder, output / "retriever")
    words = ["export", str(output), "--output_dir", str(new)]
    assert main([*words, "--format", "onnx"]) == 0
    assert converted == [new] and (new / "model.safetensors").is_file()

    shutil.rmtree(new)
    shutil.copytree(retriever_folder, output / "other")
    assert main([*words, "--format", "onnx"]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
    shutil.rmtree(output / "other")
    assert main(words) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
