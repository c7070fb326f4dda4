"""Fine-tunes an encoder as a retriever in three steps, with sentence-transformers' own trainers and losses.

    dpr     in-batch negatives and BM25 hard negatives, from the encoder
    ance    the same from the original encoder, with negatives mined by dpr
    distil  KL to a cross-encoder (trained here, from the same encoder) over ance's negatives, from ance

    python examples/retromae/finetune.py outputs/retromae/encoder --data ../shared/data/medquad --output outputs/finetuned

ENCODER is a folder or a Hub id. The first token's state is the embedding, regardless of the pooling it was saved with.
The data folder contains passages.jsonl, train.jsonl and dev.jsonl, each plain or .gz: passages {"_id", "text"} and
questions {"question", "passage_id"}. Each step writes a sentence-transformers folder and adds a row to the table of
scores on the dev questions.
"""

import argparse
import gzip
import json
import os
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import MultipleNegativesRankingLoss as CrossEncoderRankingLoss
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from sentence_transformers.util import pairwise_cos_sim
from torch import Tensor, nn

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.evaluation import RetrievalScores, evaluate_retrieval
from revela_hub.loading import bf16_is_fast
from revela_hub.retrieval.mining import MiningSettings, Model, mine_negatives

SCALE = 20.0
"""Scale of the student's cosines before the softmax (a temperature of 0.05)."""

DEPTH = 50
"""Hard negatives are sampled from this many top passages, without the relevant ones (the paper: 200, of millions)."""


@dataclass(frozen=True)
class Settings:
    """Settings of each training step."""

    steps: int = 300
    batch_size: int = 32
    negatives: int = 2
    max_length: int = 128
    learning_rate: float = 5e-5
    seed: int = 0


@dataclass(frozen=True)
class Questions:
    """Questions with their relevant passages: `anchors` and `positives` for training, `dev` for evaluation."""

    anchors: list[str]
    positives: list[str]
    dev: RetrievalTask

    @property
    def corpus(self) -> list[str]:
        """All passages."""
        return list(self.dev.corpus.values())


def read_questions(folder: Path) -> Questions:
    """Read a data folder. Repeated dev questions become one query with several relevant passages.

    Raises:
        UserError: If a file or the passage of a question is missing.
    """
    passages = {row["_id"]: row["text"] for row in _read_rows(folder, "passages")}
    train, dev = (_read_rows(folder, split) for split in ("train", "dev"))
    if missing := next((row["passage_id"] for row in [*train, *dev] if row["passage_id"] not in passages), None):
        raise UserError(f"{folder} has a question about passage {missing}, which is not in its passages.jsonl")
    qrels: dict[str, dict[str, int]] = defaultdict(dict)
    for row in dev:
        qrels[row["question"]][row["passage_id"]] = 1
    task = RetrievalTask(passages, {text: text for text in qrels}, dict(qrels), f"{folder.resolve().name}/dev")
    return Questions([row["question"] for row in train], [passages[row["passage_id"]] for row in train], task)


def _read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    for path in (folder / f"{name}.jsonl", folder / f"{name}.jsonl.gz"):
        if path.is_file():
            with (
                gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file
            ):
                return [json.loads(line) for line in file if line.strip()]
    raise UserError(f"no {name}.jsonl or {name}.jsonl.gz in {folder}; give the data folder with --data")


def sample_questions(questions: Questions, count: int, seed: int) -> tuple[list[str], list[str]]:
    """Return about `count` random training questions and their passages, or all if there are fewer.

    A question with several passages keeps all of them, so that none is mined as its negative.
    """
    passages: dict[str, list[str]] = defaultdict(list)
    for anchor, positive in zip(questions.anchors, questions.positives, strict=True):
        passages[anchor].append(positive)
    order = list(passages)
    random.Random(seed).shuffle(order)
    pairs = ((anchor, positive) for anchor in order for positive in passages[anchor])
    anchors, positives = zip(*islice(pairs, count), strict=True)
    return list(anchors), list(positives)


def load_retriever(encoder: str | Path, max_length: int) -> SentenceTransformer:
    """Load an encoder with the normalised state of the first token as the embedding."""
    transformer = Transformer(str(encoder))
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="cls")
    model = SentenceTransformer(modules=[transformer, pooling, Normalize()])
    model.max_seq_length = max_length
    return model


def autocast() -> torch.autocast:
    """Return an autocast context with the precision of training, for code outside a trainer."""
    return torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16, enabled=bf16_is_fast())


@dataclass(frozen=True)
class Autocast:
    """An `Encoder` that encodes under autocast, in half the time."""

    model: SentenceTransformer

    def encode_query(self, inputs: list[str], /, **settings: Any) -> Any:
        """Return vectors (N, d) of N queries."""
        with autocast():
            return self.model.encode_query(inputs, **settings)

    def encode_document(self, inputs: list[str], /, **settings: Any) -> Any:
        """Return vectors (N, d) of N documents."""
        with autocast():
            return self.model.encode_document(inputs, **settings)


