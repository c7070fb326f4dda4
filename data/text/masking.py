"""Whole-word masks as in arXiv 2205.12035, section 3, vectorised over all masks of a span.

As in the original implementation (`_whole_word_mask` of its collator), a mask over L tokens (including special tokens) selects
random words until max(1, round(ratio L)) tokens are masked; a word that would exceed this number is skipped. The original is a
Python loop over shuffled words, run 129 times per passage. Here all masks of a span are drawn together: each has its own random order
of the words, and one loop over the places in these orders takes the words that still fit. The distribution is the same.

Differences from the original: word boundaries come from the tokenizer's pre-tokenizer, so all types of tokenizers work, not
only WordPiece; and all special tokens (such as the unknown token) are never masked, not only the first and the last.

Letters in names: L tokens including special tokens, W words, N masks.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from revela_hub.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Bools: TypeAlias = NDArray[np.bool_]
Tokens: TypeAlias = NDArray[np.int64]

MASKED_FRACTION, RANDOM_FRACTION = 0.8, 0.1  # of the encoder's selected tokens; the rest are unchanged


@dataclass(frozen=True)
class Vocabulary:
    """The properties of a tokenizer that masking needs: the tokens before and after a text ([CLS] and [SEP]), the mask, ...

    `is_special` (vocabulary,) is True for special tokens, `ordinary` has all others, ascending.
    """

    first: int
    last: int
    mask: int
    padding: int
    is_special: Bools
    ordinary: Tokens

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "Vocabulary":
        """Return the properties of a tokenizer."""
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if tokenizer.mask_token_id is None:
            raise UserError(f"the tokenizer of {name} has no mask token; use an encoder trained as a masked LM")
        if tokenizer.pad_token_id is None:
            raise UserError(f"the tokenizer of {name} has no padding token; set its pad_token")
        around = tokenizer("")["input_ids"]
        if len(around) != 2 or not set(around) <= set(tokenizer.all_special_ids):
            raise UserError(
                f"the tokenizer of {name} does not add one special token before and one after a text ([CLS] and [SEP]), "
                "which whole-word masking needs"
            )
        known = np.array(sorted(tokenizer.get_vocab().values()))
        is_special = np.zeros(known[-1] + 1, dtype=np.bool_)
        is_special[tokenizer.all_special_ids] = True
        ordinary = known[~is_special[known]].astype(np.int64)
        return cls(around[0], around[1], tokenizer.mask_token_id, tokenizer.pad_token_id, is_special, ordinary)


def masked_tokens(length: int, ratio: float) -> int:
    """Return how many of `length` tokens, including special tokens, a mask covers."""
    return max(1, round(length * ratio))


def whole_word_masks(
    word_starts_L: Bools, maskable_L: Bools, sizes_N: ArrayLike, generator: np.random.Generator
) -> Bools:
    """Draw masks of whole words.

    Args:
        word_starts_L: (L,), True for the first token of a word. Tokens before the first True form a word, too.
        maskable_L: (L,), False for special tokens, which are never masked.
        sizes_N: (N,), the maximum number of tokens of each mask.
        generator: The random generator; the same state gives the same masks.

    Returns:
        (N, L), True for masked tokens. Each mask has the maximum number of tokens, or no further word fits.
    """
    word_L, lengths_W = _words(word_starts_L, maskable_L)
    words, room_N = len(lengths_W), np.array(sizes_N)
    order_NW = generator.random((len(room_N), words), dtype=np.float32).argsort(axis=1)
    fits_WN = np.zeros((words, len(room_N)), dtype=np.bool_)
    for length_N, fits_N in zip(lengths_W[order_NW].T, fits_WN, strict=True):
        np.less_equal(length_N, room_N, out=fits_N)
        room_N -= length_N * fits_N
        if not room_N.any():
            break
    masks_NW = np.zeros((len(room_N), words + 1), dtype=np.bool_)  # the last column is for tokens outside words
    np.put_along_axis(masks_NW, order_NW, fits_WN.T, axis=1)
    masks_NL: Bools = masks_NW.take(word_L, axis=1)
    return masks_NL


def _words(word_starts_L: Bools, maskable_L: Bools) -> tuple[Tokens, Tokens]:
    """Return the word of each token, (L,), with W for tokens outside words; and the lengths of the words, (W,)."""
    number_C = np.cumsum(word_starts_L)[maskable_L]
    if not len(number_C):
        return np.zeros(len(maskable_L), dtype=np.int64), np.zeros(0, dtype=np.int64)
    # Renumbered, because words of special tokens only do not count.
    word_C = np.zeros(len(number_C), dtype=np.int64)
    np.cumsum(number_C[1:] != number_C[:-1], out=word_C[1:])
    word_L = np.full(len(maskable_L), word_C[-1] + 1)
    word_L[maskable_L] = word_C
    return word_L, np.bincount(word_C)


def replace_chosen(
    tokens_L: Tokens, chosen_L: Bools, draws_L: NDArray[np.float64], random_L: Tokens, mask: int
) -> Tokens:
    """Replace 80% of the selected tokens by `mask` and 10% by random tokens.

    Args:
        tokens_L: (L,), the original tokens.
        chosen_L: (L,), True for selected tokens.
        draws_L: (L,), uniform in [0, 1).
        random_L: (L,), the random replacements.
        mask: The mask token.
    """
    masked_L = chosen_L & (draws_L < MASKED_FRACTION)
    replaced_L = chosen_L & ~masked_L & (draws_L < MASKED_FRACTION + RANDOM_FRACTION)
    return np.where(masked_L, mask, np.where(replaced_L, random_L, tokens_L))


def visibility(hidden_NL: Bools, set_L: Tokens) -> Bools:
    """Return (L, L), True where a row sees a key: all keys except those of its set and itself (Eq. 6).

    Args:
        hidden_NL: (N, L), sets of hidden tokens without special tokens, so [CLS] and [SEP] are visible.
        set_L: (L,), the set of each row.
    """
    visible_LL: Bools = (~hidden_NL)[set_L]
    np.fill_diagonal(visible_LL, False)
    return visible_LL
