"""Record the current step of the verification in a file, for the message after a timeout."""

from pathlib import Path

_FILE: list[Path] = []


def report_to(file: Path) -> None:
    """Set the file."""
    _FILE[:] = [file]


def report_step(step: str) -> None:
    """Record a step, such as "loading the model"; without effect in other processes."""
    for file in _FILE:
        file.write_text(step, encoding="utf-8", errors="replace")


def last_step() -> str:
    """Return the step that was recorded last."""
    return "; ".join(file.read_text(encoding="utf-8") for file in _FILE if file.exists())
