"""Does another way to combine a retriever with BM25 find more than the default, min-max with weight 0.3?

nDCG@10 of the default on the tasks of identifiers.py and of benchmarks/domains.py (200 queries, 1,000 passages each; identifiers of code
are split, except for CoSQA's web queries), and the difference of each other fusion, with `*` or `-` where its 95% interval (paired
bootstrap over the queries) is above or below 0.

    python benchmarks/adaptation/fusions.py --data $REVELA_HUB_DATA
"""

import argparse
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks")]

from adapt import load_start  # noqa: E402
from domains import load_domain  # noqa: E402
from identifiers import PASSAGES, QUERIES, tasks  # noqa: E402

from revela_hub.data.sources.beir import RetrievalTask  # noqa: E402
from revela_hub.evaluation import compare_queries  # noqa: E402
from revela_hub.evaluation.retrieval import ranking_run, score_run  # noqa: E402
from revela_hub.retrieval import BM25Settings, RankerSettings  # noqa: E402

PROSE = ("medquad", "scifact", "squad")
DEFAULT = {"weights": (0.7, 0.3)}
FUSIONS: dict[str, dict[str, Any]] = {
    "min-max, 0.2": {"weights": (0.8, 0.2)},
    "min-max, 0.4": {"weights": (0.6, 0.4)},
    "min-max, 0.5": {"weights": (0.5, 0.5)},
    "sum, cosine + 0.02 x BM25": {"fusion": "sum", "weights": (1, 0.02)},
    "sum, cosine + 0.03 x BM25": {"fusion": "sum", "weights": (1, 0.03)},
    "sum, cosine + 0.05 x BM25": {"fusion": "sum", "weights": (1, 0.05)},
    "min-max, 0.3, k1 = 0.6, b = 0.9": DEFAULT | {"k1": 0.6, "b": 0.9},
    "min-max, 0.3, k1 = 0.9, b = 0.4": DEFAULT | {"k1": 0.9, "b": 0.4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--work", type=Path, default=Path("outputs/fusions"))
    parser.add_argument("--start", default="all-MiniLM-L6-v2", help="retriever: all-MiniLM-L6-v2 or a folder")
    parser.add_argument("--packages", nargs="+", default=["sklearn", "scipy", "networkx", "sympy"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    model = load_start(given.start)
    model.max_seq_length = 256
    prose = (load_domain(name, given.data, given.work, queries=QUERIES, passages=PASSAGES).task for name in PROSE)
    names: list[str] = []
    table: dict[str, list[str]] = {name: [] for name in ("min-max, 0.3", *FUSIONS)}
    for task in chain(prose, tasks(given)):
        names.append(task.name.split("/")[0])  # without the split

        def scores(
            options: dict[str, Any], task: RetrievalTask = task, split: bool = names[-1] not in (*PROSE, "cosqa")
        ) -> dict[str, float]:
            options = {"fusion": "minmax", "k1": 1.5, "b": 0.75} | options
            bm25 = BM25Settings(k1=options.pop("k1"), b=options.pop("b"), split_identifiers=split)
            settings = RankerSettings(mode="hybrid", bm25=bm25, identity=given.start, **options)
            run = ranking_run(task, settings, dense=model, cache_dir=given.work / "cache")
            return dict(score_run(run, task).per_query["ndcg_at_10"])

        before = scores(DEFAULT)
        table["min-max, 0.3"].append(f"{sum(before.values()) / len(before):.3f}")
        for name, options in FUSIONS.items():
            found = compare_queries(before, scores(options))
            mark = "\\*" if found.low > 0 else " -" if found.high < 0 else ""
            table[name].append(f"{found.difference:+.3f}{mark}")
        print(f"{task.name}: done", file=sys.stderr)
    print(f"| | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for name, cells in table.items():
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
