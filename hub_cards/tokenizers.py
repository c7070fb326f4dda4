"""Tokenizers that end every text with the end-of-sequence token (EOS).

The embedding of a decoder is that of the last token, so every text must end with the same token. The post-processor of the
tokenizer adds EOS even if a text is truncated, and all libraries apply it, because it is stored in tokenizer.json.
"""

import copy
import json
from typing import Any

from tokenizers import processors
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from revela_hub.errors import UserError
from revela_hub.files import scratch_folder
from revela_hub.retrieval.encoder import text_positions


def ends_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer ends every text with EOS or another special token, such as Qwen3-Embedding's `<|endoftext|>`."""
    return bool(tokenizer("a")["input_ids"][-1:] != tokenizer("a", add_special_tokens=False)["input_ids"][-1:])


def uses_chat_template(model: Any) -> bool:
    """Return whether a sentence-transformers model puts texts into a chat template."""
    # Without padding, for which the tokenizer of a decoder may have no token.
    tokens = model.preprocess(["a"], processing_kwargs={"text": {"padding": False}})
    return bool(tokens["input_ids"][0].tolist() != model.tokenizer("a")["input_ids"])


def with_eos(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer that ends every text with EOS, truncated or not, and pads on the right.

    The post-processor keeps its other steps (a BOS token, byte offsets), and its own token at the end. A tokenizer without
    a padding token pads with EOS; the attention mask distinguishes padding from text.
    """
    ended = ends_texts(tokenizer)
    if tokenizer.eos_token_id is None and not ended:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, which last-token pooling requires:"
            " set `eos_token` in its tokenizer_config.json, or use mean pooling"
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no tokenizer.json: convert it to a fast tokenizer"
        )
    tokenizer = padding_right(tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not ended:
        backend = tokenizer.backend_tokenizer
        before = None if backend.post_processor is None else json.loads(backend.post_processor.__getstate__())
        after = processors.Sequence([])
        after.__setstate__(json.dumps(_ending_with(before, tokenizer.eos_token, tokenizer.eos_token_id)).encode())
        backend.post_processor = after
        with scratch_folder("tokenizer") as folder:
            tokenizer.save_pretrained(folder)
            SameTokenizer = type(tokenizer)  # noqa: N806 (a class)
            kept = ends_texts(SameTokenizer.from_pretrained(folder))
        if not kept:  # the classes of GPT-NeoX, Code Llama and XGLM make their own post-processor when they are loaded
            names = tokenizer.model_input_names
            tokenizer = plain(tokenizer, chat_template=tokenizer.chat_template, model_input_names=names)
    return tokenizer


def plain(tokenizer: PreTrainedTokenizerBase, **options: Any) -> PreTrainedTokenizerBase:
    """Return a tokenizer of the plain class, which loads its tokenizer.json without changes; it pads and truncates on the right."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        model_max_length=tokenizer.model_max_length,
        padding_side="right",
        truncation_side="right",
        **options,
        **tokenizer.special_tokens_map,
    )


def ensure_empty_text_has_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer that adds EOS, if an empty text has no tokens otherwise.

    Without tokens there is no embedding. Tokenizers without EOS or tokenizer.json are returned unchanged.
    """
    if tokenizer("")["input_ids"] or tokenizer.eos_token_id is None or not tokenizer.is_fast:
        return tokenizer
    return with_eos(tokenizer)


def text_length(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, wanted: int) -> int:
    """Return the maximum length in tokens: `wanted`, or the limit of the tokenizer or the model if that is lower."""
    positions = text_positions(config.get_text_config())
    return int(min(wanted, tokenizer.model_max_length, wanted if positions is None else positions))


def padding_right(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer that pads and truncates on the right, also after it is saved."""
    tokenizer = copy.deepcopy(tokenizer)
    for side in ("padding_side", "truncation_side"):
        setattr(tokenizer, side, "right")
        tokenizer.init_kwargs[side] = "right"  # save_pretrained writes only init_kwargs
    return tokenizer


def _ending_with(post_processor: dict[str, Any] | None, token: str, token_id: int) -> dict[str, Any]:
    """Return the post-processor, in the format of tokenizer.json, with the token added to its template.

    A second template would work for single texts, but not for pairs.
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
