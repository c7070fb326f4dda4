"""Figures for model cards."""

from collections.abc import Sequence
from pathlib import Path


def training_curve(log_history: Sequence[dict[str, float]], path: Path) -> bool:
    """Draw the training loss over the steps of `trainer_state.json` into a PNG; return False if there are too few points."""
    points = [(entry["step"], entry["loss"]) for entry in log_history if "loss" in entry and "step" in entry]
    if len(points) < 2:
        return False
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(6, 3.2), layout="constrained")
    axes = canvas.subplots()
    axes.plot(*zip(*points, strict=True), color="#2a6f97")
    axes.set(xlabel="step", ylabel="training loss")
    axes.grid(alpha=0.3)
    canvas.savefig(path, dpi=150)
    return True
