"""Measure tokens per second of Revela's batches on one core, made from text and from stored tokens.

python benchmarks/revela_collator.py --data path/to/code --retriever sentence-transformers/all-MiniLM-L6-v2 --lm gpt2
"""

import argparse
import platform
import sys
import time
from collections.abc import Sequence

from datasets import Dataset
from transformers import AutoTokenizer

from revela_hub import build_groups
from revela_hub.hub_cards.tokenizers import with_eos
from revela_hub.trainers import RevelaCollator
from revela_hub.trainers.revela.collator import tokenize_groups


def tokens_per_second(groups: Dataset, collator: RevelaCollator, batch: int, repeats: int) -> tuple[float, float]:
    """Return LM tokens and retriever tokens per second, the best of several epochs over the groups on disk."""
    best, counts = float("inf"), (0, 0)
    for _ in range(repeats):
        start, seen = time.process_time(), [0, 0]
        for first in range(0, len(groups) - batch + 1, batch):
            rows: Sequence[dict] = groups.__getitems__(list(range(first, first + batch)))
            made = collator(rows)
            seen[0] += int(made["attention_mask"].sum())
            seen[1] += int(made["retriever_attention_mask"].sum())
        best, counts = min(best, time.process_time() - start), (seen[0], seen[1])
    return counts[0] / best, counts[1] / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="folders of text or code")
    parser.add_argument("--retriever", required=True, help="folder or id, for its tokenizer")
    parser.add_argument("--lm", required=True, help="folder or id, for its tokenizer")
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="groups per batch")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    retriever, lm = (AutoTokenizer.from_pretrained(name) for name in (args.retriever, args.lm))
    groups = build_groups(args.data)
    groups = groups.select(range(min(args.groups, len(groups))))
    print(f"`python benchmarks/revela_collator.py {' '.join(sys.argv[1:])}`")
    print(f"one core ({platform.machine()}), Python {platform.python_version()}, {len(groups)} groups of 16 chunks\n")
    print("| similarity_span | LM tokens/s from text | from tokens | retriever tokens/s from text | from tokens |")
    print("|---|---|---|---|---|")
    for span in ("full", "first_half"):
        collator = RevelaCollator(with_eos(retriever), lm, similarity_span=span)
        rates = [
            tokens_per_second(part, collator, args.batch, args.repeats)
            for part in (groups, tokenize_groups(groups, collator))
        ]
        cells = [f"{rate[side] / 1e6:.2f} M" for side in (0, 1) for rate in rates]
        print(f"| {span} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
