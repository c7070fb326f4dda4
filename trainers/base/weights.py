"""Load a checkpoint's weights from safetensors, raising an error if any are missing, and check models before a run."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from revela_hub.errors import UserError, loading
from revela_hub.loading import model_json, pretrained
from revela_hub.trainers.base.models import ModelLike, name_of, tokenizer_of, unwrapped

Model = TypeVar("Model", bound=PreTrainedModel)


def checkpoint_config(folder: str | Path, model_type: str, title: str) -> dict[str, Any]:
    """Return the fields of a checkpoint's config.json; raise a `UserError` if it is missing or of another model type."""
    file = Path(folder) / "config.json"
    fields: dict[str, Any] = PreTrainedConfig.get_config_dict(folder)[0] if file.is_file() else {}
    if fields.get("model_type") != model_type:
        raise UserError(f"{file} is missing, or is not of a {title} checkpoint")
    return fields


def config_fields(kind: type[PreTrainedConfig]) -> list[str]:
    """Return the names of a configuration's own fields, without those that are configurations."""
    return [name for name in kind.__annotations__ if name not in kind.sub_configs]


def check_fields(given: Iterable[str], *names: str) -> None:
    """Raise a `TypeError` for a field with another name, which transformers would store in the configuration and ignore."""
    if other := set(given) - set(names):
        raise TypeError(f"unexpected argument {min(other)!r}: the arguments are {', '.join(names)}")


def load_whole(kind: type[Model], folder: str | Path, **options: Any) -> Model:
    """Load a model from a folder or Hub id with `from_pretrained(folder, **options)`."""
    # With `output_loading_info`, `from_pretrained` returns a pair, contrary to its annotation.
    loaded: Any = pretrained(kind, folder, output_loading_info=True, **options)
    model: Model = loaded[0]
    raise_for_names(folder, "missing weight", loaded[1]["missing_keys"])
    raise_for_names(folder, "weight with the wrong shape:", [key[0] for key in loaded[1]["mismatched_keys"]])
    return model


def load_start(
    kind: type[Model],
    start: ModelLike,
    new: Callable[..., Model],
    config: dict[str, Any],
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    trust_remote_code: bool,
    attn_implementation: str | None,
) -> tuple[Model, PreTrainedTokenizerBase]:
    """Load a saved model with a decoder to train it further, or make one of an encoder with `new`, and its tokenizer.

    `config` are fields of its configuration; with None, the default or the saved model's value is used.
    """
    kind_config: Any = kind.config_class
    check_fields(config, *config_fields(kind_config))
    config = {field: value for field, value in config.items() if value is not None}
    given, name = unwrapped(start), name_of(start)
    with loading(f"cannot load the encoder {name!r}", name):
        fields = {} if isinstance(given, PreTrainedModel) else model_json(given, "config.json") or {}
        if fields.get("model_type") != kind_config.model_type:
            if isinstance(given, str):
                refuse_fused(given)
            load = {"trust_remote_code": trust_remote_code, "attn_implementation": attn_implementation}
            return new(given, **load, **config), tokenizer_of(start, tokenizer, trust_remote_code=trust_remote_code)
        saved_as = fields.get("architectures") or []
        if "ForPreTraining" in kind.__name__ and kind.__name__ not in saved_as:
            raise UserError(f"{name} has no decoder: start from a pre-training checkpoint or an encoder")
        model = load_whole(kind, name, dtype=torch.float32)
        for field, value in config.items():
            if (kept := getattr(model.config, field)) != value:
                raise UserError(f"{name} was trained with {field}={kept}: keep that, or start from its encoder")
        if attn_implementation is not None:
            model.set_attn_implementation(attn_implementation)
        # Given the configuration, transformers does not ask to run the folder's code in order to read it.
        return model, tokenizer or AutoTokenizer.from_pretrained(name, config=model.config)


def load_saved(kind: type[Model], folder: Path) -> tuple[Model, PreTrainedTokenizerBase]:
    """Load a folder that a trainer saved, in float32 and in eval mode, and its tokenizer."""
    with loading(f"cannot load {folder}", folder):
        model = load_whole(kind, folder, dtype=torch.float32)
        return model.eval(), AutoTokenizer.from_pretrained(folder, config=model.config)


def load_in_place(model: nn.Module, files: Iterable[Path], expected: set[str]) -> bool:
    """Load weights from safetensors files into a model; return whether they are its own, and all that are `expected`."""
    own = model.state_dict()
    for file in sorted(files):
        weights = load_file(file)
        if weights.keys() - own.keys():
            return False
        model.load_state_dict(weights, strict=False)
        expected = expected - weights.keys()
    return not expected


def raise_for_names(folder: str | Path, fault: str, names: Any) -> None:
    """Raise a `UserError` for the first of the names, if any."""
    if first := sorted(map(str, names)):
        more = f" and {len(first) - 1} more" if len(first) > 1 else ""
        raise UserError(f"cannot load {folder}: {fault} {first[0]}{more}")


def refuse_remote_code(name: str, modules: Iterable[nn.Module]) -> None:
    """Raise a `UserError` if modules of a model are remote code, so that its checkpoints cannot be loaded."""
    if remote := sorted({type(m).__name__ for m in modules if type(m).__module__.startswith("transformers_modules")}):
        raise UserError(
            f"{name} requires remote code ({remote[0]}), so the trained model could not be saved, exported or published:"
            " choose a model whose architecture is part of transformers"
        )


def refuse_fused(name: str) -> None:
    """Raise a `UserError` for a pre-training checkpoint with encoder and decoder, where an encoder is needed."""
    fields = model_json(name, "config.json") or {}
    kind = ", ".join(fields.get("architectures") or [])
    if "auto_map" in fields and "ForPreTraining" in kind:
        raise UserError(f"{name} is a {kind} checkpoint with encoder and decoder: use the encoder exported from it")


def is_encoder(model: str | PreTrainedModel, *, trust_remote_code: bool = False) -> bool:
    """Whether a model is bidirectional, as BERT is; transformers would load it as a causal model without an error."""
    given: Any = model
    named = isinstance(model, str)
    config = AutoConfig.from_pretrained(given, trust_remote_code=trust_remote_code) if named else given.config
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
