"""Export a RetroMAE checkpoint: the encoder as a plain model, or the whole model with its decoder."""

from pathlib import Path

import torch

from revela_hub.hub_cards.assemble import Assembled, Assembly, forget_origins, save_reference
from revela_hub.hub_cards.export import RetrieverSettings, save_backbone, save_settings, save_tokenizer, with_pooler
from revela_hub.modeling.modeling_retromae import RetroMAEForPreTraining
from revela_hub.trainers.retromae import RETROMAE
from revela_hub.trainers.retromae.checkpoint import RetroMAECheckpoint


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
