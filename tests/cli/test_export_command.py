"""`revela-hub export` of an output folder; tests/hub_cards/test_onnx.py tests the ONNX files."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from revela_hub.cli.main import main


def test_the_only_model_in_an_output_folder_is_converted(
    retriever_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converted: list[Path] = []

    def export_onnx(folder: Path) -> SimpleNamespace:
        converted.append(folder)
        return SimpleNamespace(path=folder, bytes=1, difference=0.0)

    monkeypatch.setattr("revela_hub.hub_cards.onnx_export.export_onnx", export_onnx)
    output, new = tmp_path / "tuned", tmp_path / "new"
    shutil.copytree(retriever_folder, output / "retriever")
    words = ["export", str(output), "--output_dir", str(new)]
    assert main([*words, "--format", "onnx"]) == 0
    assert converted == [new] and (new / "model.safetensors").is_file()
    assert main([*words, "--format", "onnx"]) == 2  # the folder exists
    assert main(words) == 2
    assert "is a finished model" in capsys.readouterr().err
    shutil.copytree(retriever_folder, output / "other")
    assert main([*words, "--format", "onnx"]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
