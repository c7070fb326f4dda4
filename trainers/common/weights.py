"""Weights of a checkpoint: all of them, and from safetensors, or an error."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from revela_hub.errors import UserError
from revela_hub.pickles import pretrained, refuse_pickles

Model = TypeVar("Model", bound=PreTrainedModel)


def checkpoint_config(folder: str | Path, model_type: str, title: str) -> dict[str, Any]:
    """Return the fields of the config.json of a checkpoint.

    Args:
        folder: checkpoint folder.
        model_type: expected model type.
        title: name of the method, for the message.

    Raises:
        UserError: the folder has no config.json, or one of another model type.
    """
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{folder} is not a checkpoint: it has no config.json")
    fields: dict[str, Any] = PreTrainedConfig.get_config_dict(folder)[0]
    if fields.get("model_type") != model_type:
        raise UserError(f"{Path(folder) / 'config.json'} is not of a {title} checkpoint")
    return fields


def load_whole(kind: type[Model], folder: str | Path, **options: Any) -> Model:
    """A model of which every weight is in the folder; transformers would draw at random what is not.

    Args:
        kind: the model's class.
        folder: folder or Hub id.
        **options: of `from_pretrained`.

    Raises:
        UserError: weights are missing, or of another shape.
    """
    # With the information on what was loaded comes a pair, which the method's annotation does not say.
    loaded: Any = pretrained(kind, folder, output_loading_info=True, **options)
    model: Model = loaded[0]
    report = loaded[1]
    refuse(folder, "its weights lack", report["missing_keys"])
    refuse(folder, "of another shape than the model's is", [key[0] for key in report["mismatched_keys"]])
    return model


def load_in_place(model: nn.Module, files: Iterable[Path], expected: set[str]) -> bool:
    """Load weights from safetensors files into a model; return whether they are exactly its own.

    Args:
        model: model whose weights are replaced.
        files: files to read.
        expected: names of the weights that the files must contain together.
    """
    for file in sorted(files):
        weights = load_file(file)
        if model.load_state_dict(weights, strict=False).unexpected_keys:
            return False
        expected = expected - weights.keys()
    return not expected


def load_adapters(model: PreTrainedModel, folder: Path) -> PeftModel:
    """The model with the adapters of `folder/adapter_model.safetensors`, all of them; peft would only warn.

    Raises:
        UserError: adapters are missing, or belong to another model.
    """
    refuse_pickles(folder)
    adapted = PeftModel.from_pretrained(model, folder)
    expected = set(get_peft_model_state_dict(adapted))
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as weights:
        found = set(weights.keys())
    refuse(folder, "its adapters lack", expected - found)
    refuse(folder, "its adapters belong to another model, which has no", found - expected)
    return adapted


def refuse(folder: str | Path, fault: str, names: Any) -> None:
    """Raises a `UserError` if there are such names."""
    if first := sorted(map(str, names)):
        more = f" and {len(first) - 1} more" if len(first) > 1 else ""
        raise UserError(f"cannot load {folder}: {fault} {first[0]}{more}")


def refuse_remote_code(name: str, model: nn.Module) -> None:
    """Refuses a model whose code lies in its repository: a checkpoint could not be built again from transformers alone.

    Raises:
        UserError: it is one.
    """
    if remote := sorted(
        {type(m).__name__ for m in model.modules() if type(m).__module__.startswith("transformers_modules")}
    ):
        raise UserError(
            f"the code of {name} ({remote[0]}) lies in its repository, so what is trained of it could not be saved, exported"
            " or published: choose a model of an architecture that transformers has itself"
        )
