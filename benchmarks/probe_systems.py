"""Retrievers with small differences, and their vectors on disk: for `probe_queries.py`."""

import hashlib
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from domains import read_rows
from probe_validity import QUICKSTART, layers, minilm, noisy
from sentence_transformers import SentenceTransformer

from revela_hub.evaluation.probe import ProbeSettings, build_probe

MAX_TOKENS = 64
STEPS, BATCH, RATE, TUNING_TOKENS = 15, 16, 5e-5, 64


class Vectors:
    """Vectors of one system by text, kept on disk."""

    def __init__(self, file: Path, load: Callable[[], SentenceTransformer]) -> None:
        self.file, self.load = file, load
        self.kept: dict[str, np.ndarray] = {}
        if file.exists():
            stored = np.load(file)
            self.kept = dict(zip(stored["names"].tolist(), stored["vectors"].astype(np.float32), strict=True))

    @cache  # noqa: B019 (one per system)
    def model(self) -> SentenceTransformer:
        """Load the model."""
        model = self.load()
        model.max_seq_length = MAX_TOKENS
        return model.eval()

    def of(self, texts: list[str]) -> np.ndarray:
        """Return the vectors of texts, encoding those that are new."""
        names = [hashlib.sha1(text.encode()).hexdigest()[:20] for text in texts]  # noqa: S324
        missing = {name: text for name, text in zip(names, texts, strict=True) if name not in self.kept}
        if missing:
            found = self.model().encode(list(missing.values()), batch_size=16, normalize_embeddings=True)
            self.kept |= dict(zip(missing, found, strict=True))
            np.savez(self.file, names=list(self.kept), vectors=np.stack(list(self.kept.values())).astype(np.float16))
        return np.stack([self.kept[name] for name in names])


def tuned(pairs: list[tuple[str, str]], file: Path) -> SentenceTransformer:
    """Return MiniLM after a few steps of InfoNCE on pairs."""
    model = minilm()
    if file.exists():
        model.load_state_dict(torch.load(file))
        return model
    model.max_seq_length = TUNING_TOKENS
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    drawn = random.Random(0).sample(pairs, min(len(pairs), STEPS * BATCH))
    for start in range(0, len(drawn) - BATCH + 1, BATCH):
        batch = drawn[start : start + BATCH]
        vectors = [
            torch.nn.functional.normalize(model(model.tokenize(list(side)))["sentence_embedding"], dim=-1)
            for side in zip(*batch, strict=True)
        ]
        loss = torch.nn.functional.cross_entropy(20 * vectors[0] @ vectors[1].T, torch.arange(BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), file)
    return model


def halfway(file: Path) -> SentenceTransformer:
    """Return the mean of MiniLM and fine-tuned weights."""
    model, other = minilm(), torch.load(file)
    mean = {
        name: (value + other[name]) / 2 if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(mean)
    return model


def labelled(data: Path, name: str) -> list[tuple[str, str]]:
    passages = {row["_id"]: row["text"] for row in read_rows(data / name / "passages.jsonl.gz")}
    rows = read_rows(data / name / "train.jsonl.gz")
    return [(row["question"], passages[row["passage_id"]]) for row in random.Random(1).sample(rows, STEPS * BATCH)]


def systems(name: str, text: list[Any], data: Path, work: Path) -> dict[str, Callable[[], SentenceTransformer]]:
    def natural() -> list[tuple[str, str]]:
        probe = build_probe(text, ProbeSettings(queries=STEPS * BATCH + 60, passages=600, seed=1, shape="whole"))
        return [(probe.task.queries[q], probe.task.corpus[next(iter(probe.task.qrels[q]))]) for q in probe.task.queries]

    def crops() -> list[tuple[str, str]]:
        corpus = build_probe(text, ProbeSettings(passages=600, seed=2)).task.corpus.values()
        parts = [passage.split()[:80] for passage in corpus if len(passage.split()) > 20]
        return [(" ".join(p[: len(p) // 2]), " ".join(p[len(p) // 2 :])) for p in parts]

    tunings: dict[str, tuple[Path, Callable[[], list[tuple[str, str]]]]] = {
        "natural pairs": (work / f"natural-{name}.pt", natural),
        "SQuAD's labels": (work / "squad.pt", lambda: labelled(data, "squad")),
        "MedQuAD's labels": (work / "medquad.pt", lambda: labelled(data, "medquad")),
        "crops": (work / f"crops-{name}.pt", crops),
    }
    made: dict[str, Callable[[], SentenceTransformer]] = {"MiniLM": minilm}
    made |= {f"noise {s}": lambda s=s: noisy(s) for s in (0.1,)}
    made |= {f"{n} layers": lambda n=n: layers(n) for n in (5,)}
    for tuning, (file, pairs) in tunings.items():
        made[tuning] = lambda file=file, pairs=pairs: tuned([] if file.exists() else pairs(), file)
        if tuning in ("natural pairs", "SQuAD's labels"):
            made[f"{tuning}, half"] = lambda file=file: halfway(file)
    return made | {"quickstart": lambda: SentenceTransformer(str(QUICKSTART), device="cpu").float()}
