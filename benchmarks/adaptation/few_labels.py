"""Measure how much 0, 50, 200 and 1000 labelled pairs improve an existing retriever.

The pairs are sampled from the domain's labelled training questions (medquad: train questions, about other diseases than
the dev questions; cosqa: the pairs labelled as matching, with other queries; fewer than 1000 exist). Training uses
sentence-transformers' MultipleNegativesRankingLoss with in-batch negatives and the model's own prompts. Queries and passages are those of adapt.py.
Each point is compared with the base model by a paired bootstrap over the queries, with scores averaged over the
samples. Results are kept in --work, so an interrupted run continues when the command is repeated.

    python benchmarks/adaptation/few_labels.py --data $REVELA_HUB_DATA --seeds 0 1 2
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from adapt import PASSAGES, QUERIES, difference, load_start, pooled, run_of, scores, settings_of
from datasets import Dataset
from domains import Domain, load_domain, read_rows
from recipes import train
from sentence_transformers import SentenceTransformerTrainingArguments

SIZES = (0, 50, 200, 1000)
EPOCHS = {50: 4, 200: 2, 1000: 1}
BATCH = 16


def labelled_pairs(domain: str, data: Path) -> list[tuple[str, str]]:
    """Return (question, passage) pairs. None of the questions is used for evaluation."""
    if domain == "cosqa":
        rows = read_rows(data / "cosqa" / "labelled_pairs.jsonl.gz")
        return [(row["query"], row["code"]) for row in rows if row["label"] == 1]
    texts = {row["_id"]: row["text"] for row in read_rows(data / "medquad" / "passages.jsonl.gz")}
    return [(row["question"], texts[row["passage_id"]]) for row in read_rows(data / "medquad" / "train.jsonl.gz")]


def trained_on(
    pairs: list[tuple[str, str]], size: int, domain: Domain, given: argparse.Namespace, seed: int
) -> dict[str, float]:
    model = load_start(given.start)
    drawn = random.Random(seed).sample(pairs, len(pairs))[:size]  # smaller samples are subsets of larger ones
    if drawn:
        rows = Dataset.from_dict({"anchor": [a for a, _ in drawn], "positive": [p for _, p in drawn]})
        with tempfile.TemporaryDirectory(dir=given.work) as folder:
            updates = max(1, EPOCHS[size] * len(drawn) // BATCH)
            common = settings_of(given, folder, seed) | {"max_steps": updates, "lr_scheduler_type": "linear"}
            train(
                "pairs", model, rows, SentenceTransformerTrainingArguments(**common, per_device_train_batch_size=BATCH)
            )
    return scores(run_of(model, domain.task, given.bf16), domain.task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("outputs/adaptation"))
    parser.add_argument("--start", default="all-MiniLM-L6-v2")
    parser.add_argument("--domains", nargs="+", default=["medquad", "cosqa"], choices=["medquad", "cosqa"])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--bf16", action="store_true", help="Use bf16 autocast for training and evaluation (needs CPU support)."
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    print(
        "| domain | labelled pairs | samples | nDCG@10 (change from the base model [95% interval]) |\n|---|---|---|---|"
    )
    for name in given.domains:
        domain, pairs = (
            load_domain(name, given.data, given.work, queries=QUERIES, passages=PASSAGES),
            labelled_pairs(name, given.data),
        )
        file = given.work / f"few-labels-{Path(given.start).name}-{name}.json"
        kept: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.exists() else {}
        for size in given.sizes:
            found = []
            for seed in given.seeds if size else [0]:
                key = f"{size}-{seed}"
                if key not in kept:
                    kept[key] = trained_on(pairs, size, domain, given, seed)
                    file.write_text(json.dumps(kept))
                found.append({"scores": kept[key]})
            mean = pooled(found, "scores")
            said = difference(kept["0-0"], mean) if size else f"{sum(mean.values()) / len(mean):.3f}"
            print(f"| {name} | {min(size, len(pairs))} | {len(found) if size else ''} | {said} |", flush=True)


if __name__ == "__main__":
    main()
