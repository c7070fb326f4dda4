"""Adapt a retriever to raw text with sentence-transformers: TSDAE, SimCSE, pairs, and a teacher on pseudo-queries.

    python examples/adaptation/recipes.py tsdae --data docs/ --model sentence-transformers/all-MiniLM-L6-v2 --output outputs/tsdae

`tsdae` (arXiv 2104.06979) reconstructs a text from the embedding of the text with 60% of its words deleted. `simcse`
(2104.08821) uses a second forward pass with dropout as the positive. `pairs` are a docstring, title or sentence with
the passage it was taken from, and in-batch negatives. `teacher` is GPL (2112.07577) without labels: sentences of the
text replace generated queries, and a hybrid of BM25 and the base model replaces the cross-encoder; `--cross-encoder`
scores the pairs with a cross-encoder as in GPL. Compare the results with `revela-hub probe` and `revela-hub evaluate`.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import CrossEncoder, SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as TrainingArguments
from sentence_transformers.sentence_transformer.losses import (
    DenoisingAutoEncoderLoss,
    DistillKLDivLoss,
    MultipleNegativesRankingLoss,
)

from revela_hub.data.text.passages import build_passages
from revela_hub.evaluation.hybrid_weight import fuse_runs
from revela_hub.evaluation.probe import ProbeSettings, build_probe
from revela_hub.evaluation.retrieval import bm25_run, retrieval_run

RECIPES = ("tsdae", "simcse", "pairs", "teacher")
NEGATIVES = 3


def rows_of(recipe: str, model: SentenceTransformer, sources: Any, cross_encoder: str | None = None) -> Dataset:
    """Return the training rows of a recipe."""
    if recipe == "teacher":
        return teacher_rows(model, sources, cross_encoder)
    if recipe == "pairs":
        return pair_rows(sources)
    texts = build_passages(sources, max_words=100)["text"][:]
    if recipe == "simcse":
        return Dataset.from_dict({"anchor": texts, "positive": texts})
    return Dataset.from_dict({"damaged": [damaged(text) for text in texts], "text": texts})


def damaged(text: str, share: float = 0.6) -> str:
    """Return the text without a fraction `share` of its words, sampled with the text as the seed."""
    draw, words = random.Random(text), text.split()
    return " ".join(word for word in words if draw.random() > share) or words[0]


def pair_rows(sources: Any, queries: int = 2000, passages: int = 4000) -> Dataset:
    """Return natural queries of the text, each with the passage it was taken from."""
    task = build_probe(sources, ProbeSettings(queries=queries, passages=passages, seed=7, shape="whole")).task
    pairs = [(text, task.corpus[next(iter(task.qrels[query]))]) for query, text in task.queries.items()]
    return Dataset.from_dict(dict(zip(("anchor", "positive"), map(list, zip(*pairs, strict=True)), strict=True)))


def teacher_rows(
    model: SentenceTransformer, sources: Any, cross_encoder: str | None = None, queries: int = 600, passages: int = 1500
) -> Dataset:
    """Return pseudo-queries with their passage, hard negatives, and the teacher's scores."""
    probe = build_probe(sources, ProbeSettings(queries=queries, passages=passages, seed=7, shape="whole"))
    task = probe.task
    fused = fuse_runs(retrieval_run(model, task), bm25_run(task), task, 0.3)
    reranker = CrossEncoder(cross_encoder) if cross_encoder else None
    draw, rows = random.Random(0), []
    for query, text in task.queries.items():
        positive = next(iter(task.qrels[query]))
        near = [passage for passage in list(fused[query])[:30] if passage != positive]
        if len(near) < NEGATIVES or positive not in fused[query]:
            continue
        chosen = [positive, *draw.sample(near, NEGATIVES)]
        given = [task.corpus[passage] for passage in chosen]
        scores = reranker.predict([(text, passage) for passage in given]) if reranker else None
        labels = [float(s) for s in scores] if scores is not None else [10 * fused[query][p] for p in chosen]
        names = ["positive", *(f"negative_{n}" for n in range(1, NEGATIVES + 1))]
        rows.append({"query": text, **dict(zip(names, given, strict=True)), "label": labels})
    return Dataset.from_list(rows)


def loss_of(recipe: str, model: SentenceTransformer) -> Any:
    """Return the loss of sentence-transformers for a recipe."""
    if recipe == "tsdae":
        return DenoisingAutoEncoderLoss(model, tie_encoder_decoder=True)
    if recipe in ("simcse", "pairs"):
        return MultipleNegativesRankingLoss(model)
    return DistillKLDivLoss(model, student_temperature=0.05)


def train(
    recipe: str, model: SentenceTransformer, rows: Dataset, arguments: TrainingArguments, callbacks: Sequence[Any] = ()
) -> SentenceTransformer:
    """Train the model in place, with its own prompts (TSDAE without, because it would learn to write them)."""
    routes = {
        name: "query" if name in ("anchor", "query") and recipe != "simcse" else "document" for name in rows.features
    }
    if recipe != "tsdae":
        arguments.prompts = {name: model.prompts.get(route) or "" for name, route in routes.items() if name != "label"}
    trainer = SentenceTransformerTrainer(
        model, arguments, train_dataset=rows, loss=loss_of(recipe, model), callbacks=list(callbacks)
    )
    trainer.train()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument(
        "--cross-encoder", help="Cross-encoder that scores the pairs of `teacher`, instead of the hybrid."
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    given = parser.parse_args()
    model = SentenceTransformer(given.model)
    rows = rows_of(given.recipe, model, given.data, given.cross_encoder)
    arguments = TrainingArguments(
        output_dir=str(given.output / "run"),
        max_steps=given.max_steps,
        per_device_train_batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        warmup_steps=0.1,
        report_to="none",
        save_strategy="no",
    )
    train(given.recipe, model, rows, arguments).save_pretrained(str(given.output / "retriever"))
    print(f"{len(rows)} rows; retriever saved in {given.output / 'retriever'}")


if __name__ == "__main__":
    main()
