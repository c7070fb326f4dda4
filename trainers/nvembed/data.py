"""Arguments and collator of NV-Embed: rows of a mixture to a batch of distinct texts, each with its own instruction."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from torch import Tensor

from revela_hub.data.text.same_text import text_hash
from revela_hub.errors import UserError
from revela_hub.modeling.modeling_nvembed import check_pool_mask, exclude_instruction
from revela_hub.options import option
from revela_hub.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Probability
from revela_hub.trainers.base.arguments import WEIGHT_DECAY, AdapterArguments, RunArguments
from revela_hub.trainers.base.rows import in_order

ANCHOR_PROMPT, DOCUMENT_PROMPT, TASK = "anchor_prompt", "document_prompt", "task"


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
    >>> batch["label"][0, 1, 1] == batch["label"][1, 2, 1]  # the rest: `text_hash` of the text without its prompt
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

    def _prompt_length(self, prompt: str) -> int:
        if prompt not in self._prompt_lengths:
            tokens = self.preprocess([prompt])["input_ids"][0].tolist()
            length = self._prompt_lengths[prompt] = len(tokens) - (tokens[-1] in self.special_ids)
            # At least one token of the text besides EOS must fit, or all texts would have the same vector.
            if self.max_length is not None and length + 2 > self.max_length:
                raise UserError(
                    f"the instruction {prompt[:60]!r} takes {length} tokens or more, which leaves no room for a text within a"
                    f" maximum length of {self.max_length}: shorten it or raise max_length"
                )
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
                hashes.append(text_hash(row[column]))
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


QUERY_INSTRUCTION = "Given a question, retrieve passages that answer the question"


@dataclass
class NVEmbedTrainingArguments(AdapterArguments, RunArguments, SentenceTransformerTrainingArguments):
    """`SentenceTransformerTrainingArguments` for both stages of NV-Embed.

    Stage one trains on retrieval, with `in_batch_negatives`. Stage two trains on all tasks, without them, at a learning rate
    of 1.5e-5.

    A batch is `per_device_train_batch_size` rows on each device. `mini_batch_size` limits the texts in memory at a time,
    without changing the result. `gradient_accumulation_steps` does change it, because batches do not share
    negatives.
    """

    learning_rate: float = option(2e-5, "Peak learning rate.")
    warmup_steps: float = option(
        50, "Linear warm-up: number of steps, or a fraction below 1 of all steps; it is repeated in stage 2."
    )
    weight_decay: float = option(0.03, WEIGHT_DECAY)
    per_device_train_batch_size: int = option(128, "Number of rows per device and batch (paper: 128 over all devices).")
    in_batch_negatives: bool = option(
        True, "Also use the passages of the other rows, on all devices, as negatives (stage 1)."
    )
    temperature: PositiveFloat = option(0.02, "Temperature that divides the cosine similarities.")
    mini_batch_size: PositiveInt = option(
        32, "Number of texts in memory at a time (GradCache); a whole batch at once is twice as fast."
    )
    lora_rank: NonNegativeInt = option(16, "Rank of the decoder's LoRA adapters; 0 trains all weights.")
    lora_alpha: PositiveInt | None = option(None, "LoRA alpha (default: twice the rank).")
    lora_dropout: Probability = option(0.1, "Dropout of the LoRA adapters.")

    def __post_init__(self) -> None:
        """Set defaults that depend on other fields."""
        super().__post_init__()
        if self.lora_alpha is None and self.lora_rank:
            self.lora_alpha = 2 * self.lora_rank
