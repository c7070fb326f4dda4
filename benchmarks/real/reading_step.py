"""Time and memory of a Revela step with a real language model: added and joint reading, the LM trained and frozen.

A step is a forward and backward pass and an AdamW update on one group of Wikipedia chunks. All variants alternate in one process;
times are medians in CPU seconds. Memory is the peak of the anonymous memory (without mapped files) of a process that runs only this
variant, sampled every 20 ms; it needs Linux.

    python benchmarks/real/reading_step.py --data $REVELA_HUB_DATA --retriever $MINILM --lm $SMOLLM2
"""

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from reading_loss import SIZE, batches

from revela_hub.trainers.revela.checkpoint import load_backbones

VARIANTS = {
    "added, LM trained (today)": ("added", False),
    "added, LM frozen": ("added", True),
    "joint, LM trained": ("joint", False),
    "joint, LM frozen": ("joint", True),
}


def make_step(options: argparse.Namespace, variant: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return a function that trains on a batch."""
    reading, frozen = VARIANTS[variant]
    settings = {"group_size": SIZE, "temperature": 0.05, "reading": reading}
    model = load_backbones(options.retriever, options.lm, **settings).model.train()
    model.lm.requires_grad_(not frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def step(batch: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad()
        model(**batch, return_logits=False).loss.backward()
        optimizer.step()

    return step


def peak(options: argparse.Namespace, variant: str) -> float:
    """Return the peak memory in GiB of a process that runs two steps of one variant."""
    own = ["--data", str(options.data), "--retriever", options.retriever, "--lm", options.lm, "--only", variant]
    done = subprocess.run([sys.executable, __file__, *own], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def sample(seen: list[float]) -> None:
    """Append the anonymous memory of this process in GiB, again and again."""
    while True:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
        seen.append(int(line.split()[1]) / 2**20)
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--retriever", required=True)
    parser.add_argument("--lm", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=VARIANTS, help="print the peak memory of one variant")
    options = parser.parse_args()
    found = batches(options.data, options.retriever, options.lm, 2)
    if options.only:
        step = make_step(options, options.only)
        seen: list[float] = []
        threading.Thread(target=sample, args=(seen,), daemon=True).start()
        for batch in found:
            step(batch)
        sys.stdout.write(f"{max(seen):.2f}\n")
        return
    steps = {variant: make_step(options, variant) for variant in VARIANTS}
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for turn in range(options.repeats + 1):
        for variant, step in steps.items():
            start = time.process_time()
            step(found[0])
            if turn:  # the first is a warm-up
                times[variant].append(time.process_time() - start)
    del steps
    first = statistics.median(next(iter(times.values())))
    for variant, seconds in times.items():
        median = statistics.median(seconds)
        sys.stdout.write(f"{variant:28s} | {median:5.2f} s | {median / first:.2f} | {peak(options, variant):.2f} GiB\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
