"""Passages that are the same text as a query's positive are not its negatives: in the batch, and in those of other processes."""

import json
import math
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from processes import launch
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import dot_score

from revela_hub.data.text.same_text import text_key
from revela_hub.retrieval.texts import TextList
from revela_hub.trainers.base.in_batch import InBatchNegatives, MaskedSimilarity, text_hashes
from revela_hub.trainers.baselines.contriever import EMPTY, Contriever
from revela_hub.trainers.baselines.ra_dit import RADITTrainer
from revela_hub.trainers.imprag.trainer import ImpRAGTrainer

ROWS = [
    {"anchor": "où est l'été", "positive": "la forêt", "negative": "a lake"},
    {"anchor": "red fox", "positive": unicodedata.normalize("NFD", "La Forêt!"), "negative": "the moon"},
    {"anchor": "OU\u0300 EST L'ÉTÉ ?", "positive": "a second answer", "negative": "the sun"},
    {"anchor": "a lake", "positive": "another", "negative": "LA FORÊT"},
    {"anchor": "last", "positive": "A second answer.", "negative": "red fox?"},
    {"anchor": "own", "positive": "a thing", "negative": "a thing."},
]


def expected(queries: Any, passages: Any, rows: Any) -> Any:
    """The loss in plain loops: `passages` (C - 1, B, D)."""
    keys = [[text_key(text) for text in row.values()] for row in rows]
    total = 0.0
    for query, own in enumerate(keys):
        right = {own[0], *(key[1] for key in keys if key[0] == own[0])}
        scores = [
            float(queries[query] @ passages[column, row])
            for row, key in enumerate(keys)
            for column in range(2)
            if (row, column) == (query, 0) or key[1 + column] not in right
        ]
        positive = float(queries[query] @ passages[0, query])
        total += math.log(sum(math.exp(score) for score in scores)) - positive
    return total / len(keys)


class Vectors(torch.nn.Module):
    """A "model" that returns the vectors it is given."""

    def forward(self, features: Any) -> Any:
        return {"sentence_embedding": features["vectors"]}

    def __getitem__(self, place: Any) -> Any:
        return self

    def get_embedding_dimension(self) -> Any:
        return 6


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("dims", [None, [6, 3]])
def test_loss_is_that_of_plain_loops(cached: Any, dims: Any) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(3, len(ROWS), 6)
    model, similarity = Vectors(), MaskedSimilarity(dot_score)
    if cached:
        loss = CachedMultipleNegativesRankingLoss(model, scale=1.0, similarity_fct=similarity, mini_batch_size=4)
    else:
        loss = MultipleNegativesRankingLoss(model, scale=1.0, similarity_fct=similarity)
    if dims:
        loss = MatryoshkaLoss(model, loss, dims, [0.5, 0.5])
    features = [
        {"input_ids": torch.zeros(len(ROWS), 1), "vectors": column.clone().requires_grad_()} for column in vectors
    ]
    found = InBatchNegatives(model, loss, similarity)(features, text_hashes(ROWS))
    parts = [vectors] if not dims else [torch.nn.functional.normalize(vectors[..., :size], dim=-1) for size in dims]
    wanted = sum(expected(part[0], part[1:], ROWS) for part in parts) / len(parts)
    assert found.item() == pytest.approx(wanted, rel=1e-5)
    found.backward()
    assert all(each["vectors"].grad is None or each["vectors"].grad.isfinite().all() for each in features)


SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[2])
import torch
from test_in_batch import Vectors
from torch import distributed as dist
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import dot_score
from revela_hub.trainers.base.in_batch import InBatchNegatives, MaskedSimilarity, text_hashes
from revela_hub.trainers.base.distributed import is_distributed, rank
from revela_hub.trainers.baselines.contriever import Contriever

