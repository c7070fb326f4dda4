"""Answer prompts with a trained ImpRAG model over a collection of passages."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from revela_hub.data.sources.unicode import without_surrogates
from revela_hub.errors import UserError
from revela_hub.hub_cards.hub_index import open_store
from revela_hub.loading import varying_shapes
from revela_hub.modeling import ImpRAGForCausalLM
from revela_hub.retrieval.encoder import model_identity, text_positions
from revela_hub.retrieval.hits import Hits
from revela_hub.retrieval.passages import Hit
from revela_hub.trainers.imprag.checkpoint import ImpRAGEncoder, load_imprag_encoder
from revela_hub.trainers.imprag.data import padded, tokenize_passages


@dataclass(frozen=True)
class Answer:
    """The answer to a prompt, and the passages that were read for it, best first."""

    text: str
    passages: Sequence[Hit]

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary, for JSON."""
        return {"answer": self.text, "passages": [hit.to_dict() for hit in self.passages]}


class Answerer:
    """Answer prompts with a model and a collection of passages.

    Args:
        model: model in eval mode.
        tokenizer: its tokenizer.
        collection: passages to retrieve from, a `PassageStore` or any object with its methods `search(vectors, k)` and
            `found(hits)`; None to answer without passages.
        num_passages: passages per prompt, at most as many as the model reads; by default the model's.
    """

    def __init__(
        self,
        model: ImpRAGForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        collection: Any,
        num_passages: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.collection = model, tokenizer, collection
        self.num_passages = num_passages or model.config.k
        self.positions, self.reserved = text_positions(model.config.backbone), model.config.k * model.config.l_max

    def answer(
        self,
        prompts: Sequence[str],
        *,
        queries: Sequence[str] | None = None,
        max_new_tokens: int = 32,
        batch_size: int = 8,
        places: Sequence[str] | None = None,
        **generation: Any,
    ) -> Iterator[Answer]:
        """Answer prompts in order, with greedy decoding by default.

        Args:
            prompts: texts that end where the answer begins.
            queries: texts to search with, for a reader with another retriever; by default the prompts.
            max_new_tokens: maximum tokens of an answer.
            batch_size: prompts per batch.
            places: locations of the prompts, for messages; by default "prompt 1", ...
            **generation: arguments of `generate`: `do_sample`, `num_beams`, ...

        Raises:
            UserError: a prompt is empty, or too long for the model.
        """
        prompts = [without_surrogates(prompt) for prompt in prompts]
        rows = self.tokenizer(prompts)["input_ids"]
        self._check(rows, max_new_tokens, places or [f"prompt {n}" for n in range(1, len(rows) + 1)])
        # Once for all prompts, because an exact search reads all vectors.
        hits = None if self.collection is None else self._search(queries or prompts, batch_size)
        for start in range(0, len(rows), batch_size):
            part = slice(start, start + batch_size)
            read: Sequence[Sequence[Hit]] = [()] * len(rows[part])
            if hits is not None:
                read = self.collection.found(Hits(hits.scores_QK[part], hits.rows_QK[part]))
            with varying_shapes(), torch.no_grad():
                inputs = self._inputs(prompts[part], rows[part], read)
                model: Any = self.model
                ended = model.generate(
                    **{name: value.to(model.device) for name, value in inputs.items()},
                    max_new_tokens=max_new_tokens,
                    **({"do_sample": False} | generation),
                )
            texts = self.tokenizer.batch_decode(ended[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            for text, found in zip(texts, read, strict=True):
                yield Answer(str(text).strip(), found)

    def _search(self, queries: Sequence[str], batch_size: int) -> Hits:
        """Return the passages that each prompt reads."""
        vectors = ImpRAGEncoder(self.model, self.tokenizer).encode_query(list(queries), batch_size=batch_size)
        found: Hits = self.collection.search(vectors, self.num_passages)
        return found

    def _inputs(
        self, prompts: Sequence[str], rows: list[list[int]], read: Sequence[Sequence[Hit]]
    ) -> dict[str, Tensor]:
        """Return the inputs of `generate` for prompts and the passages that they read."""
        ids, mask = left_padded(rows)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if not (most := max(map(len, read))):
            return inputs
        flat = [passage.text for found in read for passage in found]
        tokens = iter(tokenize_passages(self.tokenizer, flat, self.model.config.l_max)[0])
        # An approximate index may find fewer passages for some prompts.
        filled = padded(next(tokens) if n < len(found) else [] for found in read for n in range(most))
        passage_ids, passage_mask = (part.view(len(ids), most, -1) for part in filled)
        return inputs | {"passage_input_ids": passage_ids, "passage_attention_mask": passage_mask}

    def _check(self, rows: list[list[int]], max_new_tokens: int, places: Sequence[str]) -> None:
        """Raise a `UserError` if a prompt is empty, or exceeds the model's positions with its passages and the answer."""
        room = (self.positions or sys.maxsize) - max_new_tokens - (self.collection is not None) * self.reserved
        for place, row in zip(places, rows, strict=True):
            if not 0 < len(row) <= room:
                raise UserError(
                    f"{place} has {len(row)} tokens, but with its passages and an answer of {max_new_tokens} tokens"
                    f" there is room for 1 to {max(0, room)}: shorten it, or lower max_new_tokens"
                )


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return tokens and mask of prompts to continue, padded on the left.

    >>> left_padded([[5, 6, 7], [8]])
    (tensor([[5, 6, 7],
            [0, 0, 8]]), tensor([[1, 1, 1],
            [0, 0, 1]]))
    """
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def open_answerer(name: str, index: str, *, num_passages: int | None = None, device: str | None = None) -> Answerer:
    """Open a model and an index that was made with it.

    Args:
        name: folder or Hub id of the model.
        index: folder written by `revela-hub index`, or `hf:owner/name` on the Hub.
        num_passages: passages per prompt; by default the model's.
        device: by default the fastest device.

    Raises:
        UserError: the model or the index cannot be read, the index belongs to another model, or its vectors are no longer
            those of the model (`PassageStore.check_vectors`).
    """
    encoder = load_imprag_encoder(name, device)
    store = open_store(index, encoder, model_identity(name), name)
    return Answerer(encoder.model, encoder.tokenizer, store, num_passages)
