"""Tokenised passages, which a trainer reads by index."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.retrieval.encoding import batches, encode_batches
from revela_hub.sdpa import varying_shapes

BLOCK = 1024


@dataclass(frozen=True)
class PassageTokens:
    """Concatenated tokens of M passages.

    Attributes:
        tokens: all tokens.
        starts: (M + 1,) start of each passage; the last entry is the end.
        max_length: maximum number of tokens of a passage; None if none was truncated.
        cut: number of truncated passages.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    max_length: int | None = None
    cut: int = 0

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def truncation_note(self) -> str:
        """Message about truncated passages."""
        return (
            f"{self.cut:,} of {len(self):,} passages are longer than {self.max_length} tokens and are truncated: lower"
            " --max_words or raise --max_passage_length"
        )

    def batch(self, rows: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Return tokens and mask (..., P) of the passages with these indices, padded on the right; -1 gives an empty row.

        >>> passages = PassageTokens(np.array([7, 8, 9], np.int32), np.array([0, 2, 3]))
        >>> passages.batch(np.array([[1, 0], [-1, 1]]))[0]
        tensor([[[9, 0],
                 [7, 8]],
        <BLANKLINE>
                [[0, 0],
                 [9, 0]]])
        """
        flat = rows.reshape(-1)
        lengths = np.where(flat >= 0, self.starts[flat + 1] - self.starts[flat], 0)
        longest = max(1, int(lengths.max(initial=0)))
        ids = np.zeros((len(flat), longest), np.int64)
        for place, (row, length) in enumerate(zip(flat, lengths, strict=True)):
            ids[place, :length] = self.tokens[self.starts[row] : self.starts[row] + length]
        mask = np.arange(longest) < lengths[:, None]
        shape = (*rows.shape, longest)
        return torch.from_numpy(ids).view(shape), torch.from_numpy(mask.astype(np.int64)).view(shape)

    @varying_shapes()
    @torch.no_grad()
    def encode(
        self, embed: Callable[[Tensor, Tensor], Tensor], device: torch.device, batch_size: int = 32
    ) -> NDArray[np.float32]:
        """Return the (M, E) vectors of the passages, in batches of similar length; within `divided`, on all processes together.

        `embed` computes vectors from tokens and mask, both (B, P).
        """

        def encoded(rows: NDArray[np.int64]) -> Tensor:
            ids, mask = self.batch(rows)
            return embed(ids.to(device), mask.to(device)).float().cpu()

        vectors: NDArray[np.float32] = encode_batches(
            list(batches(np.diff(self.starts), sys.maxsize, batch_size)), encoded
        ).numpy()
        return vectors


def token_rows(rows: Sequence[Sequence[int]]) -> PassageTokens:
    """Return rows of token ids as `PassageTokens`."""
    starts = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return PassageTokens(np.concatenate([np.array(row, np.int32) for row in rows]), starts)


def tokenize_passages(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int, *, end: bool = True
) -> PassageTokens:
    """Tokenise passages to at most `max_length` tokens, and end each with EOS, the position of its vector.

    With `end=False`, texts are tokenised and truncated by the tokenizer alone.

    Raises:
        UserError: the tokenizer has no EOS token, or the collection is empty.
    """
    if end and tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no EOS token, which passages end with: set one")
    if not texts:
        raise UserError("there are no passages")
    parts: list[NDArray[np.int32]] = []
    cut = 0
    last = [tokenizer.eos_token_id] if end else []
    room = max_length - len(last)
    for start in range(0, len(texts), BLOCK):
        block = list(texts[start : start + BLOCK])
        for text, ids in zip(block, tokenizer(block)["input_ids"], strict=True):
            if end and ids and ids[-1] == tokenizer.eos_token_id:
                ids = ids[:-1]
            if len(ids) > room:
                cut += 1
                ids = ids[:room] if end else tokenizer(text, truncation=True, max_length=room)["input_ids"]
            parts.append(np.array([*ids, *last], np.int32))
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    return PassageTokens(np.concatenate(parts), starts, max_length, cut)