def common_arguments(settings: Settings, folder: Path) -> dict[str, Any]:
    """Return the training arguments that all steps share."""
    return {
        "output_dir": str(folder),
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.batch_size,
        "learning_rate": settings.learning_rate,
        "warmup_steps": settings.steps // 10,
        "bf16": bf16_is_fast(),
        "use_cpu": not torch.accelerator.is_available(),
        "seed": settings.seed,
        "save_strategy": "no",
        "logging_steps": max(1, settings.steps // 10),
        "report_to": "none",
    }


def train_retriever(
    model: SentenceTransformer, dataset: Dataset, loss: nn.Module, settings: Settings, folder: Path
) -> SentenceTransformer:
    """Train the model on (anchor, positive, negative_1, ...) rows and saves it to `folder`."""
    # A text that occurs twice in a batch would be its own negative.
    arguments = SentenceTransformerTrainingArguments(
        batch_sampler="no_duplicates", **common_arguments(settings, folder)
    )
    SentenceTransformerTrainer(model=model, args=arguments, train_dataset=dataset, loss=loss).train()
    model.save_pretrained(str(folder), create_model_card=False)
    return model.eval()


def train_with_negatives(
    encoder: str | Path, negatives: Dataset, settings: Settings, folder: Path
) -> SentenceTransformer:
    """Train a retriever from the encoder, with in-batch and hard negatives."""
    model = load_retriever(encoder, settings.max_length)
    return train_retriever(model, negatives, MultipleNegativesRankingLoss(model, scale=SCALE), settings, folder)


def train_teacher(encoder: str | Path, negatives: Dataset, settings: Settings, folder: Path) -> CrossEncoder:
    """Train a cross-encoder to pick the positive among the row's passages and one passage of another row."""
    teacher = CrossEncoder(str(encoder), num_labels=1, max_length=settings.max_length)
    loss = CrossEncoderRankingLoss(teacher, num_negatives=1, scale=1.0, activation_fn=nn.Identity())
    arguments = CrossEncoderTrainingArguments(**common_arguments(settings, folder))
    CrossEncoderTrainer(model=teacher, args=arguments, train_dataset=negatives, loss=loss).train()
    teacher.save_pretrained(str(folder), create_model_card=False)
    return teacher


def with_teacher_scores(negatives: Dataset, teacher: CrossEncoder, batch_size: int) -> Dataset:
    """Add the column `label`: the teacher's logits for the positive and each negative."""
    passages = [column for column in negatives.column_names if column != "anchor"]
    pairs = [(row["anchor"], row[column]) for row in negatives for column in passages]
    with autocast():
        logits = teacher.predict(pairs, batch_size=batch_size, activation_fn=nn.Identity())
    return negatives.add_column("label", logits.reshape(len(negatives), len(passages)).tolist())


def scaled_cosine(queries_BD: Tensor, passages_BD: Tensor) -> Tensor:
    """Return scaled cosines (B,) of a batch of pairs."""
    return SCALE * pairwise_cos_sim(queries_BD, passages_BD)


def distil(
    retriever: Path, teacher: CrossEncoder, negatives: Dataset, settings: Settings, folder: Path
) -> SentenceTransformer:
    """Train the retriever further to match the teacher's probabilities over each row's passages."""
    model = load_retriever(retriever, settings.max_length)
    labelled = with_teacher_scores(negatives, teacher, settings.batch_size)
    return train_retriever(model, labelled, DistillKLDivLoss(model, similarity_fct=scaled_cosine), settings, folder)


def mine(questions: Questions, anchors: list[str], positives: list[str], ranker: Model, settings: Settings) -> Dataset:
    """Return rows (anchor, positive, negative_1, ...) with negatives from all passages."""
    mining = MiningSettings(
        settings.negatives, relative_margin=None, range_max=DEPTH, sampling="random", seed=settings.seed
    )
    return mine_negatives(anchors, positives, questions.corpus, ranker, mining).dataset


def run(encoder: str | Path, questions: Questions, settings: Settings, output: Path) -> dict[str, SentenceTransformer]:
    """Run the three steps in order and return their models by name."""
    anchors, positives = sample_questions(questions, settings.steps * settings.batch_size, settings.seed)
    negatives = mine(questions, anchors, positives, "bm25", settings)
    dpr = train_with_negatives(encoder, negatives, settings, output / "dpr")
    negatives = mine(questions, anchors, positives, Autocast(dpr), settings)
    ance = train_with_negatives(encoder, negatives, settings, output / "ance")
    teacher = train_teacher(encoder, negatives, settings, output / "teacher")
    student = distil(output / "ance", teacher, negatives, settings, output / "distil")
    return {"dpr": dpr, "ance": ance, "distil": student}


def table(scores: dict[str, RetrievalScores]) -> str:
    """Return the scores as a Markdown table."""
    rows = [f"| {name} | {score.ndcg_at_10:.3f} | {score.mrr_at_10:.3f} |" for name, score in scores.items()]
    return "\n".join(["| model | nDCG@10 | MRR@10 |", "|---|---|---|", *rows])


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", help="folder or Hub id of the encoder to start from")
    parser.add_argument("--data", type=Path, help="data folder (default: medquad in the folder REVELA_HUB_DATA)")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the models to")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="steps of each training")
    parser.add_argument("--batch-size", type=int, default=Settings.batch_size, help="questions per step")
    parser.add_argument("--negatives", type=int, default=Settings.negatives, help="hard negatives per question")
    parser.add_argument("--max-length", type=int, default=Settings.max_length, help="maximum tokens per text")
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    args = parser.parse_args(arguments)
    if args.data is None:
        if "REVELA_HUB_DATA" not in os.environ:
            parser.error("no data: give --data, or set REVELA_HUB_DATA to the folder that holds medquad")
        args.data = Path(os.environ["REVELA_HUB_DATA"]) / "medquad"
    return args


def main() -> None:
    args = parse_arguments()
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    try:
        questions = read_questions(args.data)
        models = run(args.encoder, questions, settings, args.output)
        scores = {name: evaluate_retrieval(Autocast(model), questions.dev) for name, model in models.items()}
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"\n{args.encoder} fine-tuned on {args.data}, {questions.dev.name}:\n\n{table(scores)}")


if __name__ == "__main__":
    main()
