"""Encoder for evaluating a retriever during its training."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerBase

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.retrieval import Rankings, retrieval_run
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.encoding import batches, divided, encode_batches, token_budget
from revela_hub.trainers.base.distributed import from_main


class EncoderInTraining:
    """Wraps a retriever in training as an `Encoder`; its mode is restored after encoding.

    `embed` is `(input_ids, attention_mask) -> (N, d)`. The other settings are those of the exported model.
    """

    def __init__(
        self,
        model: nn.Module,
        embed: Callable[[Tensor, Tensor], Tensor],
        tokenizer: PreTrainedTokenizerBase,
        prompts: Mapping[str, str],
        max_length: int,
        similarity: str,
    ) -> None:
        self.model, self.embed, self.tokenizer = model, embed, tokenizer
        self.prompts, self.max_length, self.similarity_fn_name = prompts, max_length, similarity

    def encode_query(self, texts: list[str], **kwargs: Any) -> NDArray[np.float32]:
        """Return (N, d) vectors of queries."""
        return self._encode(texts, self.prompts.get("query", ""), **kwargs)

    def encode_document(self, texts: list[str], **kwargs: Any) -> NDArray[np.float32]:
        """Return (N, d) vectors of documents."""
        return self._encode(texts, self.prompts.get("document", ""), **kwargs)

    @torch.no_grad()
    def _encode(self, texts: list[str] | str, prompt: str, batch_size: int = 32, **_: Any) -> NDArray[np.float32]:
        if isinstance(texts, str):  # as in sentence-transformers, one vector
            return self._encode([texts], prompt)[0]  # type: ignore[no-any-return]
        texts, cut = [prompt + text for text in texts], {"truncation": True, "max_length": self.max_length}
        lengths_N = np.array([len(ids) for ids in self.tokenizer(texts, **cut)["input_ids"]])
        device = next(self.model.parameters()).device

        def encode(rows: NDArray[np.int64]) -> Tensor:
            batch = self.tokenizer([texts[row] for row in rows], padding=True, return_tensors="pt", **cut).to(device)
            return self.embed(batch["input_ids"], batch["attention_mask"]).float().cpu()

        was_training = self.model.training
        self.model.eval()
        made = list(batches(lengths_N, token_budget(device.type, batch_size), 8 * batch_size))
        vectors_ND: NDArray[np.float32] = encode_batches(made, encode).numpy()
        self.model.train(was_training)
        return vectors_ND


def rank_together(encoder: Encoder, task: RetrievalTask, model: nn.Module) -> Rankings:
    """Return the results of a task's queries on every process; each process encodes a part of the texts.

    All processes must call it. They get the main process's results: the others' may differ in the last bits. The encoder is a
    part of the model.
    """
    # Under FSDP2, the weights outside of the decoder layers are gathered by calls of the model only, not by those of its retriever.
    if isinstance(model, FSDPModule):
        model.unshard()
    with divided():
        found = retrieval_run(encoder, task)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return from_main(lambda: found)
