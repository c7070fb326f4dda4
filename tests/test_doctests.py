"""Runs the examples in the docstrings, of the package as it is installed.

pytest's `--doctest-modules` would import the files by their place in the checkout, as `data.collator`, next to the
package's own `revela_hub.trainers.revela.collator`.
"""

import doctest
import importlib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = {
    "src/revela_hub": "revela_hub",
    **{name: f"revela_hub.{name}" for name in ("modeling", "data", "retrieval", "trainers", "evaluation", "hub_cards")},
}
MODULES = sorted(
    ".".join([package, *file.relative_to(REPOSITORY / folder).with_suffix("").parts]).removesuffix(".__init__")
    for folder, package in FOLDERS.items()
    for file in (REPOSITORY / folder).rglob("*.py")
    if ">>> " in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0
