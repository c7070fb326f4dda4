"""A tokenizer that ends every text with the end-of-sequence token.

Decoder embedders read their vector off the last token, so every text must end with the same one. Adding its string in
Python would lose it whenever a text is cut; the tokenizer's own post-processor is counted before truncation, is stored
in tokenizer.json, and is applied by every reader of that file (transformers, text-embeddings-inference, vLLM).
"""

from __future__ import annotations

import copy
import json
from typing import Any

from tokenizers import processors
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from revela_hub.errors import UserError

_PROBE = "a"
# Their positions begin after the padding token's id, so that the table of 514 has room for 512 tokens.
_COUNTING_FROM_PADDING = {
    "camembert",
    "data2vec-text",
    "longformer",
    "mpnet",
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
}


def ends_with_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer itself puts its end-of-sequence token after every text."""
    return tokenizer.eos_token_id is not None and tokenizer(_PROBE)["input_ids"][-1:] == [tokenizer.eos_token_id]


def with_eos(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer that ends every text with EOS, truncated or not, and pads on the right.

    What the post-processor did before (a BOS token, byte offsets) is kept. A tokenizer that already ends texts with EOS
    is copied as it is, so the function may be applied twice. A tokenizer without padding token pads with EOS: the
    attention mask, not the token, tells padding from text.

    Raises:
        UserError: the tokenizer has no end-of-sequence token, or is not a fast tokenizer.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, which last-token pooling reads: "
            "set `eos_token` in its tokenizer_config.json, or use mean pooling"
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no tokenizer.json: convert it to a fast tokenizer"
        )
    tokenizer = padding_right(tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not ends_with_eos(tokenizer):
        backend = tokenizer.backend_tokenizer
        before = None if backend.post_processor is None else json.loads(backend.post_processor.__getstate__())
        after = processors.Sequence([])
        after.__setstate__(json.dumps(_ending_with(before, tokenizer.eos_token, tokenizer.eos_token_id)).encode())
        backend.post_processor = after
    return tokenizer


def never_without_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer; a copy that ends texts with EOS if it adds nothing of its own.

    The vector of a text is read off its tokens: without any, as an empty text has then, there is none. A tokenizer that has
    no EOS, or no tokenizer.json, is returned as it is.
    """
    if tokenizer("")["input_ids"] or tokenizer.eos_token_id is None or not tokenizer.is_fast:
        return tokenizer
    return with_eos(tokenizer)


def text_length(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, wanted: int) -> int:
    """The tokens that are kept of a text: as many as are wanted, if tokenizer and model have room for them.

    Args:
        config: of the model.
        tokenizer: of the model.
        wanted: at most so many.
    """
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", wanted)
    if text_config.model_type in _COUNTING_FROM_PADDING:
        positions -= (text_config.pad_token_id or 0) + 1
    return int(min(wanted, tokenizer.model_max_length, positions))


def padding_right(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer that pads and truncates on the right, and is saved so."""
    tokenizer = copy.deepcopy(tokenizer)
    for side in ("padding_side", "truncation_side"):
        setattr(tokenizer, side, "right")
        tokenizer.init_kwargs[side] = "right"  # save_pretrained writes only what is in there
    return tokenizer


def _ending_with(post_processor: dict[str, Any] | None, token: str, token_id: int) -> dict[str, Any]:
    """Return the post-processor (in tokenizer.json's form) with the token appended to its template, or to a new one.

    A second template after the first one would do for single texts, but the library aborts on pairs then.
    """
    steps: list[dict[str, Any]] = []
    if post_processor is not None:
        steps = post_processor["processors"] if post_processor["type"] == "Sequence" else [post_processor]
    template = next((step for step in steps if step["type"] == "TemplateProcessing"), None)
    if template is None:
        first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
        template = {"type": "TemplateProcessing", "single": [first], "pair": [first, second], "special_tokens": {}}
        steps = [*steps, template]
    end_first, end_second = ({"SpecialToken": {"id": token, "type_id": number}} for number in (0, 1))
    template["single"].append(end_first)
    first_text = next(
        place for place, piece in enumerate(template["pair"]) if piece.get("Sequence", {}).get("id") == "A"
    )
    template["pair"].insert(first_text + 1, end_first)
    template["pair"].append(end_second)
    template["special_tokens"][token] = {"id": token, "ids": [token_id], "tokens": [token]}
    return {"type": "Sequence", "processors": steps}
