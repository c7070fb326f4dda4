"""Print the table of `revela.py` and draw nDCG@10 over the time of training, from the records in --work or benchmarks/measured.

python benchmarks/real/revela_report.py --work outputs/real
python benchmarks/real/revela_report.py --keep  # copy the records to benchmarks/measured/real
python benchmarks/real/revela_report.py --work benchmarks/measured/real-gpu --figure benchmarks/real/revela-gpu.svg  # those of a GPU
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from revela_hub.evaluation.significance import compare_queries

REPOSITORY = Path(__file__).resolve().parents[2]
MEASURED = REPOSITORY / "benchmarks" / "measured" / "real"
FIGURE = Path(__file__).with_name("revela.svg")
DOMAINS = {
    "scifact": "SciFact\n(claim to abstract)",
    "squad": "SQuAD\n(question to paragraph)",
    "cosqa": "CoSQA\n(web query to code)",
    "stdlib": "Python's library\n(docstring to function)",
}
ARMS = {
    "contriever": ("Contriever", "#3b7dd8"),
    "replug": ("REPLUG", "#5a9e6f"),
    "added": ("Revela, added reading", "#e07b39"),
    "paper": ("Revela, added reading, temperature of the paper", "#c9b037"),
    "joint": ("Revela, joint reading, frozen LM", "#8e5aa8"),
    "joint_query": ("Revela, joint reading, frozen LM, query side", "#b48ec8"),
    "added_query": ("Revela, added reading, query side", "#f0a878"),
    "both": ("Revela, joint reading, and Contriever", "#555555"),
}
Record = dict[str, Any]


def read(folder: Path) -> dict[str, list[Record]]:
    """Return the records of each arm, from `start.jsonl` and `<method>-<rate>.jsonl`."""
    rows = {
        file.stem: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
        if file.stem == "start" or file.stem.partition("-")[0] in ARMS
    }
    return {name: each for name, each in rows.items() if each}


def table(arms: dict[str, list[Record]]) -> None:
    """Print a row for each arm and point."""
    start = arms["start"][0]["scores"]
    print(f"| | lr | minutes | steps | {' | '.join(start)} |\n|---|---|---|---|{'---|' * len(start)}")
    print(f"| start | | 0 | 0 | {' | '.join(f'{mean(start[d]):.3f}' for d in start)} |")
    for name, rows in arms.items():
        for row in rows if name != "start" else []:
            method, _, rate = name.partition("-")
            cells = [difference(start[domain], row["scores"][domain]) for domain in start]
            print(f"| {ARMS[method][0]} | {rate} | {row['seconds'] / 60:.1f} | {row['step']} | {' | '.join(cells)} |")


def mean(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


def difference(base: dict[str, float], own: dict[str, float]) -> str:
    found = compare_queries(base, own)
    sure = "**" if found.verdict != "no significant difference" else ""
    return f"{mean(own):.3f} ({sure}{found.difference:+.3f}{sure} [{found.low:+.3f}, {found.high:+.3f}])"


def orders(arms: dict[str, list[Record]]) -> None:
    """Compare each two arms at the last point that all of them have, on all queries of all tasks."""
    trained = {name: rows for name, rows in arms.items() if name != "start"}
    if len(trained) < 2:
        return
    common = min(max(row["seconds"] for row in rows) for rows in trained.values())
    at = {name: min(rows, key=lambda row: abs(row["seconds"] - common)) for name, rows in trained.items()}
    flat = {
        name: {f"{domain}/{query}": score for domain, each in row["scores"].items() for query, score in each.items()}
        for name, row in at.items()
    }
    ranked = sorted(flat, key=lambda name: -mean(flat[name]))
    print(f"\nAll tasks together, after {common / 60:.0f} minutes:")
    for better, other in zip(ranked, ranked[1:], strict=False):
        print(f"  {better} {mean(flat[better]):.3f} against {other}: {compare_queries(flat[other], flat[better])}")


def figure(arms: dict[str, list[Record]], output: Path) -> None:
    """Draw nDCG@10 over the time of training, a panel for each task."""
    plt.rcParams.update({"svg.hashsalt": "revela-hub", "font.size": 10, "svg.fonttype": "none"})
    drawn, panels = plt.subplots(1, len(DOMAINS), figsize=(11, 3.4), layout="constrained")
    start = arms["start"][0]
    for panel, (domain, title) in zip(panels, DOMAINS.items(), strict=True):
        for name, rows in arms.items():
            method, _, rate = name.partition("-")
            if method not in ARMS:
                continue
            label, colour = ARMS[method]
            points = [start, *rows]
            style = {"color": colour, "label": f"{label}, lr {rate}"}
            minutes = [row["seconds"] / 60 for row in points]
            panel.plot(minutes, [mean(row["scores"][domain]) for row in points], marker="o", markersize=3, **style)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("minutes of training")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("nDCG@10")
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    drawn.savefig(output, metadata={"Date": None})
    print(f"\nfigure: {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="Folder with the records (default: benchmarks/measured/real).")
    parser.add_argument("--keep", action="store_true", help="Copy the records to benchmarks/measured/real.")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    given = parser.parse_args()
    arms = read(given.work or MEASURED)
    if "start" not in arms:
        raise SystemExit(f"no records of benchmarks/real/revela.py in {given.work or MEASURED}")
    if given.keep:
        MEASURED.mkdir(parents=True, exist_ok=True)
        for name, rows in arms.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (MEASURED / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    table(arms)
    orders(arms)
    figure(arms, given.figure)


if __name__ == "__main__":
    main()
