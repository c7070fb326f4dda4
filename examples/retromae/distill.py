"""Distils a cross-encoder into a fine-tuned RetroMAE retriever (arXiv 2205.12035, section 4.1 and table 5), with sentence-transformers.

The teacher, a cross-encoder from BERT base, learns from the negatives of the ANCE model; the student, the ANCE model, then learns the
teacher's distribution over the passages of each query.

    accelerate launch --num_processes 8 examples/retromae/distill.py teacher google-bert/bert-base-uncased --pairs outputs/ance-negatives.jsonl \
        --output outputs/retromae-teacher
    python examples/retromae/distill.py score outputs/retromae-teacher --pairs outputs/ance-negatives.jsonl --output outputs/scored.jsonl
    accelerate launch --num_processes 8 examples/retromae/distill.py student outputs/retromae-ance/retriever --pairs outputs/scored.jsonl \
        --output outputs/retromae-distilled

with the negatives of `revela-hub mine outputs/retromae-ance/retriever ... --output outputs/ance-negatives.jsonl` (msmarco.yaml). Values are
those of the authors' commands (github.com/staoxiao/RetroMAE, examples/reranker) but for the negatives: 15 of each query instead of 64.
"""

import argparse
from typing import Any

import torch
from datasets import Dataset, load_dataset
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss
from sentence_transformers.util import pairwise_dot_score
from torch import nn

from revela_hub import PairsTrainer, PairsTrainingArguments
from revela_hub.loading import bf16_is_fast


def common(options: argparse.Namespace) -> dict[str, Any]:
    run = {"output_dir": options.output, "max_steps": options.max_steps, "report_to": "none"}
    return run | {"bf16": bf16_is_fast(), "use_cpu": not torch.accelerator.is_available()}


def teacher(rows: Dataset, options: argparse.Namespace) -> None:
    """Train a cross-encoder to pick the positive among the passages of a row, and one of another row."""
    model = CrossEncoder(options.model, num_labels=1, max_length=200, activation_fn=nn.Identity())
    loss = MultipleNegativesRankingLoss(model, num_negatives=1, scale=1.0, activation_fn=nn.Identity())
    run = CrossEncoderTrainingArguments(
        **common(options),
        learning_rate=1e-5,
        num_train_epochs=4,
        per_device_train_batch_size=2,
        weight_decay=0.01,
        warmup_steps=1000,
    )
    CrossEncoderTrainer(model=model, args=run, train_dataset=rows, loss=loss).train()
    if run.should_save:  # one of the processes
        model.save_pretrained(options.output)


def score(rows: Dataset, options: argparse.Namespace) -> None:
    """Write the rows with the column `label`: the teacher's logits of the positive and the negatives."""
    model = CrossEncoder(options.model, model_kwargs={"dtype": torch.bfloat16 if bf16_is_fast() else torch.float32})
    passages = [name for name in rows.column_names if name != "anchor"]

    def scored(batch: dict[str, list[str]]) -> dict[str, list[list[float]]]:
        pairs = [(anchor, batch[name][n]) for n, anchor in enumerate(batch["anchor"]) for name in passages]
        logits = model.predict(pairs, batch_size=256, activation_fn=nn.Identity())
        return {"label": logits.reshape(-1, len(passages)).tolist()}

    rows.map(scored, batched=True, batch_size=1024).to_json(options.output)


def student(rows: Dataset, options: argparse.Namespace) -> None:
    """Train the retriever on the teacher's distributions."""
    run = PairsTrainingArguments(
        **common(options), learning_rate=2e-5, num_train_epochs=4, per_device_train_batch_size=16, warmup_steps=0
    )
    model = SentenceTransformer(options.model)
    loss = DistillKLDivLoss(model, similarity_fct=pairwise_dot_score)
    trainer = PairsTrainer(model, run, train_dataset=rows, loss=loss)
    trainer.train()
    trainer.write_models(options.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["teacher", "score", "student"])
    parser.add_argument("model", help="folder or Hub id to start from, or the teacher")
    parser.add_argument(
        "--pairs", required=True, help="JSON lines: anchor, positive, negative_1, ...; for student with label"
    )
    parser.add_argument("--output", required=True)
    parser.add_argument("--max_steps", type=int, default=-1)
    options = parser.parse_args()
    rows = load_dataset("json", data_files=options.pairs, split="train")
    {"teacher": teacher, "score": score, "student": student}[options.step](rows, options)


if __name__ == "__main__":
    main()
