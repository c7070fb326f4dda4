"""Encoder for evaluating a retriever during its training."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from revela_hub.retrieval.encoding import batches, token_budget


class EncoderInTraining:
    """Wraps a retriever in training as an `Encoder` with cosine similarity.

    Args:
        model: model in training; its mode is restored after encoding.
        embed: `(input_ids, attention_mask) -> (N, d)`.
        tokenizer: tokenizer of the retriever.
        prompts: prompts for `query` and `document`.
        max_length: maximum number of tokens, as in the exported model.
    """

    similarity_fn_name = "cosine"

    def __init__(
        self,
        model: nn.Module,
        embed: Callable[[Tensor, Tensor], Tensor],
        tokenizer: PreTrainedTokenizerBase,
        prompts: Mapping[str, str],
        max_length: int,
    ) -> None:
        self.model, self.embed, self.tokenizer = model, embed, tokenizer
        self.prompts, self.max_length = prompts, max_length

    def encode_query(self, texts: list[str], **kwargs: Any) -> NDArray[np.float32]:
        """Return (N, d) vectors of queries."""
        return self._encode(texts, self.prompts.get("query", ""), **kwargs)

    def encode_document(self, texts: list[str], **kwargs: Any) -> NDArray[np.float32]:
        """Return (N, d) vectors of documents."""
        return self._encode(texts, self.prompts.get("document", ""), **kwargs)

    @torch.no_grad()
    def _encode(self, texts: list[str], prompt: str, batch_size: int = 32, **_: Any) -> NDArray[np.float32]:
        texts, cut = [prompt + text for text in texts], {"truncation": True, "max_length": self.max_length}
        lengths_N = np.array([len(ids) for ids in self.tokenizer(texts, **cut)["input_ids"]])
        device = next(self.model.parameters()).device
        was_training, order, parts = self.model.training, [], []
        self.model.eval()
        for rows in batches(lengths_N, token_budget(device.type, batch_size), 8 * batch_size):
            batch = self.tokenizer([texts[row] for row in rows], padding=True, return_tensors="pt", **cut).to(device)
            parts.append(self.embed(batch["input_ids"], batch["attention_mask"]).float().cpu().numpy())
            order.append(rows)
        self.model.train(was_training)
        found: NDArray[np.float32] = np.concatenate(parts)[np.argsort(np.concatenate(order))]
        return found
