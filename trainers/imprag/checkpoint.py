"""What an ImpRAG run starts from and leaves behind: the model and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from revela_hub.errors import UserError, loading, refuse_missing_folder
from revela_hub.modeling import ImpRAGConfig, ImpRAGForCausalLM
from revela_hub.pickles import refuse_pickles
from revela_hub.trainers.common.inputs import ModelLike, name_of, tokenizer_of, unwrapped
from revela_hub.trainers.common.roles import is_encoder
from revela_hub.trainers.common.weights import load_adapters, load_whole


@dataclass
class ImpRAGCheckpoint:
    """A model and the tokenizer that goes with it."""

    model: ImpRAGForCausalLM
    tokenizer: PreTrainedTokenizerBase


def is_imprag(name: str | Path) -> bool:
    """Whether a folder, or a model of the Hub, is of ImpRAG."""
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError):  # nothing there, or no name of a model
        return False
    return bool(fields.get("model_type") == ImpRAGConfig.model_type)


def load_imprag(
    backbone: ModelLike,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    trust_remote_code: bool = False,
    **config: Any,
) -> ImpRAGCheckpoint:
    """Loads what to train: a decoder, which is cut into layers, or an ImpRAG model, which goes on.

    Args:
        backbone: Hub id or folder, or a loaded decoder.
        tokenizer: by default the one that is where the decoder is.
        trust_remote_code: for decoders whose code lies in their repository.
        **config: fields of `ImpRAGConfig`; None leaves a field to the model, or to the default.

    Raises:
        UserError: it cannot be loaded, is no decoder, or has other layer boundaries than those asked for.
    """
    given = {key: value for key, value in config.items() if value is not None}
    given_model, name = unwrapped(backbone), name_of(backbone)
    refuse_missing_folder(name, "the backbone")
    with loading(f"cannot make an ImpRAG model of {name!r}", name):
        if isinstance(given_model, str) and is_imprag(name):
            loaded = load_imprag_checkpoint(name)
            for key, value in given.items():
                if key in ("b", "t") and getattr(loaded.model.config, key) != value:
                    raise UserError(
                        f"{name} was trained with {key}={getattr(loaded.model.config, key)}: go on with that"
                    )
                setattr(loaded.model.config, key, value)
            return loaded
        if isinstance(given_model, str):
            if is_encoder(given_model, trust_remote_code=trust_remote_code):
                raise UserError(f"the backbone {name!r} is an encoder: give a decoder, which predicts the next token")
            refuse_pickles(name)
        model: Any = ImpRAGForCausalLM.from_backbone(given_model, trust_remote_code=trust_remote_code, **given)
        tokenizer = tokenizer_of(backbone, tokenizer, trust_remote_code=trust_remote_code)
    return ImpRAGCheckpoint(model, _complete(tokenizer, name))


def load_imprag_checkpoint(folder: str | Path, dtype: torch.dtype | str = torch.float32) -> ImpRAGCheckpoint:
    """Loads a folder that `ImpRAGTrainer` saved, or a published model, in eval mode, adapters merged.

    The classes are this package's: the code that lies in the folder is not run.

    Args:
        folder: folder or Hub id.
        dtype: of the weights; "auto" for what the folder says. Adapters and their model are always in float32.

    Raises:
        UserError: it is no ImpRAG model, or is damaged.
    """
    refuse_missing_folder(str(folder), "the model")
    if not is_imprag(folder):
        raise UserError(f"{folder} is not an ImpRAG model (its config.json does not say model_type imprag)")
    with loading(f"cannot load {folder}", folder):
        if (Path(folder) / "adapter_model.safetensors").is_file():
            model = _with_adapters(Path(folder))
        else:
            model = load_whole(ImpRAGForCausalLM, folder, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder, config=model.config)
    return ImpRAGCheckpoint(model.eval(), _complete(tokenizer, folder))


def _with_adapters(folder: Path) -> ImpRAGForCausalLM:
    config = ImpRAGConfig.from_pretrained(folder)
    base = config.backbone._name_or_path if config.backbone is not None else ""
    if not base:
        raise UserError(f"{folder}/config.json does not name the model its adapters belong to")
    fields = {name: getattr(config, name) for name in ("b", "t", "k", "l_max", "passage_encoding")}
    merged: ImpRAGForCausalLM = load_adapters(load_imprag(base, **fields).model, folder).merge_and_unload()
    return merged


def _complete(tokenizer: PreTrainedTokenizerBase, name: str | Path) -> PreTrainedTokenizerBase:
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {name} has no EOS token, which ends passages and answers: set one")
    return tokenizer
