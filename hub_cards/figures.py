"""Figures for model cards."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def similarity_map(maps: dict[str, NDArray[np.float32]], documents: Sequence[str], path: Path) -> None:
    """Draw the similarities within a group of chunks, with lines between documents.

    Args:
        maps: title -> (B, B) similarities, whose rows sum to one.
        documents: document of each chunk (B).
        path: PNG file to write.
    """
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(3.6 * len(maps) + 0.6, 3.8), layout="constrained")
    panels = canvas.subplots(1, len(maps), squeeze=False)[0]
    highest = max(float(values.max()) for values in maps.values())
    borders = [i - 0.5 for i in range(1, len(documents)) if documents[i] != documents[i - 1]]
    for axes, (title, values) in zip(panels, maps.items(), strict=True):
        image = axes.imshow(values, vmin=0.0, vmax=highest, cmap="magma")
        for border in borders:
            axes.axhline(border, color="white", linewidth=0.8)
            axes.axvline(border, color="white", linewidth=0.8)
        axes.set(title=title, xlabel="attended chunk", xticks=[], yticks=[])
    panels[0].set_ylabel("predicted chunk")
    canvas.colorbar(image, ax=list(panels), shrink=0.8, label="similarity")
    canvas.savefig(path, dpi=150)


def training_curve(log_history: Sequence[dict[str, float]], path: Path) -> bool:
    """Draw the training loss over the steps; return False if there are too few points.

    Args:
        log_history: the entries in `trainer_state.json`.
        path: PNG file to write.
    """
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
