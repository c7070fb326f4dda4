"""What an ImpRAG checkpoint becomes for its readers: a folder with its own code, which `AutoModelForCausalLM` loads."""

from pathlib import Path

from revela_hub.errors import UserError
from revela_hub.hub_cards.assemble import Assembled, Assembly, forget_origins
from revela_hub.hub_cards.export import save_backbone, save_tokenizer
from revela_hub.trainers.imprag.checkpoint import load_imprag_checkpoint


def assemble_imprag(checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Writes the whole model, adapters merged: retriever, reader and generator are one.

    Raises:
        UserError: a part is asked for, or the checkpoint is damaged.
    """
    if assembly.part == "lm" or assembly.adapter_only:
        raise UserError(f"{checkpoint} is of ImpRAG, whose retriever and language model are one: publish it whole")
    loaded = load_imprag_checkpoint(checkpoint)
    backbone = loaded.model.config.backbone
    base = None if backbone is None else backbone._name_or_path
    save_backbone(loaded.model, folder, dtype=assembly.dtype)
    forget_origins(folder, "backbone")
    save_tokenizer(loaded.tokenizer, folder)
    return Assembled(folder, "imprag", base, remote_code=True)
