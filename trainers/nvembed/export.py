"""What an NV-Embed model becomes for its readers: a sentence-transformers folder with its inference code."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from revela_hub.hub_cards.assemble import Assembled, Assembly, save_reference
from revela_hub.hub_cards.nvembed import export_nvembed, nvembed_tokenizer
from revela_hub.modeling.modeling_nvembed import NVEmbedModel, exclude_instruction
from revela_hub.trainers.nvembed import NVEMBED
from revela_hub.trainers.nvembed.checkpoint import load_nvembed


def assemble_nvembed(checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Writes the embedder of a run's output folder anew, with the code of this package.

    Raises:
        UserError: there is no embedder.
    """
    start = load_nvembed(str(checkpoint))
    return assemble_model(start.model, start.tokenizer, start.prompts, folder, assembly)


def assemble_model(
    model: NVEmbedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: dict[str, str],
    folder: Path,
    assembly: Assembly,
) -> Assembled:
    """Writes a model that is in memory, adapters merged."""
    length = assembly.max_length or model.config.max_seq_length or 512
    export_nvembed(model, tokenizer, folder, max_length=length, prompts=prompts, dtype=assembly.dtype)
    tokenizer = nvembed_tokenizer(tokenizer)

    def embed(input_ids: torch.Tensor, attention_mask: torch.Tensor, prompt: str) -> torch.Tensor:
        left_out = len(tokenizer(prompt)["input_ids"]) - 1 if prompt else 0  # without EOS
        pool_mask = exclude_instruction(attention_mask, left_out)
        vectors: torch.Tensor = model(input_ids, attention_mask, pool_mask).pooler_output
        return vectors

    model.eval()
    reference = save_reference(embed, tokenizer, {"query": "", "document": ""} | prompts, folder)
    base = model.config.text_config._name_or_path
    return Assembled(folder, NVEMBED, base, reference, remote_code=True)
