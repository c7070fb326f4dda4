"""Models that a trainer's constructor gets: by name or loaded, as in TRL."""

import os
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from revela_hub.errors import UserError
from revela_hub.hub_cards.method import Method
from revela_hub.loading import hub_name, pinned
from revela_hub.retrieval.encoder import model_in
from revela_hub.trainers.base.arguments import RunArguments

ModelLike: TypeAlias = str | Path | PreTrainedModel | SentenceTransformer
"""A Hub id (`owner/name` or `owner/name@revision`), a folder, or a loaded model."""

_Arguments = TypeVar("_Arguments", bound=RunArguments)


def trained_transformer(retriever: SentenceTransformer) -> Any:
    """Return the module in training that reads texts, a Transformer or static embeddings: of queries, if the model has two routes."""
    first: Any = retriever[0]
    if not isinstance(first, Router):
        return first
    route: Any = first.sub_modules["query"]
    return route[0]


def trained_backbone(retriever: SentenceTransformer) -> PreTrainedModel | None:
    """Return the transformers model in training; None for models without one, such as static embeddings."""
    return getattr(trained_transformer(retriever), "auto_model", None)


def unwrapped(model: ModelLike) -> str | PreTrainedModel:
    """Return the id or folder, or the transformers model inside a loaded one."""
    if isinstance(model, str | Path):
        return os.path.expanduser(pinned(str(model)))
    if not isinstance(model, SentenceTransformer):
        return model
    if (inner := trained_backbone(model)) is None:
        kind = type(trained_transformer(model)).__name__
        raise UserError(f"the model is a {kind} model: this method needs one with a transformer")
    return inner


def retriever_in(model: ModelLike) -> ModelLike:
    """Return the only sentence-transformers model in the output folder of a run; anything else is returned unchanged."""
    return model_in(str(model)) if isinstance(model, str | Path) else model


def name_of(model: ModelLike) -> str:
    """Return the id or folder that a model was or will be loaded from; "" if unknown."""
    if isinstance(model, SentenceTransformer) and trained_backbone(model) is None:
        return str(model.model_card_data.base_model or "")
    given = unwrapped(model)
    return given if isinstance(given, str) else name_in(given.config)


def name_in(config: PreTrainedConfig) -> str:
    """Return the id or folder that the model of a configuration was or will be loaded from; "" if unknown."""
    parts = [getattr(config, name, None) for name in ("retriever", "encoder", "backbone", "text_config")]
    names = [getattr(part, "name_or_path", "") for part in (config, *parts)]
    return next((str(name) for name in names if name), "")


def default_arguments(kind: type[_Arguments], model: ModelLike, method: Method, **settings: Any) -> _Arguments:
    """Return default training arguments, with an output folder named after the model and the method."""
    return kind(output_dir=f"{Path(hub_name(name_of(model))).name or 'model'}-{method.title}", **settings)


def tokenizer_of(
    model: ModelLike, given: PreTrainedTokenizerBase | None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the given tokenizer, or that of a model; raise a `UserError` if it is unknown where a loaded model came from."""
    if given is not None:
        return given
    if isinstance(model, SentenceTransformer):
        return model.tokenizer  # type: ignore[no-any-return]
    if not (name := name_of(model)):
        raise UserError(f"cannot find the tokenizer of this {type(model).__name__}: pass it as well")
    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
