"""Draw the picture of the README from the recorded results: what helps all-MiniLM-L6-v2 on four collections.

python benchmarks/adaptation/figure.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from revela_hub.evaluation.significance import compare_queries

REPOSITORY = Path(__file__).resolve().parents[2]
MEASURED = REPOSITORY / "benchmarks" / "measured" / "adaptation"
OUTPUT = REPOSITORY / "docs" / "_static" / "adaptation.svg"
DOMAINS = {
    "stdlib": "Python's library\n(docstring to function)",
    "scifact": "SciFact\n(claim to abstract)",
    "medquad": "MedQuAD\n(question to answer)",
    "cosqa": "CoSQA\n(web query to code)",
}
SERIES = {
    "with BM25, weight 0.3": ("hybrid, 0.3 of BM25", "scores", "#3b7dd8"),
    "trained on its natural pairs": ("pairs of the text", "handed out", "#e07b39"),
}


def mean_by_query(domain: str, method: str, key: str) -> dict[str, float]:
    """Return each query's nDCG@10, averaged over the seeds."""
    files = sorted(MEASURED.glob(f"all-MiniLM-L6-v2-{domain}-*.json"))
    runs = [json.loads(file.read_text(encoding="utf-8"))[method][key] for file in files]
    return {query: sum(run[query] for run in runs) / len(runs) for query in runs[0]}


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "revela-hub", "font.size": 10, "svg.fonttype": "none"})
    figure, axes = plt.subplots(figsize=(7.2, 3.0), layout="constrained")
    for place, domain in enumerate(DOMAINS):
        base = mean_by_query(domain, "start", "scores")
        for shift, (label, (method, key, colour)) in zip((-0.16, 0.16), SERIES.items(), strict=True):
            found = compare_queries(base, mean_by_query(domain, method, key))
            error = [[found.difference - found.low], [found.high - found.difference]]
            shown = {"fmt": "o", "color": colour, "capsize": 3, "label": label if not place else None}
            axes.errorbar(found.difference, place + shift, xerr=error, **shown)
            axes.annotate(f"{found.difference:+.3f}", (found.high, place + shift), (5, -3), textcoords="offset points")
    axes.axvline(0, color="#888888", linewidth=1)
    axes.set_yticks(range(len(DOMAINS)), list(DOMAINS.values()))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("change in nDCG@10 compared with all-MiniLM-L6-v2 (95% interval)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUTPUT, metadata={"Date": None})
    print(OUTPUT.relative_to(REPOSITORY))


if __name__ == "__main__":
    main()
