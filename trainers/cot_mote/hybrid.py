"""Return dense and sparse vector of a text as one vector, so that sentence-transformers' losses train the sum of the scores.

    [dense(q); sparse(q)] . [dense(p); sparse(p)] = dense(q) . dense(p) + sparse(q) . sparse(p)

Shapes: B texts, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.modeling.modeling_cot_mote import CoTMoTEModel
from revela_hub.trainers.cot_mote.verification import EXPERTS

SIMILARITY: Literal["dot"] = "dot"
"""How dense, sparse and hybrid vectors are compared: only dot products of both parts add up to that of the whole."""


class HybridEncoder(InputModule):
    """Sentence-transformers module around a `CoTMoTEModel`; `task` ("query" or "document") selects the expert.

    Args:
        model: model, which is not copied.
        tokenizer: its tokenizer.
        query_max_length: maximum tokens of a query, special tokens included.
        max_length: maximum tokens of a passage, special tokens included.
        scores: `"hybrid"` for vectors of D + V dimensions, `"dense"` for D, `"sparse"` for V.
        switch_experts: ablation that encodes queries with the passage expert and passages with the query expert.
    """

    tokenizer: PreTrainedTokenizerBase
    forward_kwargs = {"task"}  # noqa: RUF012 (sentence-transformers' own convention)

    def __init__(
        self,
        model: CoTMoTEModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        query_max_length: int = 32,
        max_length: int = 144,
        scores: Literal["hybrid", "dense", "sparse"] = "hybrid",
        switch_experts: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.max_lengths = {"query": query_max_length, "document": max_length}
        self.max_seq_length = max_length
        self.scores, self.switch_experts = scores, switch_experts

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, task: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """Tokenize texts, with the maximum length of queries or passages."""
        texts = [(prompt or "") + text for text in inputs]
        length = self.max_lengths.get(task or "document", self.max_seq_length)
        encoding = self.tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        return {"input_ids": encoding["input_ids"], "attention_mask": encoding["attention_mask"]}

    def forward(self, features: dict[str, Any], task: str | None = None, **_: Any) -> dict[str, Any]:
        """Add `sentence_embedding`: (B, D + V), (B, D) or (B, V).

        Raises:
            UserError: the task is missing.
        """
        task = task or features.get("task")
        if task not in EXPERTS:
            raise UserError(
                f"no expert given (task is {task!r}): use encode_query for queries and encode_document for passages"
            )
        kind = ("document" if task == "query" else "query") if self.switch_experts else task
        output = self.model(
            features["input_ids"],
            features["attention_mask"],
            expert=EXPERTS[kind],
            return_sparse=self.scores != "dense",
        )
        parts = [output.pooler_output] if self.scores != "sparse" else []
        parts += [output.sparse] if self.scores != "dense" else []
        features["sentence_embedding"] = torch.cat([part.float() for part in parts], dim=-1)
        return features

    def sparse_part(self, embeddings: Tensor) -> Tensor:
        """Return the sparse (B, V) part of vectors from `forward`."""
        dense = self.model.config.get_text_config().hidden_size if self.scores == "hybrid" else 0
        return embeddings[:, dense:]

    def get_embedding_dimension(self) -> int:
        """Return D + V, D or V."""
        config = self.model.config.get_text_config()
        sizes = {"dense": config.hidden_size, "sparse": config.vocab_size}
        return sum(size for name, size in sizes.items() if self.scores in (name, "hybrid"))

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the whole model, whichever vectors are returned."""
        self.model.save_pretrained(Path(output_path))
        self.tokenizer.save_pretrained(output_path)


def hybrid_encoder(model: CoTMoTEModel, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> SentenceTransformer:
    """Return a sentence-transformers model around a CoT-MoTE model, for dot products; arguments as in `HybridEncoder`."""
    module = HybridEncoder(model, tokenizer, **settings)
    return SentenceTransformer(modules=[module], similarity_fn_name=SIMILARITY, device=str(model.device))
