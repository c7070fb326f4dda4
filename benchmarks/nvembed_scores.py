"""Evaluation for `nvembed_ablations.py`: retrieval, semantic similarity and classification on small public data.

Retrieval is nDCG@10 on held-out queries. Similarity is Spearman's correlation on pairs of STS-B's test split.
Classification is the accuracy of a logistic regression on Banking77's embeddings, with as many examples to fit it as to
test it.
"""

import gzip
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation import evaluate_retrieval
from revela_hub.evaluation.significance import compare_queries
from revela_hub.loading import bf16_is_fast

RETRIEVAL = ("medquad", "squad", "cosqa")
SAMPLES = 2000


class Scores(NamedTuple):
    """Scores between 0 and 1."""

    medquad: float
    squad: float
    cosqa: float
    stsb: float
    banking77: float

    @property
    def retrieval(self) -> float:
        """Return the mean of the three retrieval tasks."""
        return (self.medquad + self.squad + self.cosqa) / 3


PerItem = Mapping[str, Any]
"""Task to nDCG@10 by query id, to STS-B's (similarity, gold) pairs, or to 1 and 0 for Banking77's test texts."""


@dataclass(frozen=True)
class Sizes:
    """Amount of held-out data. `classes` limits Banking77's classes, None takes all."""

    queries: int = 300
    passages: int = 600
    sts_pairs: int = 700
    classes: int | None = None
    examples_per_class: int = 10


class Tasks(NamedTuple):
    """The data, and the instruction of each task."""

    retrieval: dict[str, RetrievalTask]
    sts: list[dict[str, Any]]
    train: list[dict[str, Any]]
    test: list[dict[str, Any]]


def load_tasks(data: Path, sizes: Sizes) -> Tasks:
    """Read the held-out data, always the same for the same sizes. A task has at least the passages of its queries."""
    cosqa = read(data / "cosqa" / "qrels" / "dev.tsv")
    questions = read(data / "cosqa" / "queries.jsonl")
    positive = {row["query-id"]: row["corpus-id"] for row in cosqa}
    pairs = {"cosqa": [(row["text"], positive[row["_id"]]) for row in questions]}
    corpus = {"cosqa": read(data / "cosqa" / "corpus.jsonl.gz")}
    for name in ("medquad", "squad"):
        pairs[name] = [(row["question"], row["passage_id"]) for row in read(data / name / "dev.jsonl.gz")]
        corpus[name] = read(data / name / "passages.jsonl.gz")
    retrieval = {name: _task(name, pairs[name], corpus[name], sizes.queries, sizes.passages) for name in pairs}
    sts = random.Random(0).sample(read(data / "stsb" / "test.jsonl"), sizes.sts_pairs)
    train, test = (_per_class(read(data / "banking77" / f"{split}.jsonl"), sizes) for split in ("train", "test"))
    return Tasks(retrieval, sts, train, test)


def score(
    model: SentenceTransformer, tasks: Tasks, prompts: dict[str, str], batch_size: int = 64
) -> tuple[Scores, PerItem]:
    """Evaluate a model with the prompts of the five tasks. Return the scores and those of each query, pair and text."""
    items: dict[str, Any] = {}
    for name, task in tasks.retrieval.items():
        encoder = _Prompted(model, prompts[name])
        items[name] = dict(evaluate_retrieval(encoder, task, batch_size).per_query["ndcg_at_10"])
    # STS-B and Banking77 are symmetric tasks: the instruction goes before every text.
    left, right = (
        encode(model, [row[column] for row in tasks.sts], prompts["stsb"], batch_size=batch_size)
        for column in ("sentence1", "sentence2")
    )
    gold = [row["score"] for row in tasks.sts]
    items["stsb"] = list(zip((left * right).sum(-1).tolist(), gold, strict=True))
    vectors = [
        encode(model, [row["text"] for row in rows], prompts["banking77"], batch_size=batch_size)
        for rows in (tasks.train, tasks.test)
    ]
    classifier = LogisticRegression(max_iter=100)
    classifier.fit(vectors[0], [row["label"] for row in tasks.train])
    right_labels = classifier.predict(vectors[1]) == np.array([row["label"] for row in tasks.test])
    items["banking77"] = right_labels.astype(int).tolist()
    return Scores(**{name: _mean(items, name) for name in Scores._fields}), items


