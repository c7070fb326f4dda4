"""Tables of `imprag.py`: a row for each run, and paired comparisons over the questions."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from revela_hub.evaluation.significance import paired_bootstrap

Result = dict[str, Any]
READINGS = ("gold", "retrieved", "random", "none")
PAIRS = (
    ("tuned", "ra-it"),
    ("tuned", "imprag:warm-up"),
    ("base", "base:bm25"),
    ("base", "imprag:untrained"),
    ("base:bm25", "imprag:untrained"),
    ("imprag:untrained", "imprag:warm-up"),
    ("base:bm25", "ra-it"),
    ("imprag:warm-up", "imprag:both"),
    ("imprag:warm-up:independent", "imprag:warm-up"),
    ("imprag:warm-up:segmented", "imprag:warm-up"),
    ("imprag:distillation", "imprag:both"),
    *((a, b) for a in ("ra-it", "ra-dit-llama", "ra-dit") for b in ("imprag:warm-up", "imprag:both")),
    ("ra-it", "ra-dit-llama"),
)


def load(output: Path, name: str) -> list[Result]:
    """Return the finished runs of a row by seed."""
    files = sorted((output / "results").glob(f"{name.replace(':', '+')}@*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def print_report(output: Path, names: Sequence[str]) -> None:
    """Print the tables of the finished runs."""
    runs = {name: found for name in names if (found := load(output, name))}
    print(
        "| run | seeds | EM % | F1 % | recall@k % | recall@10 % | median rank of gold | ppl gold | ppl retrieved | ppl random "
        f"| ppl without passages |\n|{' --- |' * 11}"
    )
    for name, found in runs.items():
        scores: list[Callable[[Result], float | None]] = [
            *(lambda run, key=key: _percent(run, key) for key in ("exact_match", "f1")),
            lambda run: _percent(run, _recall(run)),
            lambda run: _percent(run, "recall_at_10"),
            lambda run: float(np.median(run["gold_rank"])) if "gold_rank" in run else None,
            *(lambda run, reading=reading: _perplexity(run, reading) for reading in READINGS),
        ]
        print(
            f"| {name} | {len(found)} | " + " | ".join(_mean([score(run) for run in found]) for score in scores) + " |"
        )
        for run in found:
            if "bytes" in run:
                print(f"| {name}: {run['bytes'] / 1e6:.2f} MB |")
    print(
        "\nPaired bootstrap over the questions, b - a; log-likelihood of the gold answer per token\n\n"
        "| a | b | F1 % | log-likelihood, own passages | log-likelihood, gold passage | recall@k % |\n|" + " --- |" * 6
    )
    for a, b in PAIRS:
        if a in runs and b in runs:
            pairs = list(zip(runs[a], runs[b], strict=False))
            cells = [_difference(pairs, values) for values in (_f1, _own_likelihood, _gold_likelihood, _found)]
            print(f"| {a} | {b} | " + " | ".join(cells) + " |")


def _difference(pairs: Sequence[tuple[Result, Result]], values: Callable[[Result], Any]) -> str:
    """Return b - a, with each question's value averaged over the seeds that both runs have."""
    ends = [[values(pair[side]) for pair in pairs] for side in (0, 1)]
    if any(value is None for side in ends for value in side):
        return ""
    return str(paired_bootstrap(*(np.mean(side, axis=0) for side in ends)))


def _f1(run: Result) -> Any:
    return 100 * np.array(run["f1"])


def _own_likelihood(run: Result) -> Any:
    likelihoods = run["log_likelihood"]
    return np.array(likelihoods["retrieved" if "retrieved" in likelihoods else "none"]) / np.array(run["tokens"])


def _gold_likelihood(run: Result) -> Any:
    return (
        np.array(run["log_likelihood"]["gold"]) / np.array(run["tokens"]) if "gold" in run["log_likelihood"] else None
    )


def _found(run: Result) -> Any:
    return 100 * np.array(run[_recall(run)]) if _recall(run) in run else None


def _recall(run: Result) -> str:
    """Return the key of the recall among the passages that are read."""
    return next((key for key in run if key.startswith("recall_at_") and key != "recall_at_10"), "recall_at_10")


def _percent(run: Result, key: str) -> float | None:
    return 100 * float(np.mean(run[key])) if key in run else None


def _perplexity(run: Result, reading: str) -> float | None:
    """Return the perplexity of the gold answers' tokens, EOS included."""
    values = run["log_likelihood"].get(reading)
    return None if values is None else math.exp(-sum(values) / sum(run["tokens"]))


def _mean(values: Sequence[float | None]) -> str:
    """Return the mean over seeds, with the range if there are several."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    digits = 1 if max(known) >= 1 else 3
    span = f" ({min(known):.{digits}f}-{max(known):.{digits}f})" if len(known) > 1 else ""
    return f"{sum(known) / len(known):.{digits}f}{span}"
