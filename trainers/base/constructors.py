"""Constructors of trainers: their arguments have TRL's names, earlier names are accepted, and a failure changes no model."""

from collections.abc import Callable, Iterator
from copy import copy
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, get_args

from torch import nn
from transformers import PreTrainedConfig

from revela_hub.errors import UserError

Parameters = ParamSpec("Parameters")


def constructor(init: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Let a trainer's constructor accept earlier names of arguments, and leave loaded models as they were if it fails.

    Arguments of TRL's trainers that the constructor does not have are a `UserError`.
    """
    own = signature(init).parameters
    kind, _ = get_args(own["args"].annotation)  # the class of its arguments, or None

    @wraps(init)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        given: Any = kwargs
        use_new_names(given)
        trainer = type(args[0]).__name__
        _refuse_unused(trainer, list(own), given)
        arguments = given.get("args") or dict(zip(own, args, strict=False)).get("args")
        if arguments is not None and not isinstance(arguments, kind):
            raise UserError(f"args is of type {type(arguments).__name__}: pass {kind.__name__}(...)")
        if "train_dataset" in own:
            given.setdefault("train_dataset", None)  # the constructor's error names the columns
        models = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        modules = [module for model in models for module in model.modules()]
        states = [(each, _state(each)) for module in modules for each in (module, *_configs(module))]
        weights = [(weight, weight.requires_grad, weight.dtype) for model in models for weight in model.parameters()]
        try:
            init(*args, **kwargs)
        except BaseException as error:
            for each, state in states:
                vars(each).clear()
                vars(each).update(state)
            for weight, trained, dtype in weights:
                weight.data = weight.data.to(dtype)
                weight.requires_grad_(trained)
            if isinstance(error, TypeError) and "multiple values for keyword argument" in str(error):
                raise UserError(f"{trainer} sets {str(error).split()[-1]} itself: leave it out") from error
            raise

    return checked


def use_new_names(given: dict[str, Any]) -> None:
    """Rename the earlier arguments `tokenizer` and `trust_remote_code` to `processing_class` and `model_init_kwargs`."""
    if "tokenizer" in given:
        tokenizer = given.pop("tokenizer")
        given["processing_class"] = given.get("processing_class") or tokenizer
    if "trust_remote_code" in given:
        code = {"trust_remote_code": given.pop("trust_remote_code")}
        given["model_init_kwargs"] = code | (given.get("model_init_kwargs") or {})


def _refuse_unused(trainer: str, own: list[str], given: dict[str, Any]) -> None:
    """Raise a `UserError` for an argument of TRL's trainers that has no effect on a trainer without this parameter."""
    if given.get("model_init") is not None:
        raise UserError(f"{trainer} is constructed with its model: leave out model_init")
    if given.get("peft_config") is not None and "peft_config" not in own:
        raise UserError(f"{trainer} trains all weights: leave out peft_config")
    if given.get("processing_class") is not None and "processing_class" not in own:
        names = [name for name in own if name.endswith("tokenizer")]
        remedy = f"pass {' and '.join(names)}" if names else "set the tokenizer of the loaded model instead"
        raise UserError(f"{trainer} has no processing_class, because a retriever comes with its tokenizer: {remedy}")


def _state(owner: Any) -> dict[str, Any]:
    """Return the attributes of a module or configuration, with copies of its dictionaries of modules, weights and hooks."""
    return {name: copy(value) if isinstance(value, dict | set) else value for name, value in vars(owner).items()}


def _configs(owner: Any) -> Iterator[PreTrainedConfig]:
    """Return the configurations of a module, and those in them."""
    for value in list(vars(owner).values()):
        if isinstance(value, PreTrainedConfig):
            yield value
            yield from _configs(value)


def known(given: dict[str, Any] | None, *names: str) -> dict[str, Any]:
    """Return arguments for loading a model (`model_init_kwargs`); raise a `UserError` for one that would have no effect."""
    given = given or {}
    if unknown := [name for name in given if name not in names]:
        raise UserError(
            f"unknown argument {unknown[0]!r} for loading the model: use {', '.join(names)}, or leave it out"
        )
    return given


def config_fields(kind: type[PreTrainedConfig]) -> list[str]:
    """Return the names of a configuration's own fields, without those that are configurations."""
    without = ("self", "kwargs", *kind.sub_configs)
    return [name for name in signature(kind.__init__).parameters if name not in without]
