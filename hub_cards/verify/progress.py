"""What the verifying process is at, written down so that the one that started it can say so when time is up.

Part of `verify.py`'s clean process: standard library only.
"""

from __future__ import annotations

from pathlib import Path

_FILE: list[Path] = []


def report_to(file: Path) -> None:
    """Names the file for the folder that comes now."""
    _FILE[:] = [file]


def doing(what: str) -> None:
    """Writes down what comes now, to be read after "while"; nothing outside of the process."""
    for file in _FILE:
        file.write_text(what, encoding="utf-8", errors="replace")


def doing_now() -> str:
    """What was written down last."""
    return "; ".join(file.read_text(encoding="utf-8") for file in _FILE if file.exists())
