"""Prompts to answers: the tokens of a trained ImpRAG model, its vectors, and batches of `generate` over an index."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.modeling import ImpRAGForCausalLM, ImpRAGModel
from revela_hub.trainers.common.passages import PassageTokens, tokenize_passages


class ImpRAGEncoder:
    """An ImpRAG model as an encoder of texts: prompts are queries, passages documents; compared by dot product."""

    def __init__(self, model: ImpRAGModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer

    def encode_query(self, inputs: list[str], /, *, batch_size: int = 32, show_progress_bar: bool = False) -> Any:
        """Vectors (N, E) of N prompts."""
        rows = [ids or [self.tokenizer.eos_token_id] for ids in self.tokenizer(inputs)["input_ids"]]
        starts = np.cumsum([0, *map(len, rows)]).astype(np.int64)
        tokens = PassageTokens(np.concatenate([np.array(row, np.int32) for row in rows]), starts)
        return self._encode(tokens, self.model.embed_queries, batch_size)

    def encode_document(self, inputs: list[str], /, *, batch_size: int = 32, show_progress_bar: bool = False) -> Any:
        """Vectors (N, E) of N passages, cut at the model's l_max tokens."""
        tokens = tokenize_passages(self.tokenizer, inputs, self.model.config.l_max)
        return self._encode(tokens, self.model.embed_passages, batch_size)

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


@dataclass(frozen=True)
class PassageRead:
    """A passage that a prompt retrieved: its number in the index, its score (dot product) and its text."""

    number: int
    score: float
    text: str


@dataclass(frozen=True)
class Answer:
    """What a prompt was answered, and what was read for it, best first."""

    text: str
    passages: tuple[PassageRead, ...]


class Answerer:
    """Answers prompts with a model, the texts of a collection and an index of their vectors.

    Args:
        model: the model, in eval mode.
        tokenizer: its tokenizer.
        texts: the collection's passages; None answers without passages.
        index: has `search(vectors, k)`, which returns scores and numbers of passages.
        k: passages for a prompt; by default the model's.

    Raises:
        UserError: the collection has fewer than k passages.
    """

    def __init__(
        self,
        model: ImpRAGForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[str] | None,
        index: Any = None,
        k: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.texts, self.index = model, tokenizer, texts, index
        self.k = model.config.k if k is None else k
        if self.k > model.config.k:
            raise UserError(f"k={self.k} passages were asked for, but the model reads at most {model.config.k}")
        if texts is not None and self.k > len(texts):
            raise UserError(f"k={self.k} passages were asked for, but the index holds {len(texts)}: lower k")

    def answer(
        self, prompts: Sequence[str], *, max_new_tokens: int = 32, batch_size: int = 8, **generation: Any
    ) -> Iterator[Answer]:
        """Answers prompts in their order, greedily by default.

        Args:
            prompts: the texts, each ended where the answer begins.
            max_new_tokens: of an answer, at most.
            batch_size: prompts at a time.
            **generation: of `generate`: `do_sample`, `num_beams`, ...

        Raises:
            UserError: a prompt is empty, or too long for the model.
        """
        rows = self.tokenizer(list(prompts))["input_ids"]
        self._check(rows, max_new_tokens)
        for start in range(0, len(rows), batch_size):
            ids, mask = left_padded(rows[start : start + batch_size])
            ids, mask = ids.to(self.model.device), mask.to(self.model.device)
            read, passages = self._retrieve(ids, mask)
            ended = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                **passages,
                **({"do_sample": False} | generation),
            )
            texts = self.tokenizer.batch_decode(ended[:, ids.shape[1] :], skip_special_tokens=True)
            for text, found in zip(texts, read, strict=True):
                yield Answer(str(text).strip(), found)

    def _retrieve(self, ids: Tensor, mask: Tensor) -> tuple[list[tuple[PassageRead, ...]], dict[str, Any]]:
        if self.texts is None:
            return [()] * len(ids), {}
        vectors = self.model.embed_queries(ids, mask).detach().float().cpu().numpy()
        scores_Bk, rows_Bk = (np.asarray(part) for part in self.index.search(vectors, self.k))
        read = [
            tuple(PassageRead(int(n), float(s), self.texts[int(n)]) for n, s in zip(rows, scores, strict=True))
            for rows, scores in zip(rows_Bk, scores_Bk, strict=True)
        ]
        flat = [passage.text for found in read for passage in found]
        tokens = tokenize_passages(self.tokenizer, flat, self.model.config.l_max)
        passage_ids, passage_mask = tokens.batch(np.arange(len(flat)).reshape(rows_Bk.shape))
        device = ids.device
        return read, {
            "passage_input_ids": passage_ids.to(device),
            "passage_attention_mask": passage_mask.to(device),
        }

    def _check(self, rows: list[list[int]], max_new_tokens: int) -> None:
        config = self.model.config
        positions = getattr(config.backbone, "max_position_embeddings", None)
        room = None if positions is None else positions - max_new_tokens
        if room is not None and self.texts is not None:
            room -= config.k * config.l_max
        for number, row in enumerate(rows, start=1):
            if not row:
                raise UserError(f"prompt {number} is empty")
            if room is not None and len(row) > room:
                raise UserError(
                    f"prompt {number} has {len(row)} tokens, but with its passages and an answer of {max_new_tokens}"
                    f" there is room for {room}: shorten it"
                )


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Tokens and mask of prompts to be continued.

    >>> left_padded([[5, 6, 7], [8]])
    (tensor([[5, 6, 7],
            [0, 0, 8]]), tensor([[1, 1, 1],
            [0, 0, 1]]))
    """
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
