"""Compare the forms of Revela's similarity, and its ablations, with models of 7 M parameters and the same CPU time.

Each cell trains the quickstart's language model as a retriever (last token, prompts, all weights), with another copy as the language
model, on Wikipedia for `--seconds` of CPU time, and measures nDCG@10 on 200 queries that are held out of that text. One thread. The
forms are symmetric, query side (first half of a chunk against whole chunks), and query side with the cosines in bfloat16, as in the
authors' training. Every cell and seed writes a file to --work at once; repeating the command skips those that exist.

`--ablations` trains the query side in float32 at 0.05 instead, each time with one thing changed: without V-normalisation, whole chunks as
queries, on the functions of Python's library, or on both texts; and measures on 200 queries of each text.

    python benchmarks/query_side.py --data $REVELA_HUB_DATA --work outputs/query-side
    python benchmarks/query_side.py --data $REVELA_HUB_DATA --work outputs/query-side --ablations
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from domains import load_domain
from transformers import TrainerCallback

from revela_hub.data import GroupSettings, build_groups
from revela_hub.data.text.groups import mix_groups
from revela_hub.evaluation import evaluate_retrieval
from revela_hub.evaluation.probe import ProbeSettings, build_probe, write_probe
from revela_hub.trainers import RevelaTrainer, RevelaTrainingArguments

LM = Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "lm"
METRIC = "ndcg_at_10"
TEMPERATURES = (1e-4, 0.05)


class Form(NamedTuple):
    """A form of the similarity."""

    name: str
    sides: str
    dtype: str


FORMS = (
    Form("symmetric, float32", "symmetric", "float32"),
    Form("query side, float32", "query_passage", "float32"),
    Form("query side, bfloat16", "query_passage", "bfloat16"),
)


class Ablation(NamedTuple):
    """A text to train on, and what is changed."""

    name: str
    text: str = "Wikipedia"
    config: dict[str, Any] = {}  # noqa: RUF012 (not changed)


ABLATIONS = (
    Ablation("Wikipedia"),
    Ablation("Wikipedia, no V-normalisation", config={"v_normalization": False}),
    Ablation("Wikipedia, whole chunks as queries", config={"similarity_span": "full"}),
    Ablation("code", "code", {"similarity_span": "full"}),
    Ablation("code, first half as query", "code"),
    Ablation("both", "both"),
)


class Clock(TrainerCallback):
    """Ends the training after some seconds of CPU time, and keeps the entropies that the trainer logs."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began, self.spent = seconds, 0.0, 0.0
        self.logged: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self.began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop if the time is over."""
        self.spent = time.process_time() - self.began
        control.should_training_stop = self.spent >= self.seconds

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep a step's log."""
        if logs and "loss" in logs:
            self.logged.append({name: round(float(logs[name]), 5) for name in ("loss", "similarity_entropy")})


