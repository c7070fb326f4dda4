"""Collator of NV-Embed: rows of a mixture to a batch of distinct texts, each with its own instruction."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from torch import Tensor

from revela_hub.errors import UserError
from revela_hub.modeling.modeling_nvembed import check_pool_mask, exclude_instruction
from revela_hub.trainers.base.inputs import check_texts, in_order, pair_columns

ANCHOR_PROMPT, DOCUMENT_PROMPT, TASK = "anchor_prompt", "document_prompt", "task"


def text_columns(dataset: Dataset) -> list[str]:
    """Return the text columns of a mixture in order: anchor, positive, and negative, negative_1, ... if there are any."""
    of_mixture = (TASK, ANCHOR_PROMPT, DOCUMENT_PROMPT)
    if missing := [name for name in of_mixture if name not in dataset.column_names]:
        raise UserError(
            f"the training data has no column {missing[0]!r}, only {', '.join(dataset.column_names)} (a mixture has task,"
            " anchor_prompt and document_prompt; pairs have none of the three)"
        )
    check_texts(dataset, of_mixture)
    return pair_columns(dataset)


class NVEmbedCollator:
    r"""Tokenize the distinct texts of a batch, longest first, with labels that say where each row's texts are.

    Prompt and text are tokenized as one string by the model's own `preprocess`, which adds EOS, truncates and pads. In
    sentence-transformers, `Pooling` has one `prompt_length` for all texts of a batch, so the batch has a `pool_mask`, which is zero
    on padding and on the tokens of each text's own prompt. These are counted as in sentence-transformers (with BOS, without EOS).

    Example: a tokenizer of words that appends EOS (2) and pads with 0, and two rows of one task, where "sea" is the positive of
    the first row and the negative of the second:

    >>> from types import SimpleNamespace
    >>> words = ["", "", "</s>", "Query:", "salt", "water", "sea", "fox", "red"]
    >>> def preprocess(texts):
    ...     rows = [[words.index(word) for word in text.split()] + [2] for text in texts]
    ...     longest = max(map(len, rows))
    ...     mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    ...     ids = [row + [0] * (longest - len(row)) for row in rows]
    ...     return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "modality": "text"}
    >>> tokenizer = SimpleNamespace(all_special_ids=[0, 2])
    >>> model = SimpleNamespace(preprocess=preprocess, tokenizer=tokenizer, max_seq_length=8)
    >>> collator = NVEmbedCollator(model)
    >>> prompts = {"task": "qa", "anchor_prompt": "Query: ", "document_prompt": ""}
    >>> batch = collator([
    ...     {"anchor": "salt water", "positive": "sea", "negative_1": "red fox", **prompts},
    ...     {"anchor": "red", "positive": "fox", "negative_1": "sea", **prompts},
    ... ])
    >>> batch["text_input_ids"]
    tensor([[3, 4, 5, 2],
            [8, 7, 2, 0],
            [3, 8, 2, 0],
            [6, 2, 0, 0],
            [7, 2, 0, 0]])
    >>> batch["text_pool_mask"]
    tensor([[0, 1, 1, 1],
            [1, 1, 1, 0],
            [0, 1, 1, 0],
            [1, 1, 0, 0],
            [1, 1, 0, 0]])
    >>> batch["label"][..., 0]  # (rows, columns): index of the text above
    tensor([[0, 3, 1],
            [2, 4, 3]])
    >>> batch["label"][0, 1, 1] == batch["label"][1, 2, 1]  # the rest: a hash of the text without its prompt
    tensor(True)

    Args:
        model: model whose `preprocess` tokenizes the texts.
    """

    # Read by sentence-transformers' trainer.
    valid_label_columns: tuple[str, ...] = ()

    def __init__(self, model: SentenceTransformer) -> None:
        self.preprocess: Callable[[list[str]], dict[str, Any]] = model.preprocess
        self.special_ids = frozenset(model.tokenizer.all_special_ids)
        self.max_length = model.max_seq_length
        self._prompt_lengths: dict[str, int] = {"": 0}

    def check_prompts(self, dataset: Dataset) -> None:
        """Raise a `UserError` that names the task if a prompt of a data set leaves no room for text."""
        for column in (ANCHOR_PROMPT, DOCUMENT_PROMPT):
            for prompt in dataset.unique(column):
                length = self._prompt_length(prompt)
                # At least one token of the text besides EOS must fit.
                if prompt and self.max_length is not None and length + 2 > self.max_length:
                    task = dataset[TASK][list(dataset[column]).index(prompt)]
                    raise UserError(
                        f"task {task}: its instruction takes {length} tokens or more, which leaves no room for a text"
                        f" within a maximum length of {self.max_length}: shorten it or raise --max_length"
                    )

    def _prompt_length(self, prompt: str) -> int:
        if prompt not in self._prompt_lengths:
            tokens = self.preprocess([prompt])["input_ids"][0].tolist()
            self._prompt_lengths[prompt] = len(tokens) - (tokens[-1] in self.special_ids)
        return self._prompt_lengths[prompt]

    def __call__(self, rows: list[dict[str, str]]) -> dict[str, Any]:
        """Make a batch: `text_*` (T, L) for the model, `label` (rows, columns, 2) for the loss."""
        columns = in_order(rows[0])
        place_of: dict[tuple[str, str], int] = {}
        places, hashes = [], []
        for row in rows:
            for column in columns:
                prompt = row[ANCHOR_PROMPT if column == "anchor" else DOCUMENT_PROMPT]
                places.append(place_of.setdefault((prompt, row[column]), len(place_of)))
                hashes.append(_hash(row[column]))
        features = self.preprocess([prompt + text for prompt, text in place_of])
        length_T = features["attention_mask"].sum(1)
        order_T = torch.argsort(length_T, descending=True, stable=True)
        prompt_T = torch.tensor([self._prompt_length(prompt) for prompt, _ in place_of])
        features["pool_mask"] = exclude_instruction(features["attention_mask"], prompt_T)
        check_pool_mask(features["pool_mask"])
        batch = {
            f"text_{name}": value[order_T] if isinstance(value, Tensor) else value for name, value in features.items()
        }
        batch["text_lengths"] = length_T[order_T].tolist()  # a list stays on the host, where the loss needs it
        label = torch.stack([torch.argsort(order_T)[torch.tensor(places)], torch.tensor(hashes)], dim=-1)
        return {"label": label.view(len(rows), len(columns), 2), **batch}


def _hash(text: str) -> int:
    """Return a 63-bit hash of a text, equal in all processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
