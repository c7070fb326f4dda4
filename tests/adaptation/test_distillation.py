"""Rows for listwise distillation, against plain loops."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from revela_hub.adaptation.distillation import PASSAGES_PER_QUESTION, distillation_rows
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.data.synthesis.backends import Reply, Request
from revela_hub.evaluation.retrieval import bm25_run


def scaled(hits: dict[str, float]) -> dict[str, float]:
    """Min-max normalised scores of the hits of one query."""
    low, high = min(hits.values()), max(hits.values())
    return {passage: (score - low) / (high - low) for passage, score in hits.items()}


def test_the_labels_are_the_hybrid_scores_of_the_best_passages(retriever_folder: Path) -> None:
    weight = 0.3
    words = "river sea mountain quick brown fox lazy dog sediment layer stone wind".split()
    passages = [f"{words[n % 12]} {words[n * 5 % 11]} {words[n * 7 % 9]} number {n}" for n in range(40)]
    pairs = Dataset.from_dict({"anchor": [f"where is {text}" for text in passages], "positive": passages})
    teacher = SentenceTransformer(str(retriever_folder), device="cpu")
    said: list[str] = []

    class Model:
        def replies(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Reply]]:
            return ((request, Reply("What is your question?")) for request in requests)

    asking: dict[str, Any] = {"questions": Model(), "log": said.append}
    rows = distillation_rows(pairs, teacher, bm25_weight=weight, seed=1, **asking)
    assert said == ["language model: 40 of 40 questions dropped (40 without a word of the passage)"]
    assert len(rows) > 40  # natural queries and keywords
    names = ["positive", *(f"negative_{number}" for number in range(1, PASSAGES_PER_QUESTION))]
    corpus = {text: text for text in passages}
    for row in rows:
        query = row["anchor"]
        scores = teacher.encode_query([query]) @ teacher.encode_document(passages).T
        assert scores.max() - scores.min() > 1e-3
        dense = scaled(dict(zip(passages, scores[0].astype(np.float64).tolist(), strict=True)))
        task = RetrievalTask(corpus, {"q": query}, {"q": {passages[0]: 1}}, "t")
        bm25 = scaled(bm25_run(task)["q"])
        hybrid = {text: (1 - weight) * dense[text] + weight * bm25.get(text, 0.0) for text in passages}
        # The scaling multiplies the float32 error of a score by 1 / (highest - lowest score), and these scores are close together.
        error = 1e-6 / float(scores.max() - scores.min())
        assert row["label"] == pytest.approx(sorted(hybrid.values(), reverse=True)[:PASSAGES_PER_QUESTION], abs=error)
        assert [hybrid[row[name]] for name in names] == pytest.approx(row["label"], abs=error)
