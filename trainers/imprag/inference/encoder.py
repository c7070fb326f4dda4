"""An ImpRAG model as an encoder: the vectors of prompts and of passages."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from revela_hub.modeling import ImpRAGForCausalLM, ImpRAGModel
from revela_hub.precision import in_fast_precision
from revela_hub.trainers.common.passages import PassageTokens, tokenize_passages


class ImpRAGEncoder:
    """An ImpRAG model as an encoder of texts: prompts are queries, passages documents; compared by dot product."""

    similarity_fn_name = "dot"

    def __init__(self, model: ImpRAGModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.device = model.device
        self.cut = 0  # how many of the passages so far were longer than l_max

    def encode_query(self, inputs: list[str], /, *, batch_size: int = 32, show_progress_bar: bool = False) -> Any:
        """Vectors (N, E) of N prompts."""
        rows = [ids or [self.tokenizer.eos_token_id] for ids in self.tokenizer(inputs)["input_ids"]]
        starts = np.cumsum([0, *map(len, rows)]).astype(np.int64)
        tokens = PassageTokens(np.concatenate([np.array(row, np.int32) for row in rows]), starts)
        return self._encode(tokens, self.model.embed_queries, batch_size)

    def encode_document(self, inputs: list[str], /, *, batch_size: int = 32, show_progress_bar: bool = False) -> Any:
        """Vectors (N, E) of N passages, cut at the model's l_max tokens."""
        tokens = tokenize_passages(self.tokenizer, inputs, self.model.config.l_max)
        self.cut += tokens.cut
        return self._encode(tokens, self.model.embed_passages, batch_size)

    def warnings(self) -> list[str]:
        """What the user should know of the texts encoded so far."""
        if not self.cut:
            return []
        limit = self.model.config.l_max
        return [f"{self.cut:,} passages are longer than the model's {limit} tokens and are cut: lower --max_words"]

    @torch.no_grad()
    def _encode(self, tokens: PassageTokens, embed: Any, batch_size: int) -> NDArray[np.float32]:
        order = np.argsort(-np.diff(tokens.starts), kind="stable")
        parts = []
        for start in range(0, len(order), batch_size):
            ids, mask = tokens.batch(order[start : start + batch_size])
            parts.append(embed(ids.to(self.model.device), mask.to(self.model.device)).float().cpu().numpy())
        vectors = np.empty((len(tokens), parts[0].shape[1]), np.float32)
        vectors[order] = np.concatenate(parts)
        return vectors


def load_imprag_encoder(name: str, device: str | None = None) -> ImpRAGEncoder:
    """The encoder of a model: folder or Hub id.

    Raises:
        UserError: it cannot be loaded.
    """
    from revela_hub.trainers.imprag.checkpoint import load_imprag_checkpoint

    loaded = load_imprag_checkpoint(name, dtype="auto")
    return ImpRAGEncoder(on_device(loaded.model, device), loaded.tokenizer)


def on_device(model: ImpRAGForCausalLM, device: str | None) -> ImpRAGForCausalLM:
    """Moves a model to a device, by default the fastest one, in the dtype that is fast there."""
    if device is None and torch.accelerator.is_available():
        device = str(torch.accelerator.current_accelerator())
    model.to(torch.device(device or "cpu"))  # type: ignore[arg-type]  # its decorator hides what it takes
    return in_fast_precision(model)
