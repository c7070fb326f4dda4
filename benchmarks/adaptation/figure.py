"""Draw the picture of the README from the recorded results: what `adapt` makes of all-MiniLM-L6-v2 on five collections.

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
SERIES = {  # label: the compared system, its colour
    "with BM25 and late interaction": ("base, adapted weights", "#3b7dd8"),
    "and with training, where adapt kept it": ("adapted", "#e07b39"),
}


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "revela-hub", "font.size": 10, "svg.fonttype": "none"})
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    for place, domain in enumerate(DOMAINS):
        file = MEASURED / f"{domain}-10m-model-0.json"
        scores = json.loads(file.read_text(encoding="utf-8"))
        trained = scores["adapted"] != scores["base, adapted weights"]  # otherwise there is one result
        for label, (system, colour) in list(SERIES.items())[: 1 + trained]:
            shift = trained * (-0.16 if system == "base, adapted weights" else 0.16)
            found = compare_queries(scores["base"], scores[system])
            error = [[found.difference - found.low], [found.high - found.difference]]
            shown = {"fmt": "o", "color": colour, "capsize": 3, "label": label if domain == "stdlib" else None}
            axes.errorbar(found.difference, place + shift, xerr=error, **shown)
            axes.annotate(f"{found.difference:+.3f}", (found.high, place + shift), (5, -3), textcoords="offset points")
    axes.axvline(0, color="#888888", linewidth=1)
    axes.set_yticks(range(len(DOMAINS)), list(DOMAINS.values()))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("change in nDCG@10 compared with all-MiniLM-L6-v2 alone (95% interval)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUTPUT, metadata={"Date": None})
    print(OUTPUT.relative_to(REPOSITORY))


if __name__ == "__main__":
    main()
