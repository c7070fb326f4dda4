"""Spans of tokens to the tensors of a RetroMAE step (arXiv 2205.12035, section 3)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from revela_hub.data.text.masking import (
    Bools,
    Tokens,
    masked_tokens,
    replace_chosen,
    visibility,
    whole_word_masks,
)
from revela_hub.errors import UserError
from revela_hub.trainers.common.masked import MaskedCollator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decoding: TypeAlias = Literal["enhanced", "basic", "none"]

MASK_SETS = 128
"""Sets of hidden tokens that the rows of a passage share among them (the original: 128, later 256)."""

_IGNORED = -100


class RetroMAECollator(MaskedCollator):
    """Makes a batch of rows of `build_spans`: `[CLS] span [SEP]`, masked lightly for the encoder, heavily for the decoder.

    Encoder: whole words, `encoder_mask_ratio` of the tokens; of the chosen tokens 80% become `[MASK]`, 10% a random
    token that is not special (in the original: any token), and 10% stay. Labels are the chosen tokens.

    Decoder, `"enhanced"`: its input is the original span. Position i (a row of `decoder_attention_mask`) sees all keys
    but `decoder_mask_ratio` of the tokens, whole words again, and itself; the hidden words of each row are drawn from
    `min(L, 128)` sets of them. `[CLS]`, whose place the sentence vector takes, and `[SEP]` are seen by every row but
    their own; padding is seen by none, and sees nothing. Labels are all original tokens but the special ones.
    `"basic"`: a second mask of whole words, all of it `[MASK]`, and labels there; (B, L) attention mask.
    `"none"`: no decoder, and no tensors for it.

    What is drawn comes from `(seed, epoch, span)` alone, so that it differs from epoch to epoch, and is the same in
    whichever batch, process or worker a span is, and after a run is resumed; the encoder's part is the same for every
    `decoder`. The trainer sets `epoch` before it iterates; the number lies in shared memory, so that workers which live
    on from epoch to epoch see it too.

    Example: two spans, with `[PAD]` 0, `[CLS]` 1, `[SEP]` 2, `[MASK]` 3, then `a` 4, `b` 5, ... The word `b c` is
    hidden as a whole or not at all; the only word of the second span is hidden from every row.

    >>> from tokenizers import Tokenizer, models, processors
    >>> from transformers import PreTrainedTokenizerFast
    >>> words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]
    >>> model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[MASK]"))
    >>> ends = [("[CLS]", 1), ("[SEP]", 2)]
    >>> model.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    >>> special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    >>> collator = RetroMAECollator(PreTrainedTokenizerFast(tokenizer_object=model, **special))
    >>> batch = collator([
    ...     {"span": 0, "input_ids": [4, 5, 6, 7], "word_starts": [1, 1, 0, 1]},
    ...     {"span": 1, "input_ids": [8], "word_starts": [1]},
    ... ])
    >>> for name, tensor in batch.items():
    ...     print(name, tensor.int().tolist())
    encoder_input_ids [[1, 3, 5, 6, 7, 2], [1, 3, 2, 0, 0, 0]]
    encoder_attention_mask [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]
    encoder_labels [[-100, 4, -100, -100, 7, -100], [-100, 8, -100, -100, -100, -100]]
    decoder_input_ids [[1, 4, 5, 6, 7, 2], [1, 8, 2, 0, 0, 0]]
    decoder_attention_mask [[[0, 1, 0, 0, 0, 1], [1, 0, 0, 0, 1, 1], [1, 0, 0, 0, 1, 1],
                             [1, 0, 1, 0, 0, 1], [1, 1, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0]],
                            [[0, 0, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0],
                             [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]]
    decoder_labels [[-100, 4, 5, 6, 7, -100], [-100, 8, -100, -100, -100, -100]]

    All are int64 of shape (B, L), but `decoder_attention_mask` with enhanced decoding: bool, (B, L, L).
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        encoder_mask_ratio: float = 0.3,
        decoder_mask_ratio: float = 0.5,
        decoder: Decoding = "enhanced",
        max_length: int | None = None,
        pad_to_multiple_of: int = 1,
        seed: int = 0,
        epoch: int = 0,
    ) -> None:
        """Checks that the tokenizer has what masking needs.

        Args:
            tokenizer: The one that the spans were made with.
            encoder_mask_ratio: The share of tokens that the encoder has to predict, special ones counted in the total.
            decoder_mask_ratio: The share of tokens that are hidden from the decoder (enhanced: from each row).
            decoder: As in `RetroMAEConfig`.
            max_length: The tokens of a row that the model has positions for; None: not checked here.
            pad_to_multiple_of: Widths are rounded up to a multiple of it (8 suits tensor cores), `max_length` at most.
            seed: For everything that is drawn.
            epoch: For everything that is drawn.

        Raises:
            UserError: A ratio outside (0, 1); a tokenizer that is not one of a masked language model.
        """
        if decoder not in ("enhanced", "basic", "none"):
            raise UserError(f"decoder is {decoder}; it must be enhanced, basic or none")
        super().__init__(
            tokenizer,
            encoder_mask_ratio=encoder_mask_ratio,
            decoder_mask_ratio=decoder_mask_ratio,
            max_length=max_length,
            pad_to_multiple_of=pad_to_multiple_of,
            seed=seed,
            epoch=epoch,
        )
        self.decoder = decoder

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Makes a batch; see the class for its tensors.

        Args:
            features: Rows of `build_spans`.

        Raises:
            UserError: A span that is too long, or that another tokenizer made.
        """
        width = self.width(features, "input_ids", "span")
        batch = self._empty(len(features), width)
        epoch = self.epoch
        for number, row in enumerate(features):
            generator = np.random.default_rng((self.seed, epoch, row["span"]))
            length = len(row["input_ids"]) + 2
            tokens_L = np.full(length, self.vocabulary.first, dtype=np.int64)
            tokens_L[1:-1], tokens_L[-1] = row["input_ids"], self.vocabulary.last
            word_starts_L = np.ones(length, dtype=np.bool_)
            word_starts_L[1:-1] = row["word_starts"]
            if tokens_L.max() >= self.vocabulary.size:
                raise UserError(
                    f"span {row['span']} holds token {tokens_L.max()}, but the tokenizer has {self.vocabulary.size}: "
                    "make the spans with the tokenizer of the model"
                )
            self._fill({name: tensor[number] for name, tensor in batch.items()}, tokens_L, word_starts_L, generator)
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def _fill(
        self, row: dict[str, Any], tokens_L: Tokens, word_starts_L: Bools, generator: np.random.Generator
    ) -> None:
        """Masks one span, and writes it to the left of its row of each tensor."""
        vocabulary, length = self.vocabulary, len(tokens_L)
        maskable_L = ~vocabulary.is_special[tokens_L]
        # First, so that they are the same for every decoder.
        draws_L = generator.random(length)
        random_L = vocabulary.ordinary[generator.integers(len(vocabulary.ordinary), size=length)]
        sets = {"enhanced": min(length, MASK_SETS), "basic": 1, "none": 0}[self.decoder]
        sizes_N = np.full(1 + sets, masked_tokens(length, self.decoder_mask_ratio))
        sizes_N[0] = masked_tokens(length, self.encoder_mask_ratio)
        masks_NL = whole_word_masks(word_starts_L, maskable_L, sizes_N, generator)

        chosen_L = masks_NL[0]
        row["encoder_input_ids"][:length] = replace_chosen(tokens_L, chosen_L, draws_L, random_L, vocabulary.mask)
        row["encoder_attention_mask"][:length] = 1
        row["encoder_labels"][:length][chosen_L] = tokens_L[chosen_L]
        if self.decoder == "enhanced":
            set_L = generator.integers(sets, size=length)
            row["decoder_input_ids"][:length] = tokens_L
            row["decoder_attention_mask"][:length, :length] = visibility(masks_NL[1:], set_L)
            row["decoder_labels"][:length][maskable_L] = tokens_L[maskable_L]
        elif self.decoder == "basic":
            row["decoder_input_ids"][:length] = np.where(masks_NL[1], vocabulary.mask, tokens_L)
            row["decoder_attention_mask"][:length] = 1
            row["decoder_labels"][:length][masks_NL[1]] = tokens_L[masks_NL[1]]

    def _empty(self, rows: int, width: int) -> dict[str, np.ndarray]:
        """The tensors of a batch that is all padding."""
        shape = (rows, width)
        batch: dict[str, np.ndarray] = {}
        for part in ("encoder",) if self.decoder == "none" else ("encoder", "decoder"):
            batch[f"{part}_input_ids"] = np.full(shape, self.vocabulary.padding, dtype=np.int64)
            if part == "decoder" and self.decoder == "enhanced":
                batch[f"{part}_attention_mask"] = np.zeros((*shape, width), dtype=np.bool_)
            else:
                batch[f"{part}_attention_mask"] = np.zeros(shape, dtype=np.int64)
            batch[f"{part}_labels"] = np.full(shape, _IGNORED, dtype=np.int64)
        return batch
