"""Arguments, rows and collator of RetroMAE: spans of tokens to the tensors of a training step (arXiv 2205.12035, section 3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.text.masking import visibility
from revela_hub.data.text.spans import MIN_TOKENS, SpanSettings, build_spans
from revela_hub.options import option, values_of
from revela_hub.ranges import PositiveInt, Share, TextLength
from revela_hub.trainers.base.arguments import WARMUP, WEIGHT_DECAY, RunArguments, StreamedTextArguments, text_rows
from revela_hub.trainers.base.masked import MaskedCollator

MASK_SETS = 128
"""Number of sets of hidden tokens that the rows of a passage share (the original: 128, later 256)."""


class RetroMAECollator(MaskedCollator):
    """Make batches of rows of `build_spans`: `[CLS] span [SEP]`, masked lightly for the encoder, heavily for the decoder.

    Encoder: whole words are masked, `encoder_mask_ratio` of the tokens. Of the masked tokens, 80% become `[MASK]`, 10% a random
    token that is not special (in the original: any token), and 10% stay. Labels are the masked tokens.

    Decoder, `"enhanced"`: the input is the original span. Position i (a row of `decoder_attention_mask`) attends to all keys
    except itself and `decoder_mask_ratio` of the tokens, again whole words; the hidden words of a row are drawn from
    `min(L, 128)` sets. All rows attend to `[CLS]`, which the sentence vector replaces, and to `[SEP]`, except their own; padding
    neither attends nor is attended to. Labels are all original tokens except special ones.
    `"basic"`: a second mask of whole words, all replaced by `[MASK]`, with labels there; the attention mask is (B, L).
    `"none"`: no tensors for a decoder.

    The masks of the encoder are the same for every `decoder`. The trainer sets `epoch` before each epoch.

    Example: two spans, with `[PAD]` 0, `[CLS]` 1, `[SEP]` 2, `[MASK]` 3, then `a` 4, `b` 5, ... The word `b c` is either hidden
    as a whole or visible; the only word of the second span is hidden from every row.

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
    decoder_attention_mask [[[0, 0, 1, 1, 0, 1], [1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 1],
                             [1, 1, 0, 0, 0, 1], [1, 1, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0]],
                            [[0, 0, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0],
                             [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]]
    decoder_labels [[-100, 4, 5, 6, 7, -100], [-100, 8, -100, -100, -100, -100]]

    All are int64 of shape (B, L), but `decoder_attention_mask` with enhanced decoding: bool, (B, L, L).
    """

    columns = ("span", "input_ids", "word_starts")
    decoders = ("enhanced", "basic", "none")

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch of rows of `build_spans`; the class describes its tensors."""
        rows, width = len(features), self.width(features, "input_ids")
        batch = self.padding(rows, width, "encoder_")
        if self.decoder != "none":
            batch |= self.padding(rows, width, "decoder_")
        if self.decoder == "enhanced":
            batch["decoder_attention_mask"] = np.zeros((rows, width, width), dtype=np.bool_)
        for number, row in enumerate(features):
            self._fill({name: tensor[number] for name, tensor in batch.items()}, row)
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def _fill(self, own: dict[str, Any], row: dict[str, Any]) -> None:
        """Mask a span, and write it to the left of its row of each tensor."""
        generator = np.random.default_rng((self.seed, self.epoch, row["span"]))
        tokens_L = self.tokens(row["input_ids"])
        length = len(tokens_L)
        sets = {"enhanced": min(length, MASK_SETS), "basic": 1, "none": 0}[self.decoder]
        ratios = [self.encoder_mask_ratio] + [self.decoder_mask_ratio] * sets
        masked_L, masks_NL = self.mask_words(tokens_L, row["word_starts"], ratios, generator)
        own["encoder_input_ids"][:length] = masked_L
        own["encoder_attention_mask"][:length] = 1
        own["encoder_labels"][:length][masks_NL[0]] = tokens_L[masks_NL[0]]
        if self.decoder == "enhanced":
            set_L = generator.integers(sets, size=length)
            maskable_L = ~self.vocabulary.is_special[tokens_L]
            own["decoder_input_ids"][:length] = tokens_L
            own["decoder_attention_mask"][:length, :length] = visibility(masks_NL[1:], set_L)
            own["decoder_labels"][:length][maskable_L] = tokens_L[maskable_L]
        elif self.decoder == "basic":
            own["decoder_input_ids"][:length] = np.where(masks_NL[1], self.vocabulary.mask, tokens_L)
            own["decoder_attention_mask"][:length] = 1
            own["decoder_labels"][:length][masks_NL[1]] = tokens_L[masks_NL[1]]


@dataclass
class RetroMAETrainingArguments(RunArguments):
    """`TrainingArguments` with the paper's defaults; a row of the data set is a span of text."""

    learning_rate: float = option(1e-4, "Peak learning rate.")
    per_device_train_batch_size: int = option(32, "Number of spans per device and forward pass.")
    num_train_epochs: float = option(8.0, "Number of epochs; spans are masked again in each.")
    warmup_steps: float = option(0.1, WARMUP)
    weight_decay: float = option(0.01, WEIGHT_DECAY)


@dataclass
class RetroMAEDataArguments(StreamedTextArguments):
    """Data of a RetroMAE run. The defaults are the paper's, as far as it gives them."""

    option_group = "data"

    max_length: TextLength = option(512, "Maximum number of tokens per span, including [CLS] and [SEP].")
    min_tokens: PositiveInt = option(MIN_TOKENS, "Skip spans with fewer tokens, such as the ends of documents.")
    encoder_mask_ratio: Share = option(
        0.3, "Fraction of tokens that the encoder has to predict, masked as whole words."
    )
    decoder_mask_ratio: Share = option(0.5, "Fraction of tokens that are hidden from the decoder, as whole words.")
    max_spans: PositiveInt | None = option(None, "Maximum number of spans.")


def load_spans(
    arguments: RetroMAEDataArguments, tokenizer: PreTrainedTokenizerBase, held_out: Path | None = None
) -> tuple[Dataset | IterableDataset, ReadReport]:
    """Read the sources, tokenize and pack them; return spans, with the columns of `build_spans`, and a report."""
    return text_rows(arguments, build_spans, held_out, tokenizer=tokenizer, **values_of(SpanSettings, arguments))
