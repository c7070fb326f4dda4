"""Draw the picture of the README from the recorded results: what `adapt` makes of two retrievers on five collections.

python benchmarks/adaptation/figure.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from revela_hub.evaluation.significance import compare_queries

REPOSITORY = Path(__file__).resolve().parents[2]
MEASURED = REPOSITORY / "benchmarks" / "measured" / "adapt-command"
OUTPUT = REPOSITORY / "docs" / "_static" / "adaptation.svg"
DOMAINS = {
    "squad": "SQuAD\n(question to paragraph)",
    "scifact": "SciFact\n(claim to abstract)",
    "medquad": "MedQuAD\n(question to answer)",
    "stdlib": "Python's library\n(docstring to function)",
    "cosqa": "CoSQA\n(web query to code)",
}
MODELS = {"model": ("MiniLM", "o"), "e5-small": ("e5-small", "s")}  # file: name, marker
SYSTEMS = {  # what adapt adds to the retriever alone: the compared system, its colour
    "BM25 and late interaction": ("base, adapted weights", "#3b7dd8"),
    "and training, where kept": ("adapted", "#e07b39"),
}


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "revela-hub", "font.size": 10, "svg.fonttype": "none"})
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    labels = set()
    for place, domain in enumerate(DOMAINS):
        points = []
        for model, (name, marker) in MODELS.items():
            file = MEASURED / f"{domain}-10m-{model}-0.json"
            if not file.exists():
                continue
            scores = json.loads(file.read_text(encoding="utf-8"))
            trained = scores["adapted"] != scores["base, adapted weights"]  # otherwise there is one result
            for system, (key, colour) in list(SYSTEMS.items())[: 1 + trained]:
                points.append((f"{name}: {system}", marker, colour, compare_queries(scores["base"], scores[key])))
        for number, (label, marker, colour, found) in enumerate(points):
            height = place + 0.24 * (number - (len(points) - 1) / 2)
            error = [[found.difference - found.low], [found.high - found.difference]]
            shown = {"fmt": marker, "color": colour, "capsize": 3, "label": None if label in labels else label}
            axes.errorbar(found.difference, height, xerr=error, **shown)
            axes.annotate(f"{found.difference:+.3f}", (found.high, height), (5, -3), textcoords="offset points")
            labels.add(label)
    axes.axvline(0, color="#888888", linewidth=1)
    axes.set_yticks(range(len(DOMAINS)), list(DOMAINS.values()))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("change in nDCG@10 compared with the retriever alone (95% interval)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUTPUT, metadata={"Date": None})
    print(OUTPUT.relative_to(REPOSITORY))


if __name__ == "__main__":
    main()
