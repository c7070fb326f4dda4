"""Verifies a model folder as its readers will meet it: in a process that has transformers and sentence-transformers only.

The process (`process.py`) imports nothing of this package, and nothing else that a reader may not have. It loads
the folder by the documented way; a question at the terminal is answered with end-of-file. What is checked stands in
`files.py` (what the files say) and `model.py` (what the loaded model does).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from revela_hub.hub_cards.verify.files import Check

# Imports this folder under another name: the package itself, and all that it imports, stays out of the process.
_CHILD = """
import json, sys, types
package = types.ModuleType("verification")
package.__path__ = [sys.argv[1]]
sys.modules["verification"] = package
from verification.process import run
for task in json.loads(sys.argv[2]):
    run(task)
"""


def verify(
    folder: str | Path,
    *,
    trust_remote_code: bool = False,
    adapter_only: bool = False,
    reference: Path | None = None,
    offline: bool = True,
) -> list[Check]:
    """Verifies a folder in a clean process.

    Args:
        folder: a sentence-transformers folder, or a transformers folder.
        trust_remote_code: run the Python files of the folder.
        adapter_only: the folder is a PEFT repository, not a whole model.
        reference: a safetensors file with the (n_texts, d) vectors of `probe_texts` that the folder has to give, under
            the names `query` and `document`.
        offline: keep the process from asking the Hub for anything.

    Returns:
        The checks in the order in which they were made; loading stops at the first that makes going on pointless.
    """
    task: dict[str, str | bool | None] = {
        "folder": str(Path(folder).resolve()),
        "trust_remote_code": trust_remote_code,
        "adapter_only": adapter_only,
        "reference": str(Path(reference).resolve()) if reference else None,
    }
    return verify_all([task], offline=offline)[0]


def verify_all(tasks: list[dict[str, str | bool | None]], *, offline: bool = True) -> list[list[Check]]:
    """Verifies several folders in one clean process: `verify`'s arguments, with absolute paths, for each of them."""
    with tempfile.TemporaryDirectory(prefix="revela-hub-verify-") as scratch:
        answers = [Path(scratch, f"{number}.json") for number in range(len(tasks))]
        tasks = [task | {"answers": str(file)} for task, file in zip(tasks, answers, strict=True)]
        # A cache of its own for remote code, so that it runs the folder's files and not those of an earlier run.
        environment = os.environ | {
            "HF_MODULES_CACHE": str(Path(scratch, "modules")),
            "TOKENIZERS_PARALLELISM": "false",
        }
        if offline:
            environment["HF_HUB_OFFLINE"] = "1"
        process = subprocess.run(
            [sys.executable, "-c", _CHILD, str(Path(__file__).resolve().parent), json.dumps(tasks)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            cwd=scratch,
            env=environment,
            check=False,
        )
        results = [_read(file) for file in answers]
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or [f"status {process.returncode}"])[-1]
        next((found for found in results if not found), results[-1]).append(
            Check("process", False, f"the verifying process died: {last}")
        )
    return results


def _read(answers: Path) -> list[Check]:
    return [Check(*row) for row in json.loads(answers.read_text(encoding="utf-8"))] if answers.exists() else []


def as_table(checks: Iterable[Check]) -> str:
    """Returns the checks as lines of text, one a row."""
    rows = list(checks)
    width = max((len(check.name) for check in rows), default=0)
    return "\n".join(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<{width}}  {check.detail}" for check in rows)
