"""Do changes of the vectors that need no training help a retriever on a collection?

For each domain (benchmarks/domains.py), nDCG@10 of the hybrid with BM25 (weight 0.3) after a change, minus that of the unchanged
retriever, with its 95% interval (paired bootstrap over the labelled queries):

    centred        minus the mean of the passages                                 (part: 0.5 or 1)
    directions     without the mean and the first principal directions            (Mu and Viswanath 2018)
    whitened       principal directions divided by their standard deviation, smoothed by `part` of the mean variance
    feedback       a query plus `part` of the mean of its best passages           (Rocchio)
    neighbours     a passage plus `part` of the mean of its nearest passages

    python benchmarks/adaptation/untrained.py --data $REVELA_HUB_DATA
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks")]

from adapt import difference, load_start  # noqa: E402
from domains import DOMAINS, load_domain  # noqa: E402

from revela_hub.data.sources.beir import RetrievalTask  # noqa: E402
from revela_hub.evaluation.hybrid_weight import fuse_runs  # noqa: E402
from revela_hub.evaluation.retrieval import Rankings, bm25_run, score_run  # noqa: E402
from revela_hub.retrieval.hybrid import BM25_WEIGHT  # noqa: E402

Vectors = NDArray[np.float64]
Change = Callable[[Vectors, Vectors], tuple[Vectors, Vectors]]
QUERIES, PASSAGES, TOKENS, HITS = 200, 1000, 256, 100


def unit(vectors: Vectors) -> Vectors:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def centred(part: float) -> Change:
    return lambda queries, passages: (queries - part * passages.mean(0), passages - part * passages.mean(0))


def directions(count: int) -> Change:
    def change(queries: Vectors, passages: Vectors) -> tuple[Vectors, Vectors]:
        mean = passages.mean(0)
        first = np.linalg.svd(passages - mean, full_matrices=False)[2][:count]
        without = [vectors - mean - (vectors - mean) @ first.T @ first for vectors in (queries, passages)]
        return without[0], without[1]

    return change


def whitened(part: float) -> Change:
    def change(queries: Vectors, passages: Vectors) -> tuple[Vectors, Vectors]:
        mean = passages.mean(0)
        variances, basis = np.linalg.eigh(np.cov((passages - mean).T))
        scaled = basis / np.sqrt(variances.clip(0) + part * variances.mean())
        return (queries - mean) @ scaled, (passages - mean) @ scaled

    return change


def feedback(count: int, part: float) -> Change:
    def change(queries: Vectors, passages: Vectors) -> tuple[Vectors, Vectors]:
        best = np.argsort(-(queries @ passages.T), axis=1)[:, :count]
        return queries + part * passages[best].mean(1), passages

    return change


def neighbours(count: int, part: float) -> Change:
    def change(queries: Vectors, passages: Vectors) -> tuple[Vectors, Vectors]:
        scores = passages @ passages.T
        np.fill_diagonal(scores, -np.inf)
        return queries, passages + part * passages[np.argsort(-scores, axis=1)[:, :count]].mean(1)

    return change


CHANGES: dict[str, Change] = {
    "centred, 0.5": centred(0.5),
    "centred, 1": centred(1.0),
    "1 direction removed": directions(1),
    "3 directions removed": directions(3),
    "whitened, 1": whitened(1.0),
    "whitened, 3": whitened(3.0),
    "feedback, 3 passages, 0.3": feedback(3, 0.3),
    "feedback, 5 passages, 0.5": feedback(5, 0.5),
    "neighbours, 3, 0.2": neighbours(3, 0.2),
    "neighbours, 5, 0.4": neighbours(5, 0.4),
}


def hybrid(queries: Vectors, passages: Vectors, bm25: Rankings, task: RetrievalTask) -> dict[str, float]:
    """Return each query's nDCG@10 of the hybrid."""
    names, dense = list(task.corpus), Rankings()
    for query, scores in zip(task.queries, unit(queries) @ unit(passages).T, strict=True):
        dense[query] = {names[row]: float(scores[row]) for row in np.argsort(-scores, kind="stable")[:HITS]}
    return dict(score_run(fuse_runs(dense, bm25, task, BM25_WEIGHT), task).per_query["ndcg_at_10"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--work", type=Path, default=Path("outputs/untrained"))
    parser.add_argument("--start", default="all-MiniLM-L6-v2", help="retriever: all-MiniLM-L6-v2 or a folder")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    model = load_start(given.start)
    model.max_seq_length = TOKENS
    table: dict[str, list[str]] = {name: [] for name in ("none", *CHANGES)}
    for name in DOMAINS:
        task = load_domain(name, given.data, given.work, queries=QUERIES, passages=PASSAGES).task
        bm25 = bm25_run(task)
        queries = unit(model.encode_query(list(task.queries.values())).astype(np.float64))
        passages = unit(model.encode_document(list(task.corpus.values())).astype(np.float64))
        before = hybrid(queries, passages, bm25, task)
        table["none"].append(f"{np.mean(list(before.values())):.3f}")
        for change, made in CHANGES.items():
            table[change].append(difference(before, hybrid(*made(queries, passages), bm25, task)))
        print(f"{name}: done", file=sys.stderr)
    print(f"| | {' | '.join(DOMAINS)} |\n|---|{'---|' * len(DOMAINS)}")
    for change, cells in table.items():
        print(f"| {change} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
