"""Collator of CoT-MoTE: texts and contextual spans to tensors (arXiv 2304.10195; masks as in CoT-MAE, 2208.07670)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.trainers.base.masked import MaskedCollator


class CoTMoTECollator(MaskedCollator):
    """Make batches of rows of `build_contexts`: masked texts, and the contextual spans that the decoder generates.

    Text: whole words are masked, `encoder_mask_ratio` of the tokens. Of the masked tokens, 80% become `[MASK]`, 10% a random
    token that is not special, and 10% stay. Labels are the masked tokens. Span: unchanged for an `"ar"` decoder; masked in the
    same way, with `decoder_mask_ratio`, for `"ae"`; not in the batch for `"none"`.

    The trainer sets `epoch` before each epoch.

    Example: a passage with a neighbouring span, and a query with its passage; `[PAD]` is 0, `[CLS]` 1, `[SEP]` 2, `[MASK]` 3,
    then `a` 4, `b` 5, ... The word `b c` is either masked as a whole or visible.

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

    All are int64; `expert` is 0 for a query, 1 for a passage. With `switch_experts`, an ablation, it is the other way round.
    """

    columns = ("row", "expert", "input_ids", "word_starts", "context_ids", "context_word_starts")
    decoders = ("ar", "ae", "none")

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        decoder_mask_ratio: float = 0.45,
        switch_experts: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, decoder_mask_ratio=decoder_mask_ratio, **options)
        self.switch_experts = switch_experts

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch of rows of `build_contexts`; the class describes its tensors.

        Raises:
            UserError: a column is missing, such as `expert`; a text is too long, or was made with another tokenizer.
        """
        if missing := [name for name in self.columns if name not in features[0]]:
            which = " (0 for a query, 1 for a passage)" if missing[0] == "expert" else ""
            raise UserError(f"the training data has no column {missing[0]!r}{which}: make it with build_contexts")
        batch = self.padding(len(features), self.width(features, "input_ids", "row"), "")
        if self.decoder != "none":
            width = self.width(features, "context_ids", "row")
            batch |= self.padding(len(features), width, "decoder_", labels=self.decoder == "ae")
        for number, row in enumerate(features):
            generator = np.random.default_rng((self.seed, self.epoch, row["row"]))
            own = {name: tensor[number] for name, tensor in batch.items()}
            tokens_L = self.tokens(row, "input_ids", "row")
            self._fill(own, "", tokens_L, row["word_starts"], self.encoder_mask_ratio, generator)
            if self.decoder != "none":
                ratio = self.decoder_mask_ratio if self.decoder == "ae" else None
                tokens_L = self.tokens(row, "context_ids", "row")
                self._fill(own, "decoder_", tokens_L, row["context_word_starts"], ratio, generator)
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        expert_B = torch.tensor([row["expert"] for row in features], dtype=torch.long)
        tensors["expert"] = 1 - expert_B if self.switch_experts else expert_B
        return tensors

    def _fill(
        self,
        own: dict[str, Any],
        prefix: str,
        tokens_L: np.ndarray,
        word_starts: Sequence[int],
        ratio: float | None,
        generator: np.random.Generator,
    ) -> None:
        """Write a text to the left of its row of the tensors with a prefix, masked if there is a ratio."""
        length = len(tokens_L)
        own[f"{prefix}attention_mask"][:length] = 1
        if ratio is None:
            own[f"{prefix}input_ids"][:length] = tokens_L
            return
        masked_L, (mask_L,) = self.mask_words(tokens_L, word_starts, [ratio], generator)
        own[f"{prefix}input_ids"][:length] = masked_L
        own[f"{prefix}labels"][:length][mask_L] = tokens_L[mask_L]
