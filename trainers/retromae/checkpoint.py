"""Load the model and tokenizer that a RetroMAE run starts from, or that it saved."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.data.text.masking import Vocabulary
from revela_hub.errors import UserError, loading
from revela_hub.modeling.configuration_retromae import RetroMAEConfig
from revela_hub.modeling.modeling_retromae import RetroMAEForPreTraining
from revela_hub.paths import local_path
from revela_hub.pickles import model_json, refuse_pickles
from revela_hub.trainers.base.inputs import ModelLike, model_of_run, name_of, tokenizer_of, unwrapped
from revela_hub.trainers.base.weights import (
    check_fields,
    checkpoint_config,
    config_fields,
    load_whole,
    refuse_fused,
    refuse_remote_code,
)


@dataclass
class RetroMAECheckpoint:
    """A model with its decoder, and its tokenizer."""

    model: RetroMAEForPreTraining
    tokenizer: PreTrainedTokenizerBase


def load_retromae_encoder(
    encoder: ModelLike,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    **config: Any,
) -> RetroMAECheckpoint:
    """Load a model to pre-train: an encoder, which gets a new decoder, or a RetroMAE model with its decoder.

    Args:
        encoder: Hub id or folder, or a loaded model with its masked-LM head.
        tokenizer: by default that of the encoder.
        trust_remote_code: whether to run tokenizer code from the repository; models that need remote code are rejected.
        attn_implementation: of the encoder; None for the default of transformers.
        **config: fields of `RetroMAEConfig`.

    Raises:
        UserError: the model cannot be loaded, is not an encoder with a masked-LM head, has no mask token, or is a RetroMAE
            model whose decoder differs from `config`.
    """
    check_fields(config, *config_fields(RetroMAEConfig))
    encoder = model_of_run(encoder, RetroMAEConfig.model_type)
    given, name = unwrapped(encoder), name_of(encoder)
    with loading(f"cannot load the encoder {name!r}", name):
        fields = {} if isinstance(given, PreTrainedModel) else model_json(given, "config.json") or {}
        if fields.get("model_type") == RetroMAEConfig.model_type:
            model = load_whole(RetroMAEForPreTraining, name, dtype=torch.float32)
            if attn_implementation is not None:
                model.encoder.set_attn_implementation(attn_implementation)
            # Given the configuration, transformers does not ask to run the folder's code in order to read it.
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(name, config=model.config)
        else:
            if isinstance(given, str):
                refuse_fused(given)
                refuse_pickles(given)
            model = RetroMAEForPreTraining.from_encoder(
                given, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation, **config
            )
        tokenizer = tokenizer_of(encoder, tokenizer, trust_remote_code=trust_remote_code)
    refuse_remote_code(name, model.modules())
    for field, value in config.items():
        if (kept := getattr(model.config, field)) != value:
            raise UserError(f"{name} was pre-trained with {field}={kept}: keep that, or start from its encoder")
    Vocabulary.of(tokenizer)  # raises an error before any text is read
    if len(tokenizer) > (vocabulary := model.config.get_text_config().vocab_size):
        raise UserError(f"the tokenizer of {name} has {len(tokenizer)} tokens, more than the model's {vocabulary}")
    return RetroMAECheckpoint(model, tokenizer)


def load_retromae_checkpoint(folder: str | Path) -> RetroMAECheckpoint:
    """Load a folder that `RetroMAETrainer` saved, in float32 and in eval mode.

    Raises:
        UserError: the folder is not a RetroMAE checkpoint, or is damaged.
    """
    folder = local_path(folder)
    with loading(f"cannot load {folder}", folder):
        checkpoint_config(folder, RetroMAEConfig.model_type, "RetroMAE")
        model = load_whole(RetroMAEForPreTraining, folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, config=model.config)
    return RetroMAECheckpoint(model.eval(), tokenizer)
