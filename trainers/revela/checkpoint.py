"""Load the models and tokenizers that a Revela run starts from, or that it saved."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import is_sentence_transformer_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.errors import UserError, loading
from revela_hub.files import local_path
from revela_hub.hub_cards.tokenizers import ends_texts, ensure_empty_text_has_token, uses_chat_template, with_eos
from revela_hub.loading import encoder as open_encoder
from revela_hub.loading import refuse_pickles
from revela_hub.modeling import RevelaConfig, RevelaForCausalLM
from revela_hub.modeling.backbones import load_backbone
from revela_hub.retrieval.encoder import refuse_other_kind, similarity_of
from revela_hub.trainers.base.adapters import merge, refuse_adapters
from revela_hub.trainers.base.models import ModelLike, name_of, retriever_in, tokenizer_of, unwrapped
from revela_hub.trainers.base.retriever import refuse_excluded_prompts
from revela_hub.trainers.base.weights import (
    check_fields,
    checkpoint_config,
    config_fields,
    is_encoder,
    load_adapters,
    load_in_place,
    load_whole,
    raise_for_names,
    refuse_remote_code,
)

_POOLINGS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_OTHERS = "use `revela-hub train pairs` or `train contriever`, which support it"


@dataclass
class RevelaBackbones:
    """A model to train, and the tokenizers of its two parts."""

    model: RevelaForCausalLM
    retriever_tokenizer: PreTrainedTokenizerBase
    lm_tokenizer: PreTrainedTokenizerBase


@dataclass
class _Retriever:
    model: PreTrainedModel | str
    tokenizer: PreTrainedTokenizerBase
    settings: dict[str, Any]


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
    retriever = retriever_in(retriever)
    name, lm_name, lm = name_of(retriever), name_of(lm), unwrapped(lm)
    for called, given in ((name, retriever), (lm_name, lm)):
        if isinstance(given, nn.Module):
            refuse_adapters(called or type(given).__name__, given)
    with loading(f"cannot load the retriever {name!r}", name):
        dtype = config.get("dtype", torch.float32)
        loaded = _load_retriever(retriever, retriever_tokenizer, trust_remote_code, dtype)
        if "pooling" not in loaded.settings | config and is_encoder(loaded.model, trust_remote_code=trust_remote_code):
            raise UserError(
                f"the retriever {name!r} is an encoder without a pooling: choose one (--pooling mean or cls)"
            )
    with loading(f"cannot load the language model {lm_name!r}", lm_name):
        lm_tokenizer = tokenizer_of(lm, lm_tokenizer, trust_remote_code=trust_remote_code)
        if is_encoder(lm, trust_remote_code=trust_remote_code):
            raise UserError(
                f"the language model {lm_name!r} is an encoder: it has to be a decoder, which predicts the next token"
            )
    with loading(f"cannot load the retriever and language model {name!r} and {lm_name!r}", name):
        for place in (unwrapped(retriever), lm):
            if isinstance(place, str):
                refuse_pickles(place)
        if own := loaded.settings.get("prompts"):
            config["prompts"] = own | (config.get("prompts") or {})
        model = RevelaForCausalLM.from_backbones(
            loaded.model, lm, trust_remote_code=trust_remote_code, **(loaded.settings | config)
        )
    for called, part in ((name, model.retriever), (lm_name, model.lm)):
        refuse_remote_code(called, part.modules())
    tokenizer = with_eos(loaded.tokenizer) if model.config.pooling == "last" else loaded.tokenizer
    if not loaded.settings:  # a plain backbone; a trained retriever keeps its tokenizer
        tokenizer = ensure_empty_text_has_token(tokenizer)
    return RevelaBackbones(model, tokenizer, with_padding(lm_tokenizer))


def _load_retriever(
    retriever: ModelLike, tokenizer: PreTrainedTokenizerBase | None, trust_remote_code: bool, dtype: torch.dtype
) -> _Retriever:
    name, encoder = name_of(retriever), retriever
    if isinstance(retriever, str | Path):
        refuse_other_kind(name)
    if isinstance(retriever, str | Path) and is_sentence_transformer_model(name):
        encoder = open_encoder(SentenceTransformer, name, device="cpu", trust_remote_code=trust_remote_code)
    if not isinstance(encoder, SentenceTransformer):
        tokenizer = tokenizer_of(retriever, tokenizer, trust_remote_code=trust_remote_code)
        given: Any = unwrapped(retriever)  # a loaded model may have a language-model head, which is not used
        return _Retriever(given if isinstance(given, str) else given.base_model, tokenizer, {})
    refuse_adapters(name, encoder)
    settings = _settings(encoder, name)
    transformer: Any = encoder[0]
    return _Retriever(transformer.auto_model.to(dtype), tokenizer or encoder.tokenizer, settings)


def _settings(encoder: SentenceTransformer, name: str) -> dict[str, Any]:
    """Return the settings of a sentence-transformers model as fields of `RevelaConfig`.

    Raises:
        UserError: Revela would train or export a model that computes other similarities.
    """
    kinds = [type(module).__name__ for module in encoder]
    if kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Normalize"}:
        raise UserError(
            f"{name} has the modules {', '.join(kinds)}: Revela supports Transformer, Pooling and Normalize only; {_OTHERS}"
        )
    similarity = similarity_of(encoder, name)
    if similarity == "dot" and "Normalize" not in kinds:
        raise UserError(f"{name} compares by dot product, but Revela trains cosine similarities: {_OTHERS}")
    pooling: Any = encoder[1]
    modes = pooling.pooling_mode if isinstance(pooling.pooling_mode, tuple) else (pooling.pooling_mode,)
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        raise UserError(f"{name} has the pooling {', '.join(modes)}: Revela supports {', '.join(_POOLINGS)}; {_OTHERS}")
    if uses_chat_template(encoder):
        raise UserError(f"{name} puts texts into a chat template, which Revela does not support: {_OTHERS}")
    if modes[0] == "lasttoken" and not ends_texts(encoder.tokenizer):
        raise UserError(
            f"{name} pools the last token of the text: Revela would add an end token (EOS), which changes its vectors; {_OTHERS}"
        )
    prompts = {"query": "", "document": ""} | {key: prompt or "" for key, prompt in encoder.prompts.items()}
    refuse_excluded_prompts(encoder, name, "Revela")
    kept = {name: getattr(encoder, name) for name in ("truncate_dim", "default_prompt_name")}
    return {"pooling": _POOLINGS[modes[0]], "prompts": prompts, "similarity_fn_name": similarity, **kept}


def with_padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Set a missing padding token to EOS; padding is masked, so any token will do."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_checkpoint(folder: str | Path, *, trust_remote_code: bool = False) -> RevelaBackbones:
    """Load a checkpoint that `RevelaTrainer` saved, with all weights or with adapters, which are merged.

    Args:
        folder: checkpoint folder; one with adapters also needs the base models, which its config.json names.
        trust_remote_code: whether to run tokenizer code from the repositories; models that need remote code are rejected.

    Raises:
        UserError: the folder is not a Revela checkpoint, or is damaged.
    """
    folder = local_path(folder)
    with loading(f"cannot load {folder}", folder):
        checkpoint_config(folder, RevelaConfig.model_type, "Revela")
        if (folder / "adapter_model.safetensors").is_file():
            model = _load_adapters(folder, trust_remote_code)
        elif files := _without_lm(folder):
            model = _load_with_lm(folder, files, trust_remote_code)
        else:
            model = load_whole(RevelaForCausalLM, folder, dtype=torch.float32)
        tokenizers = [AutoTokenizer.from_pretrained(folder / part) for part in ("retriever_tokenizer", "lm_tokenizer")]
    return RevelaBackbones(model.eval(), *tokenizers)


def _without_lm(folder: Path) -> dict[Path, set[str]]:
    """Return the weight files of a checkpoint and the names in them, if it has no weights of a language model; else nothing."""
    files = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            files[file] = set(weights.keys())
    return {} if any(name.startswith("lm.") for names in files.values() for name in names) else files


def _load_with_lm(folder: Path, files: dict[Path, set[str]], trust_remote_code: bool) -> RevelaForCausalLM:
    """Load a checkpoint of a run with a frozen language model, which is loaded from where the run loaded it."""
    config = RevelaConfig.from_pretrained(folder)
    name = "" if config.lm is None else config.lm.name_or_path
    if not name:
        raise UserError(f"{folder} has no weights of the language model, and its config.json does not name it")
    with loading(f"cannot load the language model {name!r}, which was frozen in this run", name):
        refuse_pickles(name)
        lm = load_backbone(AutoModelForCausalLM, name, dtype=torch.float32, trust_remote_code=trust_remote_code)
    model = RevelaForCausalLM(config, lm=lm)
    model.float()
    expected = {key for key in model.state_dict() if not key.startswith("lm.") and "pooler" not in key.split(".")}
    raise_for_names(folder, "missing weight", expected - set().union(*files.values()))
    if not load_in_place(model, files, expected):
        raise UserError(f"cannot load {folder}: it has weights that the model does not have")
    return model


def _load_adapters(folder: Path, trust_remote_code: bool) -> RevelaForCausalLM:
    config = RevelaConfig.from_pretrained(folder)
    names = [part.name_or_path or "" for part in (config.retriever, config.lm) if part is not None]
    if len(names) < 2 or not all(names):
        raise UserError(f"{folder}/config.json does not name the base models of its adapters")
    settings = {name: getattr(config, name) for name in config_fields(RevelaConfig)}
    backbones = load_backbones(names[0], names[1], trust_remote_code=trust_remote_code, **settings)
    model: RevelaForCausalLM = merge(load_adapters(backbones.model, folder))
    return model
