"""Collator of ImpRAG: batches of prompts and answers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class ImpRAGCollator:
    """Make batches of rows of `tokenize_prompts`.

    >>> rows = [
    ...     {"prompt_ids": [5, 6, 7], "answer_ids": [8, 0], "row": 4, "retrieve": True},
    ...     {"prompt_ids": [5], "answer_ids": [9, 9, 0], "row": 2, "retrieve": False},
    ... ]
    >>> batch = ImpRAGCollator()(rows)
    >>> batch["input_ids"]
    tensor([[5, 6, 7, 8, 0],
            [5, 9, 9, 0, 0]])
    >>> batch["attention_mask"]
    tensor([[1, 1, 1, 1, 1],
            [1, 1, 1, 1, 0]])
    >>> batch["labels"]
    tensor([[-100, -100, -100,    8,    0],
            [-100,    9,    9,    0, -100]])
    >>> batch["query_input_ids"], batch["query_attention_mask"]
    (tensor([[5, 6, 7],
            [5, 0, 0]]), tensor([[1, 1, 1],
            [1, 0, 0]]))
    >>> batch["row"], batch["retrieve"]
    (tensor([4, 2]), tensor([ True, False]))
    """

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Make a batch: `input_ids`, `attention_mask`, `labels` (B, L), `query_*` (B, M), `row` and `retrieve` (B,)."""
        both = [[*row["prompt_ids"], *row["answer_ids"]] for row in rows]
        labels = [[-100] * len(row["prompt_ids"]) + list(row["answer_ids"]) for row in rows]
        queries = [row["prompt_ids"] for row in rows]
        return {
            "input_ids": _padded(both, 0),
            "attention_mask": _padded([[1] * len(ids) for ids in both], 0),
            "labels": _padded(labels, -100),
            "query_input_ids": _padded(queries, 0),
            "query_attention_mask": _padded([[1] * len(ids) for ids in queries], 0),
            "row": torch.tensor([row["row"] for row in rows]),
            "retrieve": torch.tensor([bool(row["retrieve"]) for row in rows]),
        }


def _padded(rows: list[list[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([list(row) + [value] * (longest - len(row)) for row in rows])
