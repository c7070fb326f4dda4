"""Export a Revela checkpoint: the retriever or the language model as a plain model, or both models with their code."""

from pathlib import Path
from typing import Any

import torch

from revela_hub.hub_cards.assemble import (
    Assembled,
    Assembly,
    forget_origins,
    save_adapter,
    save_reference,
)
from revela_hub.hub_cards.export import RetrieverSettings, save_backbone, save_settings, save_tokenizer
from revela_hub.hub_cards.tokenizers import padding_right, text_length
from revela_hub.hub_cards.verify import LONGEST_PROBE
from revela_hub.trainers.revela import REVELA
from revela_hub.trainers.revela.checkpoint import RevelaBackbones


def assemble_revela(loaded: RevelaBackbones, checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Write a part of a checkpoint, with adapters merged, or only the retriever's adapter.

    Raises:
        UserError: the checkpoint does not have this part, or `max_length` has no effect on it.
    """
    trained: Any = loaded.model.config.lm if assembly.part == "lm" else loaded.model.config.retriever
    base = trained.name_or_path
    if assembly.part == "retriever":
        return _retriever(checkpoint, loaded, base, folder, assembly)
    if assembly.part == "lm":
        save_backbone(loaded.model.lm, folder, dtype=assembly.dtype)
        save_tokenizer(loaded.lm_tokenizer, folder)
        return Assembled(folder, REVELA, base, _reference_of_lm(loaded, folder))
    save_backbone(loaded.model, folder, dtype=assembly.dtype)
    forget_origins(folder, "retriever", "lm")
    save_tokenizer(loaded.retriever_tokenizer, folder / "retriever_tokenizer")
    save_tokenizer(loaded.lm_tokenizer, folder / "lm_tokenizer")
    return Assembled(folder, REVELA, base, remote_code=True)


def _reference_of_lm(loaded: RevelaBackbones, folder: Path) -> Path:
    """Write the logits after the last token of each text, for the verification."""
    lm, tokenizer = loaded.model.lm, padding_right(loaded.lm_tokenizer)
    tokenizer.model_max_length = text_length(lm.config, tokenizer, LONGEST_PROBE)

    def logits(input_ids: torch.Tensor, attention_mask: torch.Tensor, _: str) -> torch.Tensor:
        found: torch.Tensor = lm(input_ids=input_ids, attention_mask=attention_mask).logits
        return found[torch.arange(len(input_ids)), attention_mask.sum(1) - 1]

    return save_reference(logits, tokenizer, {"text": ""}, folder)


def _retriever(checkpoint: Path, loaded: RevelaBackbones, base: str, folder: Path, assembly: Assembly) -> Assembled:
    model, adapter_of = loaded.model, None
    settings = RetrieverSettings(
        model.config.pooling,
        model.config.prompts,
        assembly.max_length or model.config.max_seq_length,
        truncate_dim=model.config.truncate_dim,
        default_prompt_name=model.config.default_prompt_name,
        similarity_fn_name=model.config.similarity_fn_name,
    )
    tokenizer = settings.tokenizer(loaded.retriever_tokenizer)
    if assembly.adapter_only:
        adapter_of = save_adapter(checkpoint, folder, part="retriever", base=base)
    else:
        save_backbone(model.retriever, folder, dtype=assembly.dtype)
    needed = {"peft": ">=0.18"} if assembly.adapter_only else {}
    save_settings(settings, tokenizer, model.retriever.config, folder, needed)
    reference = save_reference(lambda ids, mask, _: model.published(ids, mask), tokenizer, settings.prompts, folder)
    return Assembled(folder, REVELA, base, reference, adapter_of=adapter_of)
