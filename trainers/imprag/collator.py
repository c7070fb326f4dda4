"""Collator of ImpRAG: batches of prompts and answers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from revela_hub.trainers.base.passages import token_rows


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
        every = np.arange(len(rows))
        query_ids, query_mask = token_rows([row["prompt_ids"] for row in rows]).batch(every)
        ids, mask = token_rows([[*row["prompt_ids"], *row["answer_ids"]] for row in rows]).batch(every)
        answer = (mask == 1) & (torch.arange(ids.shape[1]) >= query_mask.sum(1, keepdim=True))
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(~answer, -100),
            "query_input_ids": query_ids,
            "query_attention_mask": query_mask,
            "row": torch.tensor([row["row"] for row in rows]),
            "retrieve": torch.tensor([bool(row["retrieve"]) for row in rows]),
        }
