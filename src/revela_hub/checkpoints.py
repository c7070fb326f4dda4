"""Exports and publishes checkpoints: finds the method that saved one, by its record in `trainers/methods.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from revela_hub.data.own_folder import check_free
from revela_hub.errors import UserError
from revela_hub.hub_cards.assemble import Assemble, Assembly, assemble_part, copy_finished, export_parts
from revela_hub.hub_cards.card import OURS
from revela_hub.hub_cards.method import Method
from revela_hub.hub_cards.repository import Destination
from revela_hub.hub_cards.upload import Published
from revela_hub.hub_cards.upload import publish as publish_assembled
from revela_hub.hub_cards.verify.contents import read_json
from revela_hub.trainers.common.checkpoints import RECORD
from revela_hub.trainers.methods import METHODS as METHODS


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    lm: bool = False,
    max_length: int | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Writes the folders of a checkpoint's method, ready to be loaded: `METHODS[...].folders` names them, `parts` says how.

    Args:
        checkpoint: folder the trainer saved, with full weights or with LoRA adapters (they are merged).
        output: folder to write into.
        lm: also write the co-trained language model to `output/lm`, an ordinary `AutoModelForCausalLM` folder.
        max_length: tokens kept of a text, EOS included; by default those of the checkpoint.
        dtype: type of the stored weights; by default the one they have.

    Raises:
        UserError: the folder is not a checkpoint, or has no language model; a model would be written over files that are
            not of an export or a run.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    method = method_of(checkpoint)
    folders = [output / name for name in [*method.folders, *(["lm"] if lm else [])]]
    for folder in folders:
        check_free(folder, "--output_dir", lambda folder: (folder / OURS).is_dir() or (output / RECORD).is_file())
    for folder in folders:
        (folder / OURS).mkdir(parents=True, exist_ok=True)
    export_parts(method, checkpoint, output, lm=lm, assembly=Assembly(max_length=max_length, dtype=dtype))
    return output


def publish(
    checkpoint: str | Path,
    destination: Destination,
    assembly: Assembly | None = None,
    *,
    dry_run: bool = False,
    keep: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Published:
    """Publishes a checkpoint, or a finished sentence-transformers folder, on the Hub, or refuses to and says why.

    Args:
        checkpoint: folder that a trainer saved, or a finished sentence-transformers folder.
        destination: where to.
        assembly: what of it, and how.
        dry_run: stop before the upload; the Hub is asked nothing but, with `update`, what is there now.
        keep: folder to leave the assembled files in; they are deleted otherwise.
        say: told, before the upload, what it will delete.

    Raises:
        UserError: the checkpoint cannot be assembled, a check failed, or the Hub refused; the message says what is visible.
    """
    checkpoint = Path(checkpoint)
    finished = (checkpoint / "modules.json").is_file()
    assemble: Assemble = copy_finished if finished else partial(assemble_part, method_of(checkpoint))
    return publish_assembled(
        assemble, checkpoint, destination, assembly, dry_run=dry_run, keep=keep, methods=METHODS, say=say
    )


def method_of_model(name: str | Path) -> Method | None:
    """The method of a model, a folder or Hub id, by its config.json; None for a model of any other kind."""
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError):  # no such model
        return None
    return next((method for method in METHODS.values() if method.model_type == fields.get("model_type")), None)


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a folder is what a run of ours left behind to go on from, and not a model for readers."""
    folder = Path(folder)
    left = ("trainer_state.json", "training_args.bin", "adapter_model.safetensors", "trained.safetensors", "run.json")
    if (folder / "modules.json").exists() or not any((folder / name).exists() for name in left):
        return False
    try:
        method_of(folder)
    except UserError:
        return False
    return True


def method_of(checkpoint: Path) -> Method:
    """The method that saved a checkpoint, by the `model_type` in its config.json.

    Raises:
        UserError: the folder is not a checkpoint of any method.
    """
    for method in METHODS.values():
        for folder in dict.fromkeys((checkpoint, checkpoint / method.config_folder)):
            config = read_json(folder / "config.json")
            if method.model_type and isinstance(config, dict) and config.get("model_type") == method.model_type:
                return method
    finished = next((name for name in ("retriever", "model") if (checkpoint / name / "config.json").is_file()), None)
    remedy = f"; the model that its run exported is {checkpoint / finished}" if finished else ""
    types = ", ".join(method.model_type for method in METHODS.values() if method.model_type)
    raise UserError(
        f"{checkpoint} is not a checkpoint: it has no config.json of {types}, and no modules.json either{remedy}"
    )
