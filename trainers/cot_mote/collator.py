"""Texts with contextual spans to the tensors of a CoT-MoTE step (arXiv 2304.10195; masks as in CoT-MAE, 2208.07670)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from revela_hub.data.text.masking import (
    Bools,
    Tokens,
    masked_tokens,
    replace_chosen,
    whole_word_masks,
)
from revela_hub.errors import UserError
from revela_hub.trainers.common.masked import MaskedCollator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decoding: TypeAlias = Literal["ar", "ae", "none"]
COLUMNS = ("row", "expert", "input_ids", "word_starts", "context_ids", "context_word_starts")

_IGNORED = -100


class CoTMoTECollator(MaskedCollator):
    """Makes a batch of rows of `build_contexts`: a masked text, the contextual span that is written from its vector.

    The text: whole words, `encoder_mask_ratio` of the tokens; of the chosen ones 80% become `[MASK]`, 10% a random token
    that is not special, and 10% stay. Labels are the chosen tokens. The span for an `"ar"` decoder: as it is; for `"ae"`:
    masked in the same way, `decoder_mask_ratio` of it; for `"none"`: not in the batch.

    What is drawn comes from `(seed, epoch, row)` alone, so that it differs from epoch to epoch, and is the same in
    whichever batch, process or worker a row is, and after a run is resumed. The trainer sets `epoch` before it iterates;
    the number lies in shared memory, so that workers which live on from epoch to epoch see it too.

    Example: a passage with its neighbour, and a query with its passage; `[PAD]` is 0, `[CLS]` 1, `[SEP]` 2, `[MASK]` 3,
    then `a` 4, `b` 5, ... The word `b c` is masked as a whole or not at all.

    >>> from tokenizers import Tokenizer, models, processors
    >>> from transformers import PreTrainedTokenizerFast
    >>> words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]
    >>> model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[MASK]"))
    >>> ends = [("[CLS]", 1), ("[SEP]", 2)]
    >>> model.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    >>> special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    >>> collator = CoTMoTECollator(PreTrainedTokenizerFast(tokenizer_object=model, **special))
    >>> batch = collator([
    ...     {"row": 0, "expert": 1, "input_ids": [4, 5, 6, 7], "word_starts": [1, 1, 0, 1],
    ...      "context_ids": [8, 9], "context_word_starts": [1, 1]},
    ...     {"row": 1, "expert": 0, "input_ids": [8], "word_starts": [1],
    ...      "context_ids": [4, 5, 6], "context_word_starts": [1, 1, 0]},
    ... ])
    >>> for name, tensor in batch.items():
    ...     print(name, tensor.tolist())
    input_ids [[1, 3, 5, 6, 7, 2], [1, 3, 2, 0, 0, 0]]
    attention_mask [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]
    labels [[-100, 4, -100, -100, 7, -100], [-100, 8, -100, -100, -100, -100]]
    decoder_input_ids [[1, 8, 9, 2, 0], [1, 4, 5, 6, 2]]
    decoder_attention_mask [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    expert [1, 0]

    All are int64; `expert` is 0 for a query, 1 for a passage.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        encoder_mask_ratio: float = 0.3,
        decoder_mask_ratio: float = 0.45,
        decoder: Decoding = "ar",
        switch_experts: bool = False,
        max_length: int | None = None,
        pad_to_multiple_of: int = 1,
        seed: int = 0,
        epoch: int = 0,
    ) -> None:
        """Checks that the tokenizer has what masking needs.

        Args:
            tokenizer: The one that the rows were made with.
            encoder_mask_ratio: The share of a text's tokens that has to be predicted, special ones counted in the total.
            decoder_mask_ratio: The same of a span, with an `"ae"` decoder.
            decoder: As in `CoTMoTEConfig`.
            switch_experts: Queries through the passage expert and passages through the query expert, for the ablation.
            max_length: The tokens of a text that the model has positions for; None: not checked here.
            pad_to_multiple_of: Widths are rounded up to a multiple of it (8 suits tensor cores), `max_length` at most.
            seed: For everything that is drawn.
            epoch: For everything that is drawn.

        Raises:
            UserError: A ratio outside (0, 1); a tokenizer that is not one of a masked language model.
        """
        if decoder not in ("ar", "ae", "none"):
            raise UserError(f"decoder is {decoder}; it must be ar, ae or none")
        super().__init__(
            tokenizer,
            encoder_mask_ratio=encoder_mask_ratio,
            decoder_mask_ratio=decoder_mask_ratio,
            max_length=max_length,
            pad_to_multiple_of=pad_to_multiple_of,
            seed=seed,
            epoch=epoch,
        )
        self.decoder, self.switch_experts = decoder, switch_experts

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Makes a batch; see the class for its tensors.

        Args:
            features: Rows of `build_contexts`.

        Raises:
            UserError: A row without a column, among them the one that says whose text it is; a text that is too long, or
                that another tokenizer made.
        """
        if missing := [name for name in COLUMNS if name not in features[0]]:
            which = " (0 for a query, 1 for a passage)" if missing[0] == "expert" else ""
            raise UserError(f"the training data has no column {missing[0]!r}{which}: make it with build_contexts")
        batch = self._empty(features, "input_ids", "")
        if self.decoder != "none":
            batch |= self._empty(features, "context_ids", "decoder_")
        for number, row in enumerate(features):
            generator = np.random.default_rng((self.seed, self.epoch, row["row"]))
            own = {name: tensor[number] for name, tensor in batch.items()}
            self._fill(own, "", row, "input_ids", "word_starts", self.encoder_mask_ratio, generator)
            if self.decoder != "none":
                ratio = self.decoder_mask_ratio if self.decoder == "ae" else None
                self._fill(own, "decoder_", row, "context_ids", "context_word_starts", ratio, generator)
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        expert_B = torch.tensor([row["expert"] for row in features], dtype=torch.long)
        tensors["expert"] = 1 - expert_B if self.switch_experts else expert_B
        return tensors

    def _fill(
        self,
        own: dict[str, Any],
        prefix: str,
        row: dict[str, Any],
        ids: str,
        starts: str,
        ratio: float | None,
        generator: np.random.Generator,
    ) -> None:
        """Writes one text to the left of its row of the tensors with this prefix, masked if there is a ratio."""
        vocabulary = self.vocabulary
        tokens_L: Tokens = np.array([vocabulary.first, *row[ids], vocabulary.last])
        length = len(tokens_L)
        if tokens_L.max() >= vocabulary.size:
            raise UserError(
                f"row {row['row']} holds token {tokens_L.max()}, but the tokenizer has {vocabulary.size}: make the rows"
                " with the tokenizer of the model"
            )
        own[f"{prefix}attention_mask"][:length] = 1
        if ratio is None:
            own[f"{prefix}input_ids"][:length] = tokens_L
            return
        word_starts_L: Bools = np.ones(length, dtype=np.bool_)
        word_starts_L[1:-1] = row[starts]
        draws_L = generator.random(length)
        random_L = vocabulary.ordinary[generator.integers(len(vocabulary.ordinary), size=length)]
        maskable_L = ~vocabulary.is_special[tokens_L]
        (chosen_L,) = whole_word_masks(word_starts_L, maskable_L, [masked_tokens(length, ratio)], generator)
        own[f"{prefix}input_ids"][:length] = replace_chosen(tokens_L, chosen_L, draws_L, random_L, vocabulary.mask)
        own[f"{prefix}labels"][:length][chosen_L] = tokens_L[chosen_L]

    def _empty(self, features: Sequence[dict[str, Any]], ids: str, prefix: str) -> dict[str, np.ndarray]:
        """The tensors of a batch that is all padding."""
        shape = (len(features), self.width(features, ids, "row"))
        batch = {
            f"{prefix}input_ids": np.full(shape, self.vocabulary.padding, dtype=np.int64),
            f"{prefix}attention_mask": np.zeros(shape, dtype=np.int64),
        }
        if not prefix or self.decoder == "ae":
            batch[f"{prefix}labels"] = np.full(shape, _IGNORED, dtype=np.int64)
        return batch
