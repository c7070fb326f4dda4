"""Load the model that an NV-Embed run starts from (a decoder or an NV-Embed model), and export it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import normalizers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.data.mixture.instructions import query_prompt
from revela_hub.errors import UserError, loading
from revela_hub.files import local_path, scratch_folder
from revela_hub.hub_cards.assemble import Assembled, Assembly, forget_origins, save_reference
from revela_hub.hub_cards.export import RetrieverSettings, save_backbone, save_settings, save_tokenizer, write_json
from revela_hub.hub_cards.tokenizers import plain, text_length, with_eos
from revela_hub.internals import transformer_around
from revela_hub.loading import model_json
from revela_hub.modeling.configuration_nvembed import NVEmbedConfig
from revela_hub.modeling.modeling_nvembed import NVEmbedModel, exclude_instruction
from revela_hub.trainers.base.adapters import add_adapters, merge
from revela_hub.trainers.base.models import ModelLike, name_of, tokenizer_of, unwrapped
from revela_hub.trainers.base.weights import check_fields, is_encoder, load_whole, raise_for_names
from revela_hub.trainers.nvembed import EMBEDDER, NVEMBED
from revela_hub.trainers.nvembed.data import QUERY_INSTRUCTION

TRAINED_WEIGHTS = "trained.safetensors"  # adapters and pooling, in checkpoints with adapters
BACKBONE_OPTIONS = ("pooling", "mask", "num_latents", "num_heads")
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
    """
    check_fields(config, *BACKBONE_OPTIONS, "attn_implementation")
    config = {name: value for name, value in config.items() if value is not None}
    if isinstance(model, str | Path) and (local_path(model) / EMBEDDER / "config.json").is_file():
        model = local_path(model) / EMBEDDER
    given, name = unwrapped(model), name_of(model)
    with loading(f"cannot load the backbone {name!r}", name):
        if isinstance(given, NVEmbedModel):
            return NVEmbedStart(given, tokenizer or given.tokenizer)
        if isinstance(given, PreTrainedModel):
            _refuse_encoder(given, name)
            return NVEmbedStart(NVEmbedModel.from_backbone(given, **config), tokenizer_of(model, tokenizer))
        if (Path(name) / TRAINED_WEIGHTS).is_file():
            start = _load_adapted(Path(name), dtype)
        elif (model_json(name, "config.json") or {}).get("model_type") == NVEmbedConfig.model_type:
            trained = load_whole(NVEmbedModel, name, dtype=dtype)
            start = NVEmbedStart(trained, tokenizer or trained.tokenizer, _saved_prompts(name))
        else:
            _refuse_encoder(name, name)
            return NVEmbedStart(NVEmbedModel.from_backbone(name, dtype=dtype, **config), tokenizer_of(name, tokenizer))
    kept = _backbone_options(start.model.config)
    for option, value in config.items():
        if kept.get(option) != value:
            raise UserError(
                f"{name} is an NV-Embed model with {option}={kept.get(option)}: keep that, or use a decoder"
            )
    return start


def _refuse_encoder(model: str | PreTrainedModel, name: str) -> None:
    if is_encoder(model):
        raise UserError(f"the backbone {name!r} is an encoder: NV-Embed needs a decoder, whose causal mask it removes")


def _load_adapted(folder: Path, dtype: torch.dtype) -> NVEmbedStart:
    """Load a checkpoint of adapters and pooling with its base model, and merge the adapters."""
    adapters = LoraConfig.from_pretrained(str(folder))
    config = NVEmbedConfig.from_pretrained(folder)
    base = load_nvembed(str(adapters.base_model_name_or_path), dtype=dtype, **_backbone_options(config))
    adapters.base_model_name_or_path = None  # PEFT would warn that the decoder in it has another name
    base.model.config.max_seq_length = config.max_seq_length
    adapted = add_adapters(base.model.embedding_model, adapters)
    trained = load_file(folder / TRAINED_WEIGHTS)
    unexpected = base.model.load_state_dict(trained, strict=False).unexpected_keys
    raise_for_names(folder, "its weights belong to another model, which has no", unexpected)
    expected = {name for name, parameter in base.model.named_parameters() if parameter.requires_grad}
    raise_for_names(folder, "its weights lack", expected - trained.keys())
    merge(adapted)
    base.model.requires_grad_(True)  # the adapters froze the decoder
    base.model.config.name_or_path = str(folder)  # adapters that are trained next are recorded on top of these
    tokenizer = AutoTokenizer.from_pretrained(folder, config=config)
    return NVEmbedStart(base.model, tokenizer, _saved_prompts(str(folder)))


