"""Plot of `adapt`: the difference of each system from the base retriever with BM25, with intervals."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from revela_hub.adaptation.verdict import Verdict


def draw(verdict: "Verdict", file: Path) -> None:
    """Write the plot."""
    from matplotlib.figure import Figure

    rows = verdict.differences()
    canvas = Figure(figsize=(6.4, 1 + 0.4 * len(rows)), layout="constrained")
    axes = canvas.subplots()
    for place, (name, d) in enumerate(reversed(rows.items())):
        color = "#c0392b" if name == verdict.chosen.name else "#2a6f97"
        axes.plot([d.low, d.high], [place, place], color=color, linewidth=2)
        axes.plot(d.difference, place, marker="o", color=color)
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    axes.axvline(0, color="#999999", linestyle="--")
    axes.set(xlabel="difference in nDCG@10 from the base retriever with BM25 (95% interval, test half)")
    canvas.savefig(file, dpi=150)
