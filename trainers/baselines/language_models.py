"""Load the language models of the baselines: REPLUG's teacher, and the reader of RA-IT and RA-DIT."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.errors import UserError, loading
from revela_hub.loading import refuse_pickles
from revela_hub.modeling.backbones import check_backbone, check_mask, checking, load_backbone
from revela_hub.trainers.base.models import ModelLike, name_of, tokenizer_of, unwrapped
from revela_hub.trainers.base.weights import is_encoder


@dataclass
class LanguageModel:
    """A decoder and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_lm(
    lm: ModelLike, *, tokenizer: PreTrainedTokenizerBase | None = None, trust_remote_code: bool = False
) -> LanguageModel:
    """Load a decoder in float32; a loaded model is returned unchanged.

    Raises:
        UserError: the model cannot be loaded, or is an encoder.
    """
    given, name = unwrapped(lm), name_of(lm)
    with loading(f"cannot load the language model {name!r}", name):
        _refuse_encoder(given, name, trust_remote_code)
        tokenizer = tokenizer_of(lm, tokenizer, trust_remote_code=trust_remote_code)
        if isinstance(given, PreTrainedModel):
            return LanguageModel(given, tokenizer)
        refuse_pickles(name)
        model = load_backbone(AutoModelForCausalLM, name, trust_remote_code=trust_remote_code, dtype=torch.float32)
    return LanguageModel(model, tokenizer)


def load_reader(
    model: ModelLike, *, tokenizer: PreTrainedTokenizerBase | None = None, trust_remote_code: bool = False
) -> LanguageModel:
    """Load a decoder that answers prompts, in float32; a loaded model is returned unchanged.

    Raises:
        UserError: the model cannot be loaded, is not a decoder, or its tokenizer has no EOS token.
    """
    name = name_of(model) or "the reader"
    loaded = load_lm(model, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    try:
        check_backbone(loaded.model)
        with checking(loaded.model, "reading"):
            check_mask(loaded.model, causal=True)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    if loaded.tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {name} has no EOS token, which answers end with: set one")
    return loaded


def _refuse_encoder(model: str | PreTrainedModel, name: str, trust_remote_code: bool) -> None:
    if is_encoder(model, trust_remote_code=trust_remote_code):
        raise UserError(f"the language model {name!r} is an encoder: use a decoder, which predicts the next token")


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a decoder.

    Raises:
        UserError: it cannot be loaded or has no EOS token, or the model is an encoder.
    """
    name = name_of(name)
    with loading(f"cannot load the tokenizer of {name!r}", name):
        _refuse_encoder(name, name, trust_remote_code)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {name} has no EOS token, which answers end with: set one")
    return tokenizer
