"""Turns the base language model into a first retriever: mean pooling, trained on pairs of nearby spans.

Uses raw text only: a span of a document and a later span form a pair (similar to Contriever's independent cropping),
with in-batch negatives. Trained with sentence-transformers. Revela starts from this retriever: at this size it learns
several times as fast from a retriever that already separates documents.

    python contrastive.py --wikipedia PATH/part-*.jsonl.gz --base base_lm --output contrastive
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from base_lm_corpus import wikipedia_articles
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Normalize, Pooling, Transformer

BATCH = 128
LEARNING_RATE = 1e-3
QUERY_WORDS, PASSAGE_WORDS, GAP_WORDS = (5, 32), (20, 48), (0, 120)
SEED = 0


def pairs(documents: list[str], count: int, rng: random.Random) -> Iterator[dict[str, str]]:
    """Yields `count` pairs of spans; line ends are kept."""
    while count:
        text = documents[rng.randrange(len(documents))]
        words = text.split(" ")
        query, passage, gap = (rng.randint(*limits) for limits in (QUERY_WORDS, PASSAGE_WORDS, GAP_WORDS))
        room = len(words) - query - gap - passage
        if room < 0:
            continue
        start = rng.randint(0, room)
        second = start + query + gap
        yield {
            "anchor": " ".join(words[start : start + query]),
            "positive": " ".join(words[second : second + passage]),
        }
        count -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wikipedia", nargs="+", type=Path, required=True)
    parser.add_argument("--base", required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()

    rows = list(pairs(list(wikipedia_articles(args.wikipedia)), args.steps * BATCH, random.Random(SEED)))
    transformer = Transformer(args.base, max_seq_length=64)
    pooling = Pooling(transformer.get_word_embedding_dimension(), "mean")
    model = SentenceTransformer(
        modules=[transformer, pooling, Normalize()],
        device="cpu",
        prompts={"query": "Query: ", "document": "Passage: "},
    )
    arguments = SentenceTransformerTrainingArguments(
        output_dir=f"{args.output}-run",
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=BATCH,
        max_steps=args.steps,
        learning_rate=LEARNING_RATE,
        warmup_steps=20,
        adam_beta2=0.98,
        prompts={"anchor": "Query: ", "positive": "Passage: "},
        save_strategy="no",
        logging_steps=20,
        report_to="none",
        seed=SEED,
    )
    loss = MultipleNegativesRankingLoss(model, scale=20.0)
    SentenceTransformerTrainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows), loss=loss).train()
    model.max_seq_length = 160
    model.save_pretrained(args.output)


if __name__ == "__main__":
    main()
