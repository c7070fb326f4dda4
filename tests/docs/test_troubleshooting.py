"""The options that the troubleshooting page recommends exist."""

import re
from pathlib import Path

import transformers
from packaging.version import Version

from revela_hub.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| symptom")]


def test_the_options_exist() -> None:
    assert ROWS and all(len(row) == 3 for row in ROWS)
    options = {option for name in cli.COMMANDS for option in cli.parser_of(name)._option_string_actions}
    fixes = " ".join(cell for row in ROWS for cell in row[1:])
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", fixes)) - {"--local-dir"}  # of `hf download`
    newer = {"--activation_checkpointing"} if Version(transformers.__version__) < Version("5.23") else set()
    assert named - options - newer - {"--version"} == set()
