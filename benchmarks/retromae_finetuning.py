"""The fine-tuning of benchmarks/retromae.py: sentence-transformers' trainer, with in-batch and hard negatives, on a data folder.

The folder contains passages.jsonl, train.jsonl and dev.jsonl, each plain or .gz: passages {"_id", "text"} and questions
{"question", "passage_id"}. The embedding is the state of the first token.
"""

import gzip
import json
import random
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from torch import nn

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
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


def mine(questions: Questions, anchors: list[str], positives: list[str], ranker: Model, settings: Settings) -> Dataset:
    """Return rows (anchor, positive, negative_1, ...) with negatives from all passages."""
    mining = MiningSettings(
        settings.negatives, relative_margin=None, range_max=DEPTH, sampling="random", seed=settings.seed
    )
    return mine_negatives(anchors, positives, questions.corpus, ranker, mining).dataset
