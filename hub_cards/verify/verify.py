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
from verification.process import end_with, run
if len(sys.argv) > 3:
    end_with(int(sys.argv[3]))
for task in json.load(open(sys.argv[2], encoding="utf-8")):
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
    """Verifies several folders in one clean process: `verify`'s arguments, with absolute paths, for each of them.

    Where a folder's code ends the process, another one goes on with the next folder.
    """
    results: list[list[Check]] = []
    while len(results) < len(tasks):
        results += _in_one_process(tasks[len(results) :], offline)
    return results


def _in_one_process(tasks: list[dict[str, str | bool | None]], offline: bool) -> list[list[Check]]:
    """The checks of the first folders, up to the one at which the process ended."""
    with tempfile.TemporaryDirectory(prefix="revela-hub-verify-") as scratch:
        answers = [Path(scratch, f"{number}.json") for number in range(len(tasks))]
        todo = [task | {"answers": str(a), "offline": offline} for task, a in zip(tasks, answers, strict=True)]
        Path(scratch, "tasks").write_text(json.dumps(todo), encoding="utf-8")
        process = _start(scratch, offline)
        results: list[list[Check]] = []
        for file in answers:
            found = [Check(*row) for row in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []
            if not found or found[-1].name != "end":
                last = (process.stderr.strip().splitlines() or [f"status {process.returncode}"])[-1]
                fault = f"the verifying process ended before its last check, with status {process.returncode}: {last}"
                return [*results, [*found, Check("process", False, fault)]]
            results.append(found[:-1])
        return results


def _start(scratch: str, offline: bool) -> subprocess.CompletedProcess[str]:
    """Runs the process as a reader's: without a token, with a cache of its own for remote code. It ends when this one does.

    An earlier run's cache would have that run's code, not the folder's.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_TOKEN", "HUGGING_FACE_HUB_"))
    }
    environment |= {
        "HF_MODULES_CACHE": str(Path(scratch, "modules")),
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    reading, writing = os.pipe()
    watched = (reading,) if os.name == "posix" else ()
    command = [sys.executable, "-c", _CHILD, str(Path(__file__).resolve().parent), str(Path(scratch, "tasks"))]
    try:
        return subprocess.run(
            [*command, *map(str, watched)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            cwd=scratch,
            env=environment,
            pass_fds=watched,
            check=False,
        )
    finally:
        os.close(reading)
        os.close(writing)


def as_table(checks: Iterable[Check]) -> str:
    """Returns the checks as lines of text, one a row."""
    rows = list(checks)
    width = max((len(check.name) for check in rows), default=0)
    return "\n".join(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<{width}}  {check.detail}" for check in rows)
