"""NV-Embed's loss against plain loops, and that the memory it takes changes neither loss nor gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from revela_hub.trainers.nvembed.loss import SIMILAR_LENGTH, NVEmbedLoss

TEMPERATURE = 0.1
LENGTHS = (9, 8, 8, 6, 5, 5, 5, 3, 2, 2)  # of ten texts, longest first as the collator gives them
# Rows of texts: query, positive, two negatives. Text 3 is right for row 0 and a negative of row 1, text 7 is the query of
# rows 1 and 3, text 0 a query and a passage, row 2 has its positive among its negatives, and row 3 a negative twice.
ROWS = ((0, 3, 4, 5), (7, 6, 3, 8), (1, 2, 2, 0), (7, 9, 4, 4))


class _Model(nn.Module):
    """Replacement of the embedder: the mean of two layers over the tokens, which counts the tokens it embeds."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, dtype=torch.float64)
        self.layer = nn.Linear(8, 6, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)
        self.texts, self.tokens = 0, 0
        self.seen: list[Tensor] = []

    def forward(self, features: dict[str, Any]) -> dict[str, Tensor]:
        mask = features["attention_mask"][..., None].double()
        self.texts += len(mask)
        self.tokens += mask[..., 0].numel()
        hidden = torch.tanh(self.layer(self.dropout(self.table(features["input_ids"]))))
        self.seen.append(((hidden * mask).sum(1) / mask.sum(1)).detach())
        return {"sentence_embedding": (hidden * mask).sum(1) / mask.sum(1)}


@pytest.fixture
def features() -> dict[str, Any]:
    ids = torch.randint(50, (len(LENGTHS), max(LENGTHS)))
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "modality": "text", "lengths": LENGTHS}


@pytest.fixture
def labels() -> Tensor:
    place = torch.tensor(ROWS)
    return torch.stack([place, 1000 + 7 * place], dim=-1)


def loss_of(model: nn.Module, *, in_batch: bool, size: int = 100) -> NVEmbedLoss:
    return NVEmbedLoss(
        model,  # type: ignore[arg-type] # the loss only calls it
        temperature=TEMPERATURE,
        in_batch_negatives=in_batch,
        mini_batch_size=size,
    )


def reference(model: _Model, features: dict[str, Any], *, in_batch: bool) -> Tensor:
    """The equation, one text and one pair at a time."""
    vectors = []
    for ids, length in zip(features["input_ids"], LENGTHS, strict=True):
        hidden = torch.tanh(model.layer(model.table(ids[:length])))
        vector = hidden.mean(0)
        vectors.append(vector / vector.norm())
    losses = []
    for at, (query, positive, *negatives) in enumerate(ROWS):
        candidates = negatives if in_batch else list(dict.fromkeys(negatives))
        if in_batch:
            for other, (other_query, other_positive, *other_negatives) in enumerate(ROWS):
                if other != at:
                    candidates += [other_positive] if other_query != query else []
                    candidates += other_negatives
        candidates = [text for text in candidates if text not in (query, positive)]
        right = torch.exp(vectors[query] @ vectors[positive] / TEMPERATURE)
        wrong = [torch.exp(vectors[query] @ vectors[text] / TEMPERATURE) for text in candidates]
        losses.append(-torch.log(right / (right + sum(wrong))))
    return torch.stack(losses).mean()


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("size", [100, 3])
def test_loss_and_gradients_are_those_of_the_equation(
    features: dict[str, Any], labels: Tensor, in_batch: bool, size: int
) -> None:
    model = _Model()
    got = loss_of(model, in_batch=in_batch, size=size)([features], labels)
    expected = reference(model, features, in_batch=in_batch)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    cached = size < len(LENGTHS)
    rtol, atol = (1e-4, 1e-7) if cached else (1e-9, 1e-12)  # until 6.2 sentence-transformers replays in float32
    for a, b in zip(gradients(got, model), gradients(expected, model), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def test_without_in_batch_negatives_a_row_does_not_depend_on_the_others(
    features: dict[str, Any], labels: Tensor
) -> None:
    loss = loss_of(_Model(), in_batch=False)
    rows = torch.stack([loss([features], labels[at : at + 1]) for at in range(len(labels))])
    torch.testing.assert_close(loss([features], labels), rows.mean())
    with_others = loss_of(loss.model, in_batch=True)
    assert with_others([features], labels) > rows.mean() + 0.1


@pytest.mark.parametrize(("size", "passes"), [(10, 1), (9, 2)])
def test_texts_go_through_the_model_once_if_they_fit(
    features: dict[str, Any], labels: Tensor, size: int, passes: int
) -> None:
    model = _Model()
    loss_of(model, in_batch=True, size=size)([features], labels).backward()
    assert model.texts == passes * len(LENGTHS)
    assert model.tokens <= passes * sum(LENGTHS) / SIMILAR_LENGTH


def test_the_second_pass_repeats_the_random_numbers_of_the_first(features: dict[str, Any], labels: Tensor) -> None:
    model = _Model(dropout=0.5)
    loss_of(model, in_batch=True, size=3)([features], labels).backward()
    half = len(model.seen) // 2
    assert len(model.seen) == 2 * half
    for first, second in zip(model.seen[:half], model.seen[half:], strict=True):
        assert torch.equal(first, second)


def test_cosines_are_in_float32_under_autocast() -> None:
    """Two candidates whose cosines, 0.9990 and 0.9995, are one number in bf16."""
    query = torch.tensor([[1.0, 0.0]])
    angles = [math.acos(cosine) for cosine in (0.9995, 0.9990)]
    candidates = torch.tensor([[math.cos(angle), math.sin(angle)] for angle in angles])
    assert candidates.bfloat16()[0, 0] == candidates.bfloat16()[1, 0]
    labels = torch.arange(3).view(1, 3, 1).expand(1, 3, 2)
    for in_batch in (True, False):
        loss = loss_of(nn.Identity(), in_batch=in_batch)
        loss.temperature = 1e-3
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = loss.calculate_loss([[torch.cat([query, candidates])]], labels)
        assert abs(float(got) - math.log(1 + math.exp(-0.5))) < 1e-3
