"""Prompts and answers as tokens, and batches of them."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError


def tokenize_prompts(prompts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Adds `prompt_ids`, `answer_ids` (the first accepted answer and EOS) and `row`, each row's number.

    Rows longer than `max_length` are left out, and a line on standard error says how many and where the first stands.

    Raises:
        UserError: an answer has no token, or no row is short enough.
    """

    def tokenized(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        # An empty prompt (plain text) is the tokenizer's own beginning, or EOS: something has to be read first.
        prompt_ids = [ids or [tokenizer.eos_token_id] for ids in tokenizer(rows["prompt"])["input_ids"]]
        answers = [f" {answers[0]}" for answers in rows["answers"]]
        answer_ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
        for ids, where in zip(answer_ids, rows["where"], strict=True):
            if not ids:
                raise UserError(f"{where}: the answer has no token: give another, or leave the line out")
        return {"prompt_ids": prompt_ids, "answer_ids": [[*ids, tokenizer.eos_token_id] for ids in answer_ids]}

    data = prompts.map(tokenized, batched=True, desc="Tokenizing prompts")
    lengths = [len(p) + len(a) for p, a in zip(data["prompt_ids"], data["answer_ids"], strict=True)]
    long = [row for row, length in enumerate(lengths) if length > max_length]
    if long:
        kept = [row for row, length in enumerate(lengths) if length <= max_length]
        first = prompts[long[0]]["where"]
        what = (
            f"{len(long)} of {len(data)} prompts have more than {max_length} tokens, answer included (first: {first})"
        )
        if not kept:
            raise UserError(f"{what}: raise --max_length")
        sys.stderr.write(f"{what}: left out; raise --max_length to keep them\n")
        data = data.select(kept)
    return data.add_column("row", list(range(len(data))))


@dataclass
class ImpRAGCollator:
    """Batches of rows of `tokenize_prompts`.

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
        """The batch: `input_ids`, `attention_mask`, `labels` (B, L), `query_*` (B, M), `row` and `retrieve` (B,)."""
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
