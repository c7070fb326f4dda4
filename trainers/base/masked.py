"""Base classes of the collators and trainers that mask whole words."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, set_seed

from revela_hub.data.sources.source import Source
from revela_hub.data.text.masking import Bools, Tokens, Vocabulary, masked_tokens, replace_chosen, whole_word_masks
from revela_hub.errors import UserError
from revela_hub.trainers.base.adapters import merged_copy
from revela_hub.trainers.base.arguments import RunArguments
from revela_hub.trainers.base.callbacks import SharedEpoch
from revela_hub.trainers.base.models import default_arguments, tokenizer_of
from revela_hub.trainers.base.rows import prepare_datasets, prepared_rows
from revela_hub.trainers.base.trainer import MethodTrainer

IGNORED = -100
SPECIAL_TOKENS = 2
"""Number of special tokens around a text: the first and the last."""


class MaskedCollator(SharedEpoch):
    """Base of the collators that mask whole words.

    Random numbers depend only on `(seed, epoch, row)`: they differ between epochs, but not between batches, processes or
    workers, or after a run is resumed. The epoch is kept in shared memory, so that persistent workers see it, too.

    Args:
        tokenizer: tokenizer that the rows were made with.
        decoder: one of the class's `decoders`, as in the model's configuration; by default the first.
        encoder_mask_ratio: fraction of tokens that the encoder predicts, special tokens included in the total.
        decoder_mask_ratio: fraction of tokens hidden from the decoder.
        max_length: maximum tokens per row, for which the model has positions; None to skip the check.
        pad_to_multiple_of: widths are rounded up to a multiple of this (8 suits tensor cores), up to `max_length`.
        seed: seed of the random numbers.
        epoch: epoch of the random numbers.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    text_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of rows that the collator tokenizes itself, if the method has such rows."""
    text_length: int | None = None
    """Maximum number of tokens of these texts."""
    decoders: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        decoder: str | None = None,
        encoder_mask_ratio: float = 0.3,
        decoder_mask_ratio: float = 0.5,
        max_length: int | None = None,
        pad_to_multiple_of: int = 1,
        seed: int = 0,
        epoch: int = 0,
    ) -> None:
        super().__init__(epoch)
        decoder = self.decoders[0] if decoder is None else decoder
        if decoder not in self.decoders:
            raise UserError(f"decoder must be one of {', '.join(self.decoders)}, got {decoder}")
        if not (0 <= encoder_mask_ratio <= 1 and 0 <= decoder_mask_ratio <= 1):
            raise UserError(f"mask ratios are from 0 to 1, not {encoder_mask_ratio} and {decoder_mask_ratio}")
        self.vocabulary = Vocabulary.of(tokenizer)
        self.decoder = decoder
        self.encoder_mask_ratio, self.decoder_mask_ratio = encoder_mask_ratio, decoder_mask_ratio
        self.max_length, self.pad_to_multiple_of = max_length, pad_to_multiple_of
        self.seed = seed

    def width(self, features: Sequence[dict[str, Any]], ids: str) -> int:
        """Return the number of tokens of the longest text of a batch, special tokens included, rounded up.

        `ids` is the column with the tokens.
        """
        length = max(len(row[ids]) for row in features) + SPECIAL_TOKENS
        width = -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of
        return width if self.max_length is None else min(width, self.max_length)

    def padding(self, rows: int, width: int, prefix: str, *, labels: bool = True) -> dict[str, np.ndarray]:
        """Return the tensors `<prefix>input_ids`, `_attention_mask` and `_labels` of a batch that is all padding."""
        batch = {
            f"{prefix}input_ids": np.full((rows, width), self.vocabulary.padding, dtype=np.int64),
            f"{prefix}attention_mask": np.zeros((rows, width), dtype=np.int64),
        }
        return batch | ({f"{prefix}labels": np.full((rows, width), IGNORED, dtype=np.int64)} if labels else {})

    def tokens(self, ids: Sequence[int]) -> Tokens:
        """Return the tokens of a text with the first and last special token."""
        return np.array([self.vocabulary.first, *ids, self.vocabulary.last], dtype=np.int64)

    def mask_words(
        self, tokens_L: Tokens, word_starts: Sequence[int], ratios: Sequence[float], generator: np.random.Generator
    ) -> tuple[Tokens, np.ndarray]:
        """Draw masks of whole words, one for each ratio, and apply the first of them.

        Return the tokens (80% `[MASK]`, 10% random tokens that are not special, 10% unchanged), and the masks (ratios, L).
        `tokens_L` includes the special tokens, `word_starts` does not.
        """
        vocabulary, length = self.vocabulary, len(tokens_L)
        word_starts_L: Bools = np.ones(length, dtype=np.bool_)
        word_starts_L[1:-1] = word_starts
        # Drawn before the masks, so that they are the same for every decoder.
        draws_L = generator.random(length)
        random_L = vocabulary.ordinary[generator.integers(len(vocabulary.ordinary), size=length)]
        sizes = np.array([masked_tokens(length, ratio) for ratio in ratios])
        masks_NL = whole_word_masks(word_starts_L, ~vocabulary.is_special[tokens_L], sizes, generator)
        return replace_chosen(tokens_L, masks_NL[0], draws_L, random_L, vocabulary.mask), masks_NL


class MaskedTrainer(MethodTrainer):
    """Base of the trainers of masked auto-encoders, whose models return several losses; logs each of them.

    The arguments are described in the method's trainer, the class variables here: `load(name_or_model, tokenizer=...,
    **model_init_kwargs)` makes a `checkpoint` of a `models` and a tokenizer; `build(source, tokenizer, max_length=..., streaming=...)`
    prepares raw text; `collated` are the training arguments that the collator gets, `losses` those in the model's output.
    """

    models: ClassVar[type[Any]]
    load: ClassVar[Callable[..., Any]]
    checkpoint: ClassVar[Callable[..., Any]]
    arguments: ClassVar[type[RunArguments]]
    build: ClassVar[Callable[..., Any]]
    collators: ClassVar[type[MaskedCollator]]
    collated: ClassVar[tuple[str, ...]] = ()
    losses: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        model: Any,
        args: RunArguments | None = None,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        max_length: int | None = None,
        encoder_mask_ratio: float | None = None,
        decoder_mask_ratio: float | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or default_arguments(self.arguments, model, self.method)
        if not isinstance(model, self.models):
            set_seed(args.seed)  # as the Trainer does, but before the decoder is initialised
            start = self.load(model, **{"tokenizer": processing_class} | (model_init_kwargs or {}))
            model, processing_class = start.model, start.tokenizer
        tokenizer = tokenizer_of(model, processing_class)
        config = model.config
        length = min(max_length or config.max_seq_length, model.max_length)

        def built(source: Source, *, streaming: bool = False) -> Any:
            config.max_seq_length = length  # the published encoder reads texts as long as those in training
            return self.build(source, tokenizer, max_length=length, streaming=streaming)

        def prepared(rows: Any) -> Any:
            texts = self.collators.text_columns
            columns = texts if texts and {*texts} <= {*getattr(rows, "column_names", [])} else self.collators.columns
            return prepared_rows(rows, columns, args, built)

        prepare_datasets(kwargs, prepared)
        given: dict[str, Any] = {"encoder_mask_ratio": encoder_mask_ratio, "decoder_mask_ratio": decoder_mask_ratio}
        given = {name: ratio for name, ratio in given.items() if ratio is not None}
        given |= {"decoder": config.decoder, "max_length": model.max_length, "seed": args.seed, "pad_to_multiple_of": 8}
        self.collator = self.collators(tokenizer, **given, **{name: getattr(args, name) for name in self.collated})
        self.collator.text_length = length
        super().__init__(model=model, args=args, data_collator=self.collator, processing_class=tokenizer, **kwargs)
        self.label_names = []  # a batch has those of some decoders only; an evaluation computes the loss anyway

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the sum of the losses, and keep each of them for the next log."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            for name in self.losses:
                if outputs.get(name) is not None:
                    self.add_metric(name, outputs[name].mean())
        return (loss, outputs) if return_outputs else loss

    def exportable(self) -> Any:
        """Return the encoder with its decoder, as the method's loader does."""
        return self.checkpoint(merged_copy(self.accelerator.unwrap_model(self.model)), self.processing_class)
