"""Do the token vectors of a retriever, which it pools into one vector per text, find more than that vector and BM25 alone?

The hybrid of a retriever and BM25 (weight 0.3) is reranked by late interaction (`--rerank self`): for each token of the query, the best
cosine among the passage's tokens. No training. nDCG@10 of the hybrid on the tasks of fusions.py (200 queries, 1,000 passages each), and
the difference with each weight and number of reranked results, with its 95% interval (paired bootstrap over the queries).

    python benchmarks/adaptation/late_interaction.py --data $REVELA_HUB_DATA
    python benchmarks/adaptation/late_interaction.py --data $REVELA_HUB_DATA --start outputs/my-retriever --packages
"""

import argparse
import sys
from itertools import chain
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks")]

from adapt import load_start  # noqa: E402
from domains import load_domain  # noqa: E402
from fusions import PROSE  # noqa: E402
from identifiers import PASSAGES, QUERIES, tasks  # noqa: E402

from revela_hub.adaptation.systems import System  # noqa: E402
from revela_hub.evaluation import compare_queries  # noqa: E402
from revela_hub.evaluation.hybrid_weight import fuse_runs  # noqa: E402
from revela_hub.evaluation.retrieval import Rankings, bm25_run, rerank_run, retrieval_run, score_run  # noqa: E402
from revela_hub.retrieval import BM25Settings  # noqa: E402
from revela_hub.retrieval.hybrid import BM25_WEIGHT  # noqa: E402
from revela_hub.retrieval.rerank import Reranker  # noqa: E402

WEIGHTS, DEPTHS = (0.2, 0.3, 0.4, 0.5, 0.6, 1.0), (10, 20, 50)
DEPTH, WEIGHT, TOKENS = 20, 0.5, 256


def best_of(run: Rankings, depth: int) -> Rankings:
    return {query: dict(list(hits.items())[:depth]) for query, hits in run.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--work", type=Path, default=Path("outputs/late-interaction"))
    parser.add_argument("--start", default="all-MiniLM-L6-v2", help="retriever: all-MiniLM-L6-v2 or a folder")
    parser.add_argument("--packages", nargs="*", default=["sklearn", "scipy", "networkx", "sympy"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    model = load_start(given.start)
    model.max_seq_length = min(TOKENS, model[0].auto_model.config.max_position_embeddings)
    reranker = Reranker(model)
    prose = (load_domain(name, given.data, given.work, queries=QUERIES, passages=PASSAGES).task for name in PROSE)
    names: list[str] = []
    table: dict[str, list[str]] = {}
    for task in chain(prose, tasks(given)):
        names.append(task.name.split("/")[0])  # without the split
        split = names[-1] not in (*PROSE, "cosqa")
        system = System(
            "", "", retrieval_run(model, task), bm25_run(task, BM25Settings(split_identifiers=split)), BM25_WEIGHT
        )
        first = fuse_runs(system.dense, system.bm25, task, system.bm25_weight)
        tokens = rerank_run(best_of(first, max(DEPTHS)), task, reranker)
        before = system.scores(task)
        rows = {"retriever alone": system.scores(task, 0.0), "hybrid with BM25, 0.3": before}
        for depth, weight in [(DEPTH, weight) for weight in WEIGHTS] + [(d, WEIGHT) for d in DEPTHS if d != DEPTH]:
            best = best_of(first, depth)
            again = {query: {passage: tokens[query][passage] for passage in hits} for query, hits in best.items()}
            run = again if weight == 1 else fuse_runs(best, again, task, weight)
            rows[f"best {depth}, weight {weight}"] = dict(score_run(run, task).per_query["ndcg_at_10"])
        for name, scores in rows.items():
            mean = sum(scores.values()) / len(scores)
            found = compare_queries(before, scores)
            bold = "**" if found.low > 0 or found.high < 0 else ""
            cell = f"{bold}{found.difference:+.3f}{bold} [{found.low:+.3f}, {found.high:+.3f}]"
            table.setdefault(name, []).append(f"{mean:.3f}" if name[:4] != "best" else cell)
        print(f"{task.name}: done", file=sys.stderr)
    print(f"| | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for name, cells in table.items():
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
