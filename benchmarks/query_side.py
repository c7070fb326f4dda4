"""Compare the forms of Revela's similarity at two temperatures, with models of 7 M parameters and the same CPU time.

Each cell trains the quickstart's language model as a retriever (last token, prompts, all weights), with another copy as the language
model, on Wikipedia for `--seconds` of CPU time, and measures nDCG@10 on 200 queries that are held out of that text. One thread. The
forms are symmetric, query side (first half of a chunk against whole chunks), and query side with the cosines in bfloat16, as in the
authors' training. Every cell and seed writes a file to --work at once; repeating the command skips those that exist.

    python benchmarks/query_side.py --data $REVELA_HUB_DATA --work outputs/query-side
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from revela_hub.data import GroupSettings, build_groups
from revela_hub.evaluation import evaluate_retrieval
from revela_hub.evaluation.probe import ProbeSettings, build_probe
from revela_hub.evaluation.probe_folder import write_probe
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


def train(form: Form, temperature: float, seed: int, given: argparse.Namespace) -> dict[str, Any]:
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
    config = {"similarity_sides": form.sides, "similarity_dtype": form.dtype, "similarity_span": "first_half"}
    trainer = RevelaTrainer(
        str(LM),
        arguments,
        lm=str(LM),
        max_length=given.tokens,
        model_init_kwargs=config | {"temperature": temperature, "v_normalization": True},
        train_dataset=given.groups,
        callbacks=[clock],
    )
    if given.start is None:
        given.start = score(trainer, given)
    trainer.train()
    rest = clock.logged[len(clock.logged) // 2 :]
    return {
        "form": form.name,
        "temperature": temperature,
        "seed": seed,
        "seconds": round(clock.spent, 1),
        "steps": trainer.state.global_step,
        "start": round(given.start, 5),
        METRIC: round(score(trainer, given), 5),
        "entropy_first_steps": round(statistics.fmean(row["similarity_entropy"] for row in clock.logged[:8]), 4),
        "entropy_second_half": round(statistics.fmean(row["similarity_entropy"] for row in rest), 4),
        "loss": round(statistics.fmean(row["loss"] for row in rest), 4),
    }


def score(trainer: RevelaTrainer, given: argparse.Namespace) -> float:
    """Return the mean nDCG@10 of the trainer's retriever."""
    return evaluate_retrieval(trainer.retriever, given.task).ndcg_at_10


def table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table: mean over the seeds, standard deviation, and entropy in nats."""
    lines = ["| temperature | " + " | ".join(form.name for form in FORMS) + " |", "|---|" + "---|" * len(FORMS)]
    for temperature in TEMPERATURES:
        cells = []
        for form in FORMS:
            runs = [r for r in records if r["form"] == form.name and r["temperature"] == temperature]
            scores = [r[METRIC] for r in runs]
            if not runs:
                cells.append("")
                continue
            spread = f" ± {statistics.stdev(scores):.3f}" if len(runs) > 1 else ""
            entropy = statistics.fmean(r["entropy_second_half"] for r in runs)
            steps = statistics.fmean(r["steps"] for r in runs)
            cells.append(f"{statistics.fmean(scores):.3f}{spread} ({entropy:.2f} nats, {steps:.0f} steps)")
        lines.append(f"| {temperature:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Folder with the data sets (REVELA_HUB_DATA).")
    parser.add_argument("--work", type=Path, default=Path("outputs/query-side"))
    parser.add_argument("--seconds", type=float, default=230, help="CPU time of each training.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--group", type=int, default=16, help="Chunks of a group.")
    parser.add_argument("--words", type=int, default=45, help="Most words of a chunk.")
    parser.add_argument("--tokens", type=int, default=80, help="Most tokens of a chunk in training.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    text = str(given.data / "text" / "wikipedia" / "part-00.jsonl.gz")
    probe = build_probe([text], ProbeSettings(queries=200, passages=1000))
    folder = given.work / "probe"
    if not folder.exists():
        write_probe(probe, folder)
    given.task, given.start = probe.task, None
    settings = GroupSettings(group_size=given.group, max_words=given.words, max_groups=500)
    given.groups = build_groups([{"path": text, "held_out": str(folder)}], settings, cache_dir=given.work / "cache")
    print(
        f"`python benchmarks/query_side.py {' '.join(sys.argv[1:])}`\n{probe}; {len(given.groups):,} groups", flush=True
    )
    print(f"an even distribution has {math.log(given.group - 1):.2f} nats", flush=True)
    records = []
    for seed in given.seeds:
        for temperature in TEMPERATURES:
            for form in FORMS:
                name = f"{form.sides}-{form.dtype}-{temperature:g}-{seed}.json"
                file = given.work / name
                if not file.exists():
                    record = train(form, temperature, seed, given)
                    part = file.with_suffix(".part")
                    part.write_text(json.dumps(record) + "\n", encoding="utf-8")
                    part.replace(file)
                    print(file.read_text(encoding="utf-8"), end="", flush=True)
                records.append(json.loads(file.read_text(encoding="utf-8")))
        print(f"\n{table(records)}\n", flush=True)


if __name__ == "__main__":
    main()
