"""Load the model that an NV-Embed run starts from: a decoder, or an NV-Embed model (for stage two, or an official one)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.data.mixture.instructions import query_prompt
from revela_hub.errors import UserError, loading
from revela_hub.modeling.configuration_nvembed import NVEmbedConfig
from revela_hub.modeling.modeling_nvembed import NVEmbedModel
from revela_hub.paths import local_path
from revela_hub.pickles import model_json, refuse_pickles
from revela_hub.trainers.base.adapters import add_adapters
from revela_hub.trainers.base.inputs import ModelLike, model_of_run, name_of, tokenizer_of, unwrapped
from revela_hub.trainers.base.weights import check_fields, is_encoder, load_whole, raise_for_names
from revela_hub.trainers.nvembed import EMBEDDER
from revela_hub.trainers.nvembed.arguments import QUERY_INSTRUCTION

TRAINED_WEIGHTS = "trained.safetensors"  # adapters and pooling, in checkpoints with adapters
PROMPTS = "config_sentence_transformers.json"


@dataclass
class NVEmbedStart:
    """A model to train, its tokenizer, and the prompts of its earlier training."""

    model: NVEmbedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: dict[str, str] = field(default_factory=dict)

    def encoding_prompts(self, query_instruction: str | None) -> dict[str, str]:
        """Return the prompts with those of `encode_query` and `encode_document`; by default the model's own, or the paper's."""
        prompts = {"query": query_prompt(QUERY_INSTRUCTION), "document": ""} | self.prompts
        return prompts if query_instruction is None else prompts | {"query": query_prompt(query_instruction)}


def load_nvembed(
    model: ModelLike,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> NVEmbedStart:
    """Load a decoder and add new pooling weights, or load an NV-Embed model with its pooling weights.

    Args:
        model: Hub id or folder of a decoder or an NV-Embed model, the output folder or a
            checkpoint of an NV-Embed run, or a loaded decoder, which is not copied.
        tokenizer: by default that of the decoder.
        dtype: of the loaded weights.
        **config: arguments of `NVEmbedModel.from_backbone`: `pooling`, `mask`, `num_latents`, `num_heads`, and of a decoder
            `attn_implementation`; with None, the default or the trained model's value is used.

    Raises:
        UserError: the model cannot be loaded, the settings differ from those of a trained model.
    """
    check_fields(config, "pooling", "mask", "num_latents", "num_heads", "attn_implementation")
    config = {name: value for name, value in config.items() if value is not None}
    if isinstance(model, str | Path) and (local_path(model) / EMBEDDER / "config.json").is_file():
        model = local_path(model) / EMBEDDER
    model = model_of_run(model)
    given, backbone = unwrapped(model), name_of(model)
    if isinstance(given, PreTrainedModel):
        with loading(f"cannot put pooling on {backbone or type(given).__name__}", backbone):
            if isinstance(given, NVEmbedModel):
                return NVEmbedStart(given, tokenizer or given.tokenizer)
            _check_decoder(given, backbone)
            return NVEmbedStart(NVEmbedModel.from_backbone(given, **config), tokenizer_of(model, tokenizer))
    with loading(f"cannot load the backbone {backbone!r}", backbone):
        if (Path(backbone) / TRAINED_WEIGHTS).is_file():
            start = _load_adapted(Path(backbone), dtype)
            _check_settings(backbone, start.model.config, config)
            return start
        found = model_json(backbone, "config.json") or {}
        if found.get("model_type") != NVEmbedConfig.model_type:
            _check_decoder(backbone, backbone)
            refuse_pickles(backbone)
            tokenizer = tokenizer_of(backbone, tokenizer)
            return NVEmbedStart(NVEmbedModel.from_backbone(backbone, dtype=dtype, **config), tokenizer)
        trained = load_whole(NVEmbedModel, backbone, dtype=dtype)
        _check_settings(backbone, trained.config, config)
        return NVEmbedStart(trained, tokenizer or trained.tokenizer, _saved_prompts(backbone))


def _check_decoder(model: str | PreTrainedModel, name: str) -> None:
    if is_encoder(model):
        raise UserError(f"the backbone {name!r} is an encoder: NV-Embed needs a decoder, whose causal mask it removes")


def _load_adapted(folder: Path, dtype: torch.dtype) -> NVEmbedStart:
    """Load a checkpoint of adapters and pooling with its base model, and merge the adapters."""
    adapters = LoraConfig.from_pretrained(str(folder))
    config = NVEmbedConfig.from_pretrained(folder)
    base = load_nvembed(str(adapters.base_model_name_or_path), dtype=dtype, **_settings(config))
    adapters.base_model_name_or_path = None  # PEFT would warn that the decoder in it has another name
    base.model.config.max_seq_length = config.max_seq_length
    adapted = add_adapters(base.model.embedding_model, adapters)
    trained = load_file(folder / TRAINED_WEIGHTS)
    unexpected = base.model.load_state_dict(trained, strict=False).unexpected_keys
    raise_for_names(folder, "its weights belong to another model, which has no", unexpected)
    expected = {name for name, parameter in base.model.named_parameters() if parameter.requires_grad}
    raise_for_names(folder, "its weights lack", expected - trained.keys())
    adapted.merge_and_unload()
    base.model.requires_grad_(True)  # the adapters froze the decoder
    base.model.config.name_or_path = str(folder)  # adapters that are trained next are recorded on top of these
    tokenizer = AutoTokenizer.from_pretrained(folder, config=config)
    return NVEmbedStart(base.model, tokenizer, _saved_prompts(str(folder)))


def _settings(config: NVEmbedConfig) -> dict[str, Any]:
    """Return the arguments of `NVEmbedModel.from_backbone` of a trained model."""
    latent = config.latent_attention_config
    return {
        "pooling": config.pooling,
        "mask": config.mask,
        "num_latents": latent.num_latents_value,
        "num_heads": latent.num_cross_heads,
    }


def _check_settings(name: str, trained: NVEmbedConfig, given: dict[str, Any]) -> None:
    there = _settings(trained)
    for option, value in given.items():
        if there.get(option) != value:
            raise UserError(
                f"{name} is an NV-Embed model with --{option} {there.get(option)}: leave out --{option} {value}, or start from a"
                " decoder"
            )


def _saved_prompts(name: str) -> dict[str, str]:
    prompts = (model_json(name, PROMPTS) or {}).get("prompts") or {}
    return {task: prompt or "" for task, prompt in prompts.items()}
