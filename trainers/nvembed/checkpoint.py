"""What an NV-Embed run starts from: a decoder, or a model that is an NV-Embed already (the second stage, official ones)."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from revela_hub.errors import UserError, first_line
from revela_hub.modeling.configuration_nvembed import NVEmbedConfig
from revela_hub.modeling.modeling_nvembed import NVEmbedModel
from revela_hub.trainers.common.roles import is_encoder
from revela_hub.trainers.common.weights import load_whole

EMBEDDER = "embedder"


@dataclass
class NVEmbedStart:
    """A model to train, its tokenizer, and the prompts that it was trained with before."""

    model: NVEmbedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: dict[str, str] = field(default_factory=dict)


def load_nvembed(backbone: str, *, dtype: torch.dtype = torch.float32, **config: Any) -> NVEmbedStart:
    """Loads a decoder under fresh pooling weights, or an NV-Embed with the pooling weights it has.

    Args:
        backbone: Hub id or folder: of a decoder, of an NV-Embed, or the output folder of an NV-Embed run.
        dtype: of the weights.
        **config: of `NVEmbedModel.from_backbone`: `pooling`, `mask`, `num_latents`, `num_heads`; what is None is left to
            its defaults, or to the trained model.

    Raises:
        UserError: if it cannot be loaded, or a trained model was made with other settings than those given.
    """
    config = {name: value for name, value in config.items() if value is not None}
    if (Path(backbone) / EMBEDDER / "config.json").is_file():
        backbone = str(Path(backbone) / EMBEDDER)
    try:
        found, _ = PreTrainedConfig.get_config_dict(backbone)
        if found.get("model_type") != NVEmbedConfig.model_type:
            if is_encoder(backbone):
                raise UserError(
                    f"the backbone {backbone!r} is an encoder: NV-Embed takes the causal mask off a decoder"
                )
            tokenizer = AutoTokenizer.from_pretrained(backbone)
            return NVEmbedStart(NVEmbedModel.from_backbone(backbone, dtype=dtype, **config), tokenizer)
        model = load_whole(NVEmbedModel, backbone, dtype=dtype)
        _check_settings(backbone, model.config, config)
        return NVEmbedStart(model, model.tokenizer, _saved_prompts(backbone))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"cannot load the backbone {backbone!r}: {first_line(error)}") from error


def _check_settings(name: str, trained: NVEmbedConfig, given: dict[str, Any]) -> None:
    latent = trained.latent_attention_config
    there = {
        "pooling": trained.pooling,
        "mask": trained.mask,
        "num_latents": latent.num_latents_value,
        "num_heads": latent.num_cross_heads,
    }
    for option, value in given.items():
        if there[option] != value:
            raise UserError(
                f"{name} is an NV-Embed already, with --{option} {there[option]}: leave --{option} {value} out,"
                " or start from a decoder"
            )


def _saved_prompts(name: str) -> dict[str, str]:
    file = cached_file(name, "config_sentence_transformers.json", _raise_exceptions_for_missing_entries=False)
    if file is None:
        return {}
    prompts = json.loads(Path(file).read_text(encoding="utf-8")).get("prompts") or {}
    return {task: prompt or "" for task, prompt in prompts.items()}
