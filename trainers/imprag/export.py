"""Export an ImpRAG checkpoint as a folder with its own code, which `AutoModelForCausalLM` loads."""

from pathlib import Path

import torch

from revela_hub.errors import UserError
from revela_hub.hub_cards.assemble import Assembled, Assembly, forget_origins, write_reference
from revela_hub.hub_cards.export import save_backbone, save_tokenizer
from revela_hub.hub_cards.verify import probe_texts, text_limit
from revela_hub.trainers.imprag import IMPRAG, verification
from revela_hub.trainers.imprag.checkpoint import ImpRAGCheckpoint


def assemble_imprag(loaded: ImpRAGCheckpoint, checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Write the whole model, which is retriever and reader in one, with adapters merged.

    Raises:
        UserError: the passages leave no positions for a prompt, or `max_length` is given.
    """
    backbone = loaded.model.config.backbone
    base = None if backbone is None else backbone.name_or_path
    save_backbone(loaded.model, folder, dtype=assembly.dtype)
    forget_origins(folder, "backbone")
    save_tokenizer(loaded.tokenizer, folder)
    return Assembled(folder, IMPRAG, base, _save_reference(loaded, checkpoint, folder), remote_code=True)


def _save_reference(loaded: ImpRAGCheckpoint, checkpoint: Path, folder: Path) -> Path:
    """Write the checkpoint's vectors of the probe texts and states that read them, for the verification of the folder."""
    model, tokenizer = loaded.model, loaded.tokenizer
    length = text_limit(model, tokenizer)
    tokenizer.model_max_length = length
    texts = [text or "a" for text in probe_texts(length)]  # as in the verification: an empty text has no vector
    kinds = ("query", "document")
    try:
        vectors = {
            kind: torch.cat([verification.vectors(model, tokenizer, kind, [text]) for text in texts]) for kind in kinds
        }
    except ValueError as error:  # the passages leave no positions for a prompt
        raise UserError(f"{checkpoint} cannot read passages: {error}") from error
    return write_reference(folder, vectors, length)
