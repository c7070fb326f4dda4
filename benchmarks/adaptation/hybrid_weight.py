"""Check whether a probe of raw text finds the best weight of BM25 in a hybrid.

For each domain (benchmarks/domains.py), computes nDCG@10 of (1 - w) * retriever + w * BM25 for w from 0 to 1, on a
probe of the text and on labelled queries. Prints the weight that each rule chooses on the probe and its gain over w = 0
on the labelled queries, with the 95% interval of a paired bootstrap over the queries. Rules: the best weight; the
smallest weight that is worse than the best by at most one standard error of the paired differences. Results are kept in
--work.

    python benchmarks/adaptation/hybrid_weight.py --data $REVELA_HUB_DATA
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from adapt import PASSAGES, PROBE, QUERIES, difference, load_start, run_of
from domains import DOMAINS, load_domain

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.hybrid_weight import WEIGHTS, fuse_runs
from revela_hub.evaluation.probe import build_probe
from revela_hub.evaluation.retrieval import bm25_run, score_run

Curve = dict[str, dict[str, float]]  # weight -> query -> nDCG@10


def curve(task: RetrievalTask, given: argparse.Namespace) -> Curve:
    dense, bm25 = run_of(load_start(given.start), task, given.bf16), bm25_run(task)
    runs = {str(weight): fuse_runs(dense, bm25, task, weight) for weight in WEIGHTS}
    return {weight: dict(score_run(run, task).per_query["ndcg_at_10"]) for weight, run in runs.items()}


def best(found: Curve) -> str:
    return max(found, key=lambda weight: (round(float(np.mean(list(found[weight].values()))), 9), -float(weight)))


def within_one_error(found: Curve) -> str:
    top = np.array(list(found[best(found)].values()))

    def as_good(weight: str) -> bool:
        less = top - np.array(list(found[weight].values()))
        return bool(less.mean() <= less.std(ddof=1) / np.sqrt(len(less)) + 1e-12)

    return min((weight for weight in found if as_good(weight)), key=float)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("outputs/adaptation"))
    parser.add_argument("--start", default="all-MiniLM-L6-v2")
    parser.add_argument("--domains", nargs="+", default=DOMAINS, choices=DOMAINS)
    parser.add_argument("--bf16", action="store_true", help="Use bf16 autocast (needs CPU support).")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    print("| domain | on | rule | w | nDCG@10 on labelled queries (difference from w = 0) |\n|---|---|---|---|---|")
    for name in given.domains:
        file = given.work / f"hybrid-weight-{Path(given.start).name}-{name}.json"
        if not file.exists():
            domain = load_domain(name, given.data, given.work, queries=QUERIES, passages=PASSAGES)
            probe = build_probe(domain.text, PROBE).task
            file.write_text(json.dumps({"probe": curve(probe, given), "labels": curve(domain.task, given)}))
        kept = json.loads(file.read_text())
        for part, rule in (("probe", best), ("probe", within_one_error), ("labels", best)):
            weight = rule(kept[part])
            said = difference(kept["labels"]["0.0"], kept["labels"][weight])
            print(f"| {name} | {part} | {rule.__name__.replace('_', ' ')} | {weight} | {said} |")
        for part in ("probe", "labels"):
            means = [f"{np.mean(list(kept[part][str(weight)].values())):.3f}" for weight in WEIGHTS]
            print(f"  {name}, {part}, w = 0 to 1: {' '.join(means)}", flush=True)


if __name__ == "__main__":
    main()