def _backbone_options(config: NVEmbedConfig) -> dict[str, Any]:
    """Return the arguments of `NVEmbedModel.from_backbone` of a trained model."""
    latent = config.latent_attention_config
    values = (config.pooling, config.mask, latent.num_latents_value, latent.num_cross_heads)
    return dict(zip(BACKBONE_OPTIONS, values, strict=True))


def _saved_prompts(name: str) -> dict[str, str]:
    prompts = (model_json(name, PROMPTS) or {}).get("prompts") or {}
    return {task: prompt or "" for task, prompt in prompts.items()}


def assemble_nvembed(loaded: NVEmbedStart, checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Write the embedder with its code, with adapters merged."""
    model, tokenizer, prompts = loaded.model, loaded.tokenizer, loaded.prompts
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
    base = model.config.text_config.name_or_path
    return Assembled(folder, NVEMBED, base, reference, remote_code=True)


def nvembed_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy that appends EOS to every text, pads on the right and removes white space at the end of a text.

    The function can be applied twice.
    """
    tokenizer = with_eos(tokenizer)
    backend = tokenizer.backend_tokenizer
    if tokenizer("a: ")["input_ids"] != tokenizer("a:")["input_ids"]:
        strip = normalizers.Strip(left=False, right=True)
        before = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([strip, *before])
    # The plain class, because that of Llama and Mistral does not load the normalizer from tokenizer.json. It also has no chat
    # template, which sentence-transformers would apply to every text.
    return plain(tokenizer)


def nvembed_encoder(
    model: NVEmbedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int = 512,
    prompts: dict[str, str],
) -> SentenceTransformer:
    """Return a sentence-transformers model around a model, for training or use: `encoder[0].model is model`.

    The folder written by its `save` loads with `SentenceTransformer(folder, trust_remote_code=True)`. The maximum length and the
    correct instruction mask are set in the model's configuration.

    Args:
        model: model, which is not copied.
        tokenizer: tokenizer of the decoder; a copy that appends EOS is used.
        max_length: maximum tokens of prompt and text, EOS included.
        prompts: texts put before inputs, under the names `query` and `document` (by default empty) and those of tasks.
    """
    tokenizer = nvembed_tokenizer(tokenizer)
    length = text_length(model.config.text_config, tokenizer, max_length)
    model.config.max_seq_length, model.config.official_instruction_mask = length, False
    with scratch_folder("export") as folder:
        save_tokenizer(tokenizer, folder, max_length=length)
        transformer = transformer_around(model, str(folder))
    mode: Any = "lasttoken" if model.config.pooling == "eos" else "mean"
    pooling = Pooling(model.config.hidden_size, pooling_mode=mode, include_prompt=False)
    return SentenceTransformer(
        modules=[transformer, pooling, Normalize()],
        prompts={"query": "", "document": ""} | prompts,
        similarity_fn_name="cosine",
        device=str(model.device),
        trust_remote_code=True,  # checkpoints, which a resumed run loads, contain our code
    )


def export_nvembed(
    model: NVEmbedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    max_length: int = 512,
    prompts: dict[str, str],
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a folder that loads without this package, with its code.

    `SentenceTransformer(folder, trust_remote_code=True)` and the `encode` method of
    `AutoModel.from_pretrained(folder, trust_remote_code=True)` return the vectors of `NVEmbedModel`, which exclude the tokens of the
    prompt.

    Arguments and errors are those of `nvembed_encoder`; the model must have no adapters that are not merged.
    """
    if any("lora_" in name for name, _ in model.named_parameters()):
        raise UserError("the model has LoRA adapters: merge them first (merge_and_unload)")
    prompts, tokenizer = {"query": "", "document": ""} | prompts, nvembed_tokenizer(tokenizer)
    folder = local_path(folder)
    pooling: Any = "last" if model.config.pooling == "eos" else "mean"
    settings = RetrieverSettings(pooling, prompts, max_length, include_prompt=False, similarity_fn_name="cosine")
    save_backbone(model, folder, dtype=dtype)
    forget_origins(folder, "text_config")  # the tokenizer is in the folder itself
    length = text_length(model.config.text_config, tokenizer, max_length)
    config = model_json(folder, "config.json") | {"max_seq_length": length, "official_instruction_mask": False}
    write_json(folder / "config.json", config)
    save_settings(settings, tokenizer, model.config, folder)
    return folder