rows = json.loads(sys.argv[1])
many = int(__import__("os").environ.get("WORLD_SIZE", "1"))
if many > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
vectors = torch.randn(3, len(rows), 6)
own = slice(rank() * len(rows) // many, (rank() + 1) * len(rows) // many)

similarity = MaskedSimilarity(dot_score)
loss = MultipleNegativesRankingLoss(Vectors(), scale=1.0, similarity_fct=similarity, gather_across_devices=many > 1)
features = [{"vectors": column[own]} for column in vectors]
found = InBatchNegatives(loss.model, loss, similarity)(features, text_hashes(rows[own])).item()

contriever = Contriever.__new__(Contriever)
torch.nn.Module.__init__(contriever)
same = text_hashes(rows[own])[:, 1]
logits, target = contriever._in_batch(vectors[0, own], vectors[1, own], same)
hidden = logits.isinf().nonzero().tolist()
print("found", json.dumps([found, hidden, target.tolist()]))
if many > 1:
    dist.destroy_process_group()
"""


def test_two_processes_hide_the_same_passages_as_one(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(processes: Any) -> Any:
        written = launch(str(script), json.dumps(ROWS), str(Path(__file__).parent), processes=processes)
        return [json.loads(said.split("found ")[1].splitlines()[0]) for said in written]

    [whole] = run(1)
    parts = run(2)
    assert sum(part[0] for part in parts) / 2 == pytest.approx(whole[0], rel=1e-6)
    torch.manual_seed(0)
    vectors = torch.randn(3, len(ROWS), 6)
    assert whole[0] == pytest.approx(expected(vectors[0], vectors[1:], ROWS), rel=1e-5)
    hidden = [[row + 3 * rank, column] for rank, part in enumerate(parts) for row, column in part[1]]
    assert sorted(hidden) == sorted(whole[1]) == [[0, 1], [1, 0], [2, 4], [4, 2]]
    assert parts[1][2] == [3, 4, 5]


def nce(scores: Any, positives: set[int], negatives: set[int]) -> float:
    """`multi_label_nce` of one query in plain loops."""
    others = sum(math.exp(scores[place]) for place in negatives)
    return sum(math.log1p(others / math.exp(scores[place])) for place in positives) / len(positives)


def test_imprag_warm_up_has_no_copies_of_the_best_passages_as_negatives() -> None:
    texts = ["a sea", "a lake", "A sea!", "a hill", "the moon", "A LAKE.", "a fox"]
    candidates = np.array([[0, 3, 2], [1, 5, 4]], dtype=np.int32)  # one positive each
    known = np.array([[0, 6], [1, -1]], dtype=np.int32)
    torch.manual_seed(0)
    scores = torch.randn(2, 6)
    trainer = SimpleNamespace(
        passages=TextList(texts),
        accelerator=SimpleNamespace(gather=lambda rows: rows, process_index=0),
        imprag=SimpleNamespace(score=lambda queries, vectors: scores),
        args=SimpleNamespace(num_positives=1),
    )
    outputs = SimpleNamespace(passage_vectors=torch.zeros(6, 2), query_vectors=torch.zeros(2, 2))
    drawn: Any = SimpleNamespace(candidates_BC=candidates, known_BR=known)
    found = ImpRAGTrainer._warm_up(trainer, outputs, drawn, 1.0)  # type: ignore[arg-type]
    # Row 0 knows "a sea" and "a fox": of 0 3 2 | 1 5 4, the places 1, 3, 4, 5 are negatives. Row 1 knows "a lake".
    expected = [nce(scores[0].tolist(), {0}, {1, 3, 4, 5}), nce(scores[1].tolist(), {3}, {0, 1, 2, 5})]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_ra_dit_warm_up_has_no_copies_of_the_positives_as_negatives() -> None:
    texts = ["a sea", "a lake", "A sea!", "a hill"]
    torch.manual_seed(0)
    scores = torch.randn(1, 4)
    trainer = SimpleNamespace(
        passages=TextList(texts),
        candidates=np.array([[0, 2, 3, -1]], dtype=np.int32),
        args=SimpleNamespace(num_positives=1, retrieval_warmup_epochs=1),
        state=SimpleNamespace(epoch=0.0),
    )
    found = RADITTrainer.compute_loss(trainer, lambda: scores, {"row": torch.tensor([0])})  # type: ignore[arg-type]
    assert found.item() == pytest.approx(nce(scores[0].tolist(), {0}, {2}), rel=1e-5)


def test_views_of_the_same_text_in_the_queue_are_not_negatives() -> None:
    contriever: Any = Contriever.__new__(Contriever)
    torch.nn.Module.__init__(contriever)
    contriever.queue_size, contriever.cosine = 4, False
    contriever.queue_KD = torch.randn(4, 3)
    contriever.queue_hash_K = torch.tensor([EMPTY, 7, 8, 7])
    logits, _ = contriever._queued(torch.randn(2, 3), torch.randn(2, 3), torch.tensor([7, 9]))
    assert logits.isinf().tolist() == [[False, True, True, False, True], [False, True, False, False, False]]
    contriever._enqueue(torch.randn(2, 3), torch.tensor([1, 2]))
    assert contriever.queue_hash_K.tolist() == [8, 7, 1, 2]
