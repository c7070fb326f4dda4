"""Load the model that a RetroMAE run starts from or that it saved, and export it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from revela_hub.files import local_path
from revela_hub.hub_cards.assemble import Assembled, Assembly, forget_origins, save_reference
from revela_hub.hub_cards.export import RetrieverSettings, save_backbone, save_settings, save_tokenizer, with_pooler
from revela_hub.modeling.configuration_retromae import RetroMAEConfig
from revela_hub.modeling.modeling_retromae import RetroMAEForPreTraining
from revela_hub.trainers.base.models import ModelLike, name_of
from revela_hub.trainers.base.weights import checkpoint_config, load_saved, load_start, refuse_remote_code
from revela_hub.trainers.retromae import RETROMAE


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
    """
    model, tokenizer = load_start(
        RetroMAEForPreTraining,
        encoder,
        RetroMAEForPreTraining.from_encoder,
        config,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
        attn_implementation=attn_implementation,
    )
    refuse_remote_code(name_of(encoder), model.modules())
    return RetroMAECheckpoint(model, tokenizer)


def load_retromae_checkpoint(folder: str | Path) -> RetroMAECheckpoint:
    """Load a folder that `RetroMAETrainer` saved, in float32 and in eval mode."""
    folder = local_path(folder)
    checkpoint_config(folder, RetroMAEConfig.model_type, "RetroMAE")
    return RetroMAECheckpoint(*load_saved(RetroMAEForPreTraining, folder))


def encoder_settings(model: RetroMAEForPreTraining, max_length: int | None = None) -> RetrieverSettings:
    """Return how the encoder of a model embeds texts: with the state of the first token, without prompts, compared by cosine."""
    length = min(max_length or model.config.max_seq_length, model.max_length)
    return RetrieverSettings("cls", {"query": "", "document": ""}, length, similarity_fn_name="cosine")


def assemble_retromae(loaded: RetroMAECheckpoint, checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Write the encoder with [CLS] pooling, or the whole model with its decoder for further pre-training."""
    base = loaded.model.config.encoder.name_or_path
    if assembly.part == "model":
        save_backbone(loaded.model, folder, dtype=assembly.dtype)
        forget_origins(folder, "encoder")
        save_tokenizer(loaded.tokenizer, folder)
        return Assembled(folder, RETROMAE, base, remote_code=True)
    encoder = with_pooler(loaded.model.encoder)
    settings = encoder_settings(loaded.model, assembly.max_length)
    tokenizer = settings.tokenizer(loaded.tokenizer)
    save_backbone(encoder, folder, dtype=assembly.dtype)
    save_settings(settings, tokenizer, encoder.config, folder)

    def embed(input_ids: torch.Tensor, attention_mask: torch.Tensor, _: str) -> torch.Tensor:
        hidden = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return torch.nn.functional.normalize(hidden[:, 0], dim=-1)

    reference = save_reference(embed, tokenizer, settings.prompts, folder)
    return Assembled(folder, RETROMAE, base, reference)
