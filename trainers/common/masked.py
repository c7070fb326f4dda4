"""What the collators of masked text share: the vocabulary, checked ratios, widths, and an epoch that workers see."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from revela_hub.data.text.masking import Vocabulary, check_mask_ratio
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL = 2
"""Tokens that are put around a text: the first and the last."""


class MaskedCollator:
    """Base of the collators that mask whole words.

    What they draw comes from `(seed, epoch, row)` alone. The number of the epoch lies in shared memory, so that workers
    which live on from epoch to epoch see it too.

    Args:
        tokenizer: The one that the rows were made with.
        encoder_mask_ratio: The share of tokens that the encoder has to predict, special ones counted in the total.
        decoder_mask_ratio: The share of tokens that are hidden from the decoder.
        max_length: The tokens of a row that the model has positions for; None: not checked here.
        pad_to_multiple_of: Widths are rounded up to a multiple of it (8 suits tensor cores), `max_length` at most.
        seed: For everything that is drawn.
        epoch: For everything that is drawn.

    Raises:
        UserError: A ratio outside (0, 1); a tokenizer that is not one of a masked language model.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        encoder_mask_ratio: float,
        decoder_mask_ratio: float,
        max_length: int | None,
        pad_to_multiple_of: int,
        seed: int,
        epoch: int,
    ) -> None:
        check_mask_ratio("encoder_mask_ratio", encoder_mask_ratio)
        check_mask_ratio("decoder_mask_ratio", decoder_mask_ratio)
        self.vocabulary = Vocabulary.of(tokenizer)
        self.encoder_mask_ratio, self.decoder_mask_ratio = encoder_mask_ratio, decoder_mask_ratio
        self.max_length, self.pad_to_multiple_of = max_length, pad_to_multiple_of
        self.seed = seed
        self._epoch = torch.tensor(epoch).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch that the next batches belong to."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def width(self, features: Sequence[dict[str, Any]], ids: str, number: str) -> int:
        """The tokens of the longest text in the column `ids`, special ones counted, rounded up.

        Args:
            features: The rows of a batch.
            ids: The column.
            number: The column with a row's number, which is also what a row is called.

        Raises:
            UserError: A text is longer than `max_length`.
        """
        longest = max(features, key=lambda row: len(row[ids]))
        length = len(longest[ids]) + SPECIAL
        if self.max_length is not None and length > self.max_length:
            raise UserError(
                f"{number} {longest[number]} has {length} tokens with the special ones, but the encoder has positions for"
                f" {self.max_length}: make the {number}s with a smaller max_length"
            )
        width = -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of
        return width if self.max_length is None else min(width, self.max_length)
