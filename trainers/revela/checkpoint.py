"""Load the models and tokenizers that a Revela run starts from, or that it saved, and export them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import is_sentence_transformer_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from revela_hub.errors import UserError, loading
from revela_hub.files import local_path
from revela_hub.hub_cards.assemble import Assembled, Assembly, forget_origins, save_reference
from revela_hub.hub_cards.export import RetrieverSettings, save_backbone, save_settings, save_tokenizer
from revela_hub.hub_cards.peft_adapters import load_adapters
from revela_hub.hub_cards.tokenizers import (
    ends_texts,
    ensure_empty_text_has_token,
    padding_right,
    text_length,
    uses_chat_template,
    with_eos,
)
from revela_hub.hub_cards.verify import LONGEST_PROBE
from revela_hub.loading import encoder as open_encoder
from revela_hub.modeling import RevelaConfig, RevelaForCausalLM
from revela_hub.modeling.backbones import load_backbone
from revela_hub.retrieval.encoder import refuse_other_kind, similarity_of
from revela_hub.trainers.base.adapters import merge
from revela_hub.trainers.base.models import ModelLike, name_of, retriever_in, tokenizer_of, unwrapped
from revela_hub.trainers.base.weights import (
    check_fields,
    checkpoint_config,
    config_fields,
    is_encoder,
    load_whole,
    raise_for_names,
    refuse_remote_code,
)
from revela_hub.trainers.revela import REVELA

_POOLINGS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_OTHERS = "use `revela-hub train pairs` or `train contriever`, which support it"


@dataclass
class RevelaBackbones:
    """A model to train, and the tokenizers of its two parts."""

    model: RevelaForCausalLM
    retriever_tokenizer: PreTrainedTokenizerBase
    lm_tokenizer: PreTrainedTokenizerBase


def load_backbones(
    retriever: ModelLike,
    lm: ModelLike,
    *,
    retriever_tokenizer: PreTrainedTokenizerBase | None = None,
    lm_tokenizer: PreTrainedTokenizerBase | None = None,
    trust_remote_code: bool = False,
    **config: Any,
) -> RevelaBackbones:
    """Load a retriever and a language model to train together.

    A sentence-transformers retriever keeps its pooling and prompts. Any other model is used with last-token (EOS) pooling.

    Args:
        retriever: Hub id, folder or loaded model.
        lm: Hub id or folder of a decoder, or a loaded one.
        retriever_tokenizer: by default that of the retriever.
        lm_tokenizer: by default that of the language model.
        trust_remote_code: whether to run tokenizer code from the repositories; models that need remote code are rejected.
        **config: fields of `RevelaConfig`, which override the retriever's own settings; also `attn_implementation` and `dtype`.

    Raises:
        UserError: a model cannot be loaded, the retriever has modules or a pooling that Revela does not support.
    """
    check_fields(config, *config_fields(RevelaConfig), "attn_implementation", "dtype")
    code: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    retriever = retriever_in(retriever)
    name, lm_name, lm = name_of(retriever), name_of(lm), unwrapped(lm)
    with loading(f"cannot load the retriever {name!r}", name):
        if isinstance(retriever, str | Path):
            refuse_other_kind(name)
            if is_sentence_transformer_model(name):
                retriever = open_encoder(SentenceTransformer, name, device="cpu", **code)
        tokenizer = tokenizer_of(retriever, retriever_tokenizer, **code)
    backbone: Any = unwrapped(retriever)
    settings = _settings(retriever, name) if isinstance(retriever, SentenceTransformer) else {}
    if not isinstance(backbone, str):  # a loaded model may have a language-model head, which is not used
        backbone = backbone.base_model.to(config.get("dtype", torch.float32 if settings else backbone.dtype))
    if "pooling" not in settings | config and is_encoder(backbone, **code):
        raise UserError(f"the retriever {name!r} is an encoder: choose its pooling (pooling mean or cls)")
    with loading(f"cannot load the language model {lm_name!r}", lm_name):
        if is_encoder(lm, **code):
            raise UserError(f"the language model {lm_name!r} is an encoder: it has to be a decoder")
    config["prompts"] = settings.get("prompts", {}) | (config.get("prompts") or {}) or None
    model = RevelaForCausalLM.from_backbones(backbone, lm, **code, **(settings | config))
    refuse_remote_code(name, model.retriever.modules())
    refuse_remote_code(lm_name, model.lm.modules())
    tokenizer = with_eos(tokenizer) if model.config.pooling == "last" else tokenizer
    if not settings:  # a plain backbone; a trained retriever keeps its tokenizer
        tokenizer = ensure_empty_text_has_token(tokenizer)
    return RevelaBackbones(model, tokenizer, with_padding(tokenizer_of(lm, lm_tokenizer, **code)))


def _settings(encoder: SentenceTransformer, name: str) -> dict[str, Any]:
    """Return the settings of a sentence-transformers model as fields of `RevelaConfig`; reject one that compares in another way."""
    kinds, pooling, similarity = [type(module).__name__ for module in encoder], None, similarity_of(encoder, name)
    if kinds[:2] == ["Transformer", "Pooling"] and not set(kinds[2:]) - {"Normalize"}:
        module: Any = encoder[1]
        pooling = module.pooling_mode  # a tuple of several would be concatenated
    faults = {
        f"the modules {', '.join(kinds)} (supported: Transformer, Pooling, Normalize)": pooling is None,
        "a comparison by dot product (supported: cosine)": similarity == "dot" and "Normalize" not in kinds,
        f"the pooling {pooling} (supported: {', '.join(_POOLINGS)})": pooling is not None and pooling not in _POOLINGS,
        "a chat template": uses_chat_template(encoder),
        "no end token, although it pools the last token": pooling == "lasttoken" and not ends_texts(encoder.tokenizer),
        "prompts that are excluded from pooling": any(encoder.prompts.values())
        and not all(getattr(module, "include_prompt", True) for module in encoder),
    }
    if fault := next((fault for fault, found in faults.items() if found), ""):
        raise UserError(f"{name} has {fault}, so Revela would train other similarities than it computes: {_OTHERS}")
    prompts = {"query": "", "document": ""} | {key: prompt or "" for key, prompt in encoder.prompts.items()}
    kept = {name: getattr(encoder, name) for name in ("truncate_dim", "default_prompt_name")}
    return {"pooling": _POOLINGS[str(pooling)], "prompts": prompts, "similarity_fn_name": similarity, **kept}


def with_padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Set a missing padding token to EOS; padding is masked, so any token will do."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_checkpoint(folder: str | Path, *, trust_remote_code: bool = False) -> RevelaBackbones:
    """Load a checkpoint that `RevelaTrainer` saved, with all weights or with adapters, which are merged.

    Args:
        folder: checkpoint folder; one with adapters or a frozen language model also needs the base models that config.json names.
        trust_remote_code: whether to run tokenizer code from the repositories; models that need remote code are rejected.
    """
    folder = local_path(folder)
    with loading(f"cannot load {folder}", folder):
        checkpoint_config(folder, RevelaConfig.model_type, "Revela")
        if (folder / "adapter_model.safetensors").is_file():
            model = _load_adapters(folder, trust_remote_code)
        else:
            model = _load_weights(folder, trust_remote_code)
        tokenizers = [AutoTokenizer.from_pretrained(folder / part) for part in ("retriever_tokenizer", "lm_tokenizer")]
    return RevelaBackbones(model.eval(), *tokenizers)


def _load_weights(folder: Path, trust_remote_code: bool) -> RevelaForCausalLM:
    """Load all weights. A checkpoint has none of a frozen language model, which is loaded from where the run loaded it."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files or any(name.startswith("lm.") for file in files for name in safe_open(file, "pt").keys()):
        return load_whole(RevelaForCausalLM, folder, dtype=torch.float32)
    config: Any = RevelaConfig.from_pretrained(folder)
    lm = load_backbone(AutoModelForCausalLM, config.lm.name_or_path, trust_remote_code=trust_remote_code)
    model: RevelaForCausalLM = RevelaForCausalLM(config, lm=lm).float()
    weights = {name: weight for file in files for name, weight in load_file(file).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    raise_for_names(folder, "missing weight", [name for name in missing if not re.match(r"lm\.|.*\bpooler\.", name)])
    raise_for_names(folder, "the model has no weight", unexpected)
    return model


def _load_adapters(folder: Path, trust_remote_code: bool) -> RevelaForCausalLM:
    config = RevelaConfig.from_pretrained(folder)
    names = [part.name_or_path or "" for part in (config.retriever, config.lm) if part is not None]
    if len(names) < 2 or not all(names):
        raise UserError(f"{folder}/config.json does not name the base models of its adapters")
    settings = {name: getattr(config, name) for name in config_fields(RevelaConfig)}
    backbones = load_backbones(names[0], names[1], trust_remote_code=trust_remote_code, **settings)
    return merge(load_adapters(backbones.model, folder))  # type: ignore[no-any-return]


# --- export


def assemble_revela(loaded: RevelaBackbones, checkpoint: Path, folder: Path, assembly: Assembly) -> Assembled:
    """Write a part of a checkpoint, with adapters merged."""
    trained: Any = loaded.model.config.lm if assembly.part == "lm" else loaded.model.config.retriever
    base = trained.name_or_path
    if assembly.part == "retriever":
        return _retriever(loaded, base, folder, assembly)
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


def _retriever(loaded: RevelaBackbones, base: str, folder: Path, assembly: Assembly) -> Assembled:
    model = loaded.model
    settings = RetrieverSettings(
        model.config.pooling,
        model.config.prompts,
        assembly.max_length or model.config.max_seq_length,
        truncate_dim=model.config.truncate_dim,
        default_prompt_name=model.config.default_prompt_name,
        similarity_fn_name=model.config.similarity_fn_name,
    )
    tokenizer = settings.tokenizer(loaded.retriever_tokenizer)
    save_backbone(model.retriever, folder, dtype=assembly.dtype)
    save_settings(settings, tokenizer, model.retriever.config, folder)
    reference = save_reference(lambda ids, mask, _: model.published(ids, mask), tokenizer, settings.prompts, folder)
    return Assembled(folder, REVELA, base, reference)