def difference(a: PerItem, b: PerItem, column: str) -> str:
    """Return score b - a of a column of the tables with its 95% interval: a paired bootstrap over queries, pairs or texts."""
    if column == "stsb":
        (own_a, gold), (own_b, _) = np.array(a[column]).T, np.array(b[column]).T
        drawn = np.random.default_rng(0).integers(0, len(gold), (SAMPLES, len(gold)))
        found = [_spearman(own_b[rows], gold[rows]) - _spearman(own_a[rows], gold[rows]) for rows in drawn]
        mean, (low, high) = _mean(b, column) - _mean(a, column), np.percentile(found, (2.5, 97.5))
    else:
        compared = compare_queries(_flat(a, column), _flat(b, column))
        mean, low, high = compared.difference, compared.low, compared.high
    bold = "**" if low > 0 or high < 0 else ""
    return f"{bold}{mean:+.3f}{bold} [{low:+.3f}, {high:+.3f}]"


def _flat(items: PerItem, column: str) -> dict[str, float]:
    names = RETRIEVAL if column == "retrieval" else (column,)
    rows = {name: items[name] if isinstance(items[name], dict) else dict(enumerate(items[name])) for name in names}
    return {f"{name}/{at}": float(value) for name, each in rows.items() for at, value in each.items()}


def _mean(items: PerItem, name: str) -> float:
    if name == "stsb":
        return _spearman(*np.array(items[name]).T)
    return float(np.mean(list(_flat(items, name).values())))


def _spearman(a: Any, b: Any) -> float:
    return float(spearmanr(a, b).statistic)


class _Prompted:
    """Wraps a model so that queries get the instruction of one task."""

    def __init__(self, model: SentenceTransformer, prompt: str) -> None:
        self.model, self.prompt = model, prompt

    def encode_query(self, texts: list[str], **options: Any) -> Any:
        return encode(self.model, texts, self.prompt, **options)

    def encode_document(self, texts: list[str], **options: Any) -> Any:
        return encode(self.model, texts, "", **options)


def encode(model: SentenceTransformer, texts: list[str], prompt: str, **options: Any) -> Any:
    """Return float32 vectors, computed in bf16 where that is fast."""
    with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16_is_fast()):
        return model.encode(texts, prompt=prompt, convert_to_tensor=True, **options).float().cpu().numpy()


def read(file: Path) -> list[dict[str, Any]]:
    """Read rows of JSON lines (gzipped or not) or of a tab-separated table with a header."""
    opened = gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8")
    with opened as stream:
        if file.suffix == ".tsv":
            header, *lines = (line.rstrip("\n").split("\t") for line in stream)
            return [dict(zip(header, line, strict=True)) for line in lines]
        return [json.loads(line) for line in stream]


def passage_text(row: dict[str, Any]) -> str:
    """Return title and text, joined as in training."""
    return " ".join(part for part in (row.get("title"), row["text"]) if part)


def _task(
    name: str, pairs: list[tuple[str, str]], corpus: list[dict[str, Any]], queries: int, passages: int
) -> RetrievalTask:
    chance = random.Random(0)
    pairs = chance.sample(pairs, min(queries, len(pairs)))
    wanted = {passage for _, passage in pairs}
    others = [row["_id"] for row in corpus if row["_id"] not in wanted]
    wanted |= set(chance.sample(others, min(len(others), max(0, passages - len(wanted)))))
    return RetrievalTask(
        corpus={row["_id"]: passage_text(row) for row in corpus if row["_id"] in wanted},
        queries={str(number): query for number, (query, _) in enumerate(pairs)},
        qrels={str(number): {passage: 1} for number, (_, passage) in enumerate(pairs)},
        name=name,
    )


def _per_class(rows: list[dict[str, Any]], sizes: Sizes) -> list[dict[str, Any]]:
    chance, kept = random.Random(0), []
    for label in sorted({row["label"] for row in rows})[: sizes.classes]:
        own = [row for row in rows if row["label"] == label]
        kept += chance.sample(own, min(sizes.examples_per_class, len(own)))
    return kept
