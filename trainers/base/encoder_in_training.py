"""Encoder for evaluating a retriever during its training."""

from collections.abc import Callable, Mapping
from typing import Any

from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerBase

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.retrieval import Rankings, retrieval_run
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.encoding import divided
from revela_hub.trainers.base.distributed import from_main


def encoder_in_training(
    model: nn.Module,
    embed: Callable[[Tensor, Tensor], Tensor],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Mapping[str, str],
    max_length: int,
    similarity: Any,
) -> SentenceTransformer:
    """Return a sentence-transformers model around a retriever in training, with the settings of the exported model.

    `embed` is `(input_ids, attention_mask) -> (N, d)`, with the weights of `model`.
    """
    device = str(next(model.parameters()).device)
    module = _Embedder(model, embed, tokenizer, max_length)
    return SentenceTransformer(modules=[module], prompts=dict(prompts), similarity_fn_name=similarity, device=device)


class _Embedder(nn.Module):
    def __init__(self, model: nn.Module, embed: Any, tokenizer: Any, length: int) -> None:
        super().__init__()
        self.model, self.embed, self.tokenizer, self.max_seq_length = model, embed, tokenizer, length

    def preprocess(self, inputs: list[str], prompt: str | None = None, **_: Any) -> Any:
        """Return the tokens of texts."""
        cut = {"padding": True, "truncation": True, "max_length": self.max_seq_length, "return_tensors": "pt"}
        return self.tokenizer([(prompt or "") + text for text in inputs], **cut)

    def forward(self, features: Any) -> Any:
        """Add the vectors of a batch."""
        return features | {"sentence_embedding": self.embed(features["input_ids"], features["attention_mask"]).float()}


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
