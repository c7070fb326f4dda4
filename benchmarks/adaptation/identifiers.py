"""Does BM25 find code better if identifiers are also indexed by their parts (`--bm25_split_identifiers true`)?

Tasks: web queries for Python functions (CoSQA), and held-out docstrings for the functions of Python's library and of installed
packages. For each, nDCG@10 of BM25 and of its hybrid with a retriever (weight of BM25: 0.3), without and with split identifiers, and the
difference of the hybrids with its 95% interval (paired bootstrap over the queries).

    python benchmarks/adaptation/identifiers.py --data $REVELA_HUB_DATA
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "examples" / "quickstart")]

from adapt import difference, load_start, run_of  # noqa: E402
from domains import load_domain, sample  # noqa: E402
from task import docstring_task  # noqa: E402

from revela_hub.data.sources.beir import RetrievalTask  # noqa: E402
from revela_hub.evaluation.hybrid_weight import fuse_runs  # noqa: E402
from revela_hub.evaluation.retrieval import Rankings, bm25_run, score_run  # noqa: E402
from revela_hub.retrieval import BM25Settings  # noqa: E402
from revela_hub.retrieval.hybrid import BM25_WEIGHT  # noqa: E402

QUERIES, PASSAGES, TOKENS = 200, 1000, 128


def tasks(given: argparse.Namespace) -> Iterator[RetrievalTask]:
    for name in ("cosqa", "stdlib"):
        yield load_domain(name, given.data, given.work, queries=QUERIES, passages=PASSAGES).task
    for name in given.packages:
        package = importlib.util.find_spec(name)
        if package is None or not package.submodule_search_locations:
            raise SystemExit(f"the package {name} is not installed: pip install {name}")
        made = docstring_task(package.submodule_search_locations[0], queries=2 * QUERIES, seed=1, name=name)
        yield sample(made.task, QUERIES, PASSAGES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--work", type=Path, default=Path("outputs/identifiers"))
    parser.add_argument("--start", default="all-MiniLM-L6-v2", help="retriever: all-MiniLM-L6-v2 or a folder")
    parser.add_argument("--packages", nargs="+", default=["sklearn", "scipy", "networkx", "sympy"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    model = load_start(given.start)
    model.max_seq_length = TOKENS
    print("| | BM25 | ... split | retriever | hybrid | ... split |\n|---|---|---|---|---|---|")
    for task in tasks(given):

        def score(run: Rankings, task: RetrievalTask = task) -> dict[str, float]:
            return dict(score_run(run, task).per_query["ndcg_at_10"])

        plain, split = (bm25_run(task, BM25Settings(split_identifiers=each)) for each in (False, True))
        dense = run_of(model, task, bf16=False)
        hybrids = [score(fuse_runs(dense, each, task, BM25_WEIGHT)) for each in (plain, split)]
        alone = [sum(score(run).values()) / len(task.queries) for run in (plain, split, dense)]
        before = sum(hybrids[0].values()) / len(task.queries)
        columns = [*(f"{each:.3f}" for each in (*alone, before)), difference(*hybrids)]
        print(f"| {task.name} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
