"""Retrievers that were published as a bare PEFT adapter, such as those of Revela's authors.

Such a repository names the base model, but neither pooling nor prompts: sentence-transformers would use the mean of all tokens, no
end token and no prompts, and return other vectors without a warning.
"""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.hub_cards.export import export_retriever

WEIGHTS = "adapter_model.safetensors"
PROMPTS = {"query": "query: ", "document": "passage: "}  # of the authors' code; their paper prints capitals


def load_adapters(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Load all adapters of a folder into a model; PEFT would only warn about those that do not fit, and leave the model as it is."""
    adapted = PeftModel.from_pretrained(model, str(folder))
    with safe_open(folder / WEIGHTS, framework="pt") as weights:
        different = set(weights.keys()) ^ set(get_peft_model_state_dict(adapted))
    if different:
        more = f" and {len(different) - 1} more" * (len(different) > 1)
        raise UserError(f"cannot load {folder}: its adapters do not fit the model: {min(different)}{more} differ")
    return adapted


def export_adapter(
    adapter: str | Path,
    output: str | Path,
    *,
    max_length: int = 2048,
    dtype: torch.dtype | None = None,
) -> Path:
    """Merge a PEFT adapter (Hub id or folder) into its base model, and write a retriever with the prompts and the pooling of Revela.

    The tokenizer ends every text with an EOS, which counts in the maximum length. The weights are merged in float32, and stored in
    it unless `dtype` is given.
    """
    folder = local_path(adapter)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(adapter), allow_patterns=["adapter_*", "*token*"]))
    base = str(PeftConfig.from_pretrained(str(folder)).base_model_name_or_path)
    adapted: Any = load_adapters(AutoModel.from_pretrained(base, dtype=torch.float32, use_safetensors=True), folder)
    own = folder if (folder / "tokenizer.json").is_file() else base
    return export_retriever(
        adapted.merge_and_unload(),
        AutoTokenizer.from_pretrained(own),
        output,
        pooling="last",
        prompts=PROMPTS,
        max_length=max_length,
        dtype=dtype,
    )
