"""Evaluation for `nvembed_ablations.py`: retrieval, semantic similarity and classification on small public data.

Retrieval is nDCG@10 (300 held-out queries, 600 passages per task). Similarity is Spearman's correlation on 700 pairs of
STS-B's test split. Classification is the accuracy of a logistic regression on Banking77's embeddings (10 examples per
class to fit it, 10 to test it).
"""

import gzip
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation import evaluate_retrieval
from revela_hub.precision import bf16_is_fast

EXAMPLES_PER_CLASS = 10
STS_PAIRS = 700


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


class Tasks(NamedTuple):
    """The data, and the instruction of each task."""

    retrieval: dict[str, RetrievalTask]
    sts: list[dict[str, Any]]
    train: list[dict[str, Any]]
    test: list[dict[str, Any]]


def load_tasks(data: Path, queries: int = 300, passages: int = 600) -> Tasks:
    """Read the held-out data: `queries` queries and at least `passages` passages per task, always the same."""
    cosqa = read(data / "cosqa" / "qrels" / "dev.tsv")
    questions = read(data / "cosqa" / "queries.jsonl")
    positive = {row["query-id"]: row["corpus-id"] for row in cosqa}
    cosqa_pairs = [(row["text"], positive[row["_id"]]) for row in questions]
    retrieval = {"cosqa": _task("cosqa", cosqa_pairs, read(data / "cosqa" / "corpus.jsonl.gz"), queries, passages)}
    for name in ("medquad", "squad"):
        pairs = [(row["question"], row["passage_id"]) for row in read(data / name / "dev.jsonl.gz")]
        retrieval[name] = _task(name, pairs, read(data / name / "passages.jsonl.gz"), queries, passages)
    train, test = (read(data / "banking77" / f"{split}.jsonl") for split in ("train", "test"))
    sts = random.Random(0).sample(read(data / "stsb" / "test.jsonl"), STS_PAIRS)
    return Tasks(retrieval, sts, _per_class(train), _per_class(test))


def score(model: SentenceTransformer, tasks: Tasks, prompts: dict[str, str], batch_size: int = 64) -> Scores:
    """Evaluate a model with the prompts of the five tasks."""
    found = {}
    for name, task in tasks.retrieval.items():
        encoder = _Prompted(model, prompts[name])
        found[name] = evaluate_retrieval(encoder, task, batch_size).ndcg_at_10
    # STS-B and Banking77 are symmetric tasks: the instruction goes before every text.
    left, right = (
        encode(model, [row[column] for row in tasks.sts], prompts["stsb"], batch_size=batch_size)
        for column in ("sentence1", "sentence2")
    )
    gold = [row["score"] for row in tasks.sts]
    spearman = spearmanr((left * right).sum(-1), gold).statistic
    vectors = [
        encode(model, [row["text"] for row in rows], prompts["banking77"], batch_size=batch_size)
        for rows in (tasks.train, tasks.test)
    ]
    classifier = LogisticRegression(max_iter=100)
    classifier.fit(vectors[0], [row["label"] for row in tasks.train])
    accuracy = classifier.score(vectors[1], [row["label"] for row in tasks.test])
    return Scores(found["medquad"], found["squad"], found["cosqa"], float(spearman), float(accuracy))


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


def _per_class(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    chance, kept = random.Random(0), []
    for label in sorted({row["label"] for row in rows}):
        own = [row for row in rows if row["label"] == label]
        kept += chance.sample(own, min(EXAMPLES_PER_CLASS, len(own)))
    return kept