def train(config: dict[str, Any], groups: Dataset, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Train one cell and return its record."""
    arguments = RevelaTrainingArguments(
        str(given.work / "run"),
        lora_rank=0,
        learning_rate=1e-3,
        retriever_learning_rate=3e-4,
        retriever_start_step=8,
        warmup_steps=8,
        adam_beta2=0.98,
        lr_scheduler_type="constant_with_warmup",
        max_steps=1_000_000,
        gradient_accumulation_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        quiet=True,
        use_cpu=True,
        bf16=False,
        seed=seed,
    )
    clock = Clock(given.seconds)
    config = {"similarity_span": "first_half", "v_normalization": True} | config
    trainer = RevelaTrainer(
        str(LM),
        arguments,
        lm=str(LM),
        max_length=given.tokens,
        model_init_kwargs=config,
        train_dataset=groups,
        callbacks=[clock],
    )
    if given.start is None:
        given.start = scores(trainer, given)
    trainer.train()
    rest = clock.logged[len(clock.logged) // 2 :]
    return {
        "seed": seed,
        "seconds": round(clock.spent, 1),
        "steps": trainer.state.global_step,
        "start": given.start,
        METRIC: scores(trainer, given),
        "entropy_first_steps": round(statistics.fmean(row["similarity_entropy"] for row in clock.logged[:8]), 4),
        "entropy_second_half": round(statistics.fmean(row["similarity_entropy"] for row in rest), 4),
        "loss": round(statistics.fmean(row["loss"] for row in rest), 4),
    }


def scores(trainer: RevelaTrainer, given: argparse.Namespace) -> dict[str, float]:
    """Return the mean nDCG@10 of the trainer's retriever on each text."""
    return {
        name: round(evaluate_retrieval(trainer.retriever, task).ndcg_at_10, 5) for name, task in given.tasks.items()
    }


def mean(values: list[float]) -> str:
    """Return the mean over the seeds with the standard deviation."""
    return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


def table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the forms at each temperature: mean over the seeds, and entropy in nats."""
    lines = ["| temperature | " + " | ".join(form.name for form in FORMS) + " |", "|---|" + "---|" * len(FORMS)]
    for temperature in TEMPERATURES:
        cells = []
        for form in FORMS:
            runs = [r for r in records if r["form"] == form.name and r["temperature"] == temperature]
            if not runs:
                cells.append("")
                continue
            entropy = statistics.fmean(r["entropy_second_half"] for r in runs)
            steps = statistics.fmean(r["steps"] for r in runs)
            score = mean([r[METRIC]["Wikipedia"] for r in runs])
            cells.append(f"{score} ({entropy:.2f} nats, {steps:.0f} steps)")
        lines.append(f"| {temperature:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ablation_table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the ablations: mean over the seeds on each text."""
    texts = list(records[0][METRIC])
    lines = ["| trained on | steps | " + " | ".join(texts) + " |", "|---|---|" + "---|" * len(texts)]
    lines.append("| start | 0 | " + " | ".join(f"{records[0]['start'][text]:.3f}" for text in texts) + " |")
    for ablation in ABLATIONS:
        if runs := [r for r in records if r["form"] == ablation.name]:
            cells = [mean([r[METRIC][text] for r in runs]) for text in texts]
            steps = statistics.fmean(r["steps"] for r in runs)
            lines.append(f"| {ablation.name} | {steps:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def texts_of(given: argparse.Namespace) -> None:
    """Make the tasks and the groups of each text in `given`."""
    sources: dict[str, tuple[Any, Any]] = {}
    wikipedia = str(given.data / "text" / "wikipedia" / "part-00.jsonl.gz")
    probe = build_probe([wikipedia], ProbeSettings(queries=200, passages=1000))
    folder = given.work / "probe"
    if not folder.exists():
        write_probe(probe, folder)
    sources["Wikipedia"] = probe.task, {"path": wikipedia, "held_out": str(folder)}
    if given.ablations:
        code = load_domain("stdlib", given.data, given.work, queries=200, passages=1000)
        sources["code"] = code.task, code.text[0]
    settings = GroupSettings(group_size=given.group, max_words=given.words, max_groups=500)
    given.tasks = {name: task for name, (task, _) in sources.items()}
    given.groups = {
        name: build_groups([source], settings, cache_dir=given.work / "cache") for name, (_, source) in sources.items()
    }
    if given.ablations:
        given.groups["both"] = mix_groups(list(given.groups.values()), [1, 1])
    print(f"{probe}; {', '.join(f'{name}: {len(rows):,} groups' for name, rows in given.groups.items())}", flush=True)


def cells_of(given: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Yield the name, file, configuration and text of each cell."""
    if given.ablations:
        for ablation in ABLATIONS:
            config = {"similarity_sides": "query_passage", "temperature": 0.05} | ablation.config
            yield ablation.name, "ablation-" + ablation.name.replace(",", "").replace(" ", "_"), config, ablation.text
        return
    for temperature in TEMPERATURES:
        for form in FORMS:
            config = {"similarity_sides": form.sides, "similarity_dtype": form.dtype, "temperature": temperature}
            yield form.name, f"{form.sides}-{form.dtype}-{temperature:g}", config, "Wikipedia"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Folder with the data sets (REVELA_HUB_DATA).")
    parser.add_argument("--work", type=Path, default=Path("outputs/query-side"))
    parser.add_argument("--seconds", type=float, default=230, help="CPU time of each training.")
    parser.add_argument("--ablations", action="store_true", help="Measure the ablations instead of the forms.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--group", type=int, default=16, help="Chunks of a group.")
    parser.add_argument("--words", type=int, default=45, help="Most words of a chunk.")
    parser.add_argument("--tokens", type=int, default=80, help="Most tokens of a chunk in training.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    given.start = None
    print(f"`python benchmarks/query_side.py {' '.join(sys.argv[1:])}`", flush=True)
    texts_of(given)
    print(f"an even distribution has {math.log(given.group - 1):.2f} nats", flush=True)
    records = []
    for seed in given.seeds:
        for name, stem, config, text in cells_of(given):
            file = given.work / f"{stem}-{seed}.json"
            if not file.exists():
                record = train(config, given.groups[text], seed, given)
                record = {"form": name, "temperature": config["temperature"]} | record
                part = file.with_suffix(".part")
                part.write_text(json.dumps(record) + "\n", encoding="utf-8")
                part.replace(file)
                print(file.read_text(encoding="utf-8"), end="", flush=True)
            records.append(json.loads(file.read_text(encoding="utf-8")))
        print(f"\n{(ablation_table if given.ablations else table)(records)}\n", flush=True)


if __name__ == "__main__":
    main()
