"""Encoder interface of an ImpRAG model: vectors of prompts and passages."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from revela_hub.data.sources.report import counted
from revela_hub.modeling import ImpRAGForCausalLM, ImpRAGModel
from revela_hub.modeling.backbones import evaluating
from revela_hub.precision import in_fast_precision
from revela_hub.trainers.base.passages import token_rows, tokenize_passages


class ImpRAGEncoder:
    """Encoder of texts: prompts are queries, passages are documents, and the similarity is the dot product."""

    similarity_fn_name = "dot"

    def __init__(self, model: ImpRAGModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.device = model.device
        self.cut = 0  # number of passages so far that were longer than l_max

    def encode_query(self, inputs: list[str], /, *, batch_size: int = 32, show_progress_bar: bool = False) -> Any:
        """Return the (N, E) vectors of N prompts."""
        rows = [ids or [self.tokenizer.eos_token_id] for ids in self.tokenizer(inputs)["input_ids"]]
        with evaluating(self.model):
            return token_rows(rows).encode(self.model.embed_queries, self.model.device, batch_size)

    def encode_document(self, inputs: list[str], /, *, batch_size: int = 32, show_progress_bar: bool = False) -> Any:
        """Return the (N, E) vectors of N passages, cut at the model's l_max tokens."""
        tokens = tokenize_passages(self.tokenizer, inputs, self.model.config.l_max)
        self.cut += tokens.cut
        with evaluating(self.model):
            return tokens.encode(self.model.embed_passages, self.model.device, batch_size)

    def warnings(self) -> list[str]:
        """Return warnings about the texts encoded so far."""
        if not self.cut:
            return []
        limit = self.model.config.l_max
        are = "is" if self.cut == 1 else "are"
        return [
            f"{counted(self.cut, 'passage')} {are} longer than the model's {limit} tokens and {are} cut: lower --max_words"
        ]


def load_imprag_encoder(name: str, device: str | None = None) -> ImpRAGEncoder:
    """Load the encoder of a model, given as folder or Hub id."""
    from revela_hub.trainers.imprag.checkpoint import load_imprag_checkpoint

    loaded = load_imprag_checkpoint(name, dtype="auto")
    return ImpRAGEncoder(on_device(loaded.model, device), loaded.tokenizer)


def on_device(model: ImpRAGForCausalLM, device: str | None) -> ImpRAGForCausalLM:
    """Move a model to a device, by default the fastest one, with a dtype that is fast there."""
    if device is None and torch.accelerator.is_available():
        device = str(torch.accelerator.current_accelerator())
    model.to(torch.device(device or "cpu"))  # type: ignore[arg-type]  # its decorator hides the argument types
    return in_fast_precision(model)
