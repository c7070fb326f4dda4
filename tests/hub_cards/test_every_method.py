"""Every method: train two steps, export, load in the clean process, and get the vectors of the trained model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import commands

from revela_hub.checkpoints import publish
from revela_hub.cli.main import main
from revela_hub.hub_cards import Assembly, Check, Destination, as_table, check, upload
from revela_hub.hub_cards.clean_process import verify
from revela_hub.trainers.methods import METHODS

pytestmark = pytest.mark.usefixtures("clean_process")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return commands(tmp_path_factory.mktemp("inputs") / "inputs")


@pytest.mark.parametrize("name", METHODS)
def test_what_is_exported_has_the_vectors_of_the_trained_model(
    name: str,
    words: dict[str, list[str]],
    tmp_path: Path,
    verify_in_process: Callable[..., list[Check]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the clean process if there is code in the folder, or for one retriever without: each process takes seconds."""

    def verified(folder: Path, **options: Any) -> list[Check]:
        return (verify if any(folder.glob("*.py")) or name == "pair_tuning" else verify_in_process)(folder, **options)

    monkeypatch.setattr(upload, "verify", verified)
    method, out = METHODS[name], tmp_path / "out"
    run = [*words[name], "--output_dir", str(out), "--max_steps", "2", "--save_steps", "2"]
    assert main(run) == 0
    for folder in method.folders:
        card = (out / folder / "README.md").read_text()
        assert method.paper.arxiv in card and str(tmp_path) not in card
    if not method.assembler:  # a plain model
        for folder in method.folders:
            checks = check(out / folder, methods=METHODS)
            assert all(row.ok for row in checks), f"{folder}\n{as_table(checks)}"
        return
    for part in method.parts:
        published = publish(out, Destination("org/x"), Assembly(part=part), dry_run=True, keep=tmp_path / part)
        compared = {row.name: row.detail for row in published.checks}.get("same as checkpoint", "the whole model")
        assert compared == "the whole model" or compared.startswith("to 1e-05 on"), (part, compared)
        files = tmp_path / part / "model"
        assert not [file for file in files.rglob("*") if file.is_file() and str(tmp_path).encode() in file.read_bytes()]
