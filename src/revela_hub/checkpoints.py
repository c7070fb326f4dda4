"""Export and publish checkpoints of any method; the methods are listed in `trainers/methods.py`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from revela_hub.adaptation import REPORT
from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.hub_cards.assemble import Assemble, Assembly, assemble_part, copy_finished, export_parts
from revela_hub.hub_cards.card import METADATA_FOLDER
from revela_hub.hub_cards.contents import read_json
from revela_hub.hub_cards.method import Method
from revela_hub.hub_cards.repository import Destination
from revela_hub.hub_cards.upload import Published
from revela_hub.hub_cards.upload import publish as publish_assembled
from revela_hub.loading import model_json
from revela_hub.trainers.base.checkpoints import RECORD
from revela_hub.trainers.base.retriever import RETRIEVER
from revela_hub.trainers.methods import METHODS as METHODS


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    lm: bool = False,
    max_length: int | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Export a checkpoint to the model folders of its method; see `Method.folders`.

    Args:
        checkpoint: folder that the trainer saved, with full weights or LoRA adapters (which are merged).
        output: folder to write to.
        lm: also write the language model to `output/lm`, which `AutoModelForCausalLM` loads.
        max_length: maximum length in tokens with EOS; by default that of the checkpoint.
        dtype: type of the stored weights; by default unchanged.

    Raises:
        UserError: the folder is not a checkpoint or has no language model, or the export would overwrite other files.
    """
    checkpoint, output = local_path(checkpoint), local_path(output)
    method, own = method_of(checkpoint), output.resolve() == checkpoint.resolve()
    folders: dict[str, str] = ({"lm": "lm"} if lm else {}) | {**method.folders}
    for folder in [output / name for name in folders]:
        of_a_run = (output / RECORD).is_file()  # its result is not replaced by that of one of its checkpoints
        replaceable = own or ((folder / METADATA_FOLDER).is_dir() and not of_a_run)
        if folder.exists() and not replaceable and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists, and is not an earlier export of this kind: choose another --output_dir")
    export_parts(method, checkpoint, output, folders, assembly=Assembly(max_length=max_length, dtype=dtype))
    return output


def publish(
    checkpoint: str | Path,
    destination: Destination | str,
    assembly: Assembly | None = None,
    *,
    dry_run: bool = False,
    keep: str | Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Published:
    """Publish a checkpoint or a finished sentence-transformers folder on the Hub, if all checks pass.

    Args:
        checkpoint: folder that a trainer saved, output folder of a training command or of `adapt`, or a finished sentence-transformers
            folder.
        destination: where to publish: `namespace/name`, or a `Destination` with more settings.
        assembly: options.
        dry_run: stop before the upload; the Hub is only accessed with `update`, to compare the files.
        keep: folder for the assembled files, which are deleted by default.
        log: called before the upload with each file that will be deleted.

    Raises:
        UserError: the checkpoint cannot be assembled, a check fails, or the commit has other files than the local ones.
    """
    if isinstance(destination, str):
        destination = Destination(destination)
    checkpoint = exported_retriever(local_path(checkpoint))
    finished = (checkpoint / "modules.json").is_file()
    assemble: Assemble = copy_finished if finished else partial(assemble_part, method_of(checkpoint))
    return publish_assembled(
        assemble, checkpoint, destination, assembly, dry_run=dry_run, keep=keep, methods=METHODS, log=log
    )


def exported_retriever(folder: Path) -> Path:
    """Return `retriever/` of a finished run that exported nothing else, such as `train pairs` or `adapt`; else the folder."""
    exported = folder / RETRIEVER
    ours = (folder / RECORD).is_file() or (folder / REPORT).is_file()
    alone = ours and not (folder / "config.json").exists()
    return exported if alone and (exported / "modules.json").is_file() else folder


def method_of_model(name: str | Path) -> Method | None:
    """Return the method of a model (a folder or Hub id) by its config.json; None for other models."""
    try:
        model_type = (model_json(name, "config.json") or {}).get("model_type")
    except (OSError, ValueError):  # the model does not exist
        return None
    return next((method for method in METHODS.values() if method.model_type == model_type), None)


def is_checkpoint(folder: str | Path) -> bool:
    """Return whether a folder is a training checkpoint, not an exported model."""
    folder = local_path(folder)
    files = ("trainer_state.json", "training_args.bin", "adapter_config.json", RECORD)
    if (folder / "modules.json").exists() or not any((folder / name).exists() for name in files):
        return False
    try:
        method_of(folder)
    except UserError:
        return False
    return True


def method_of(checkpoint: Path) -> Method:
    """Return the method of a checkpoint by the `model_type` in its config.json."""
    for method in METHODS.values():
        for folder in dict.fromkeys((checkpoint, checkpoint / method.config_folder)):
            if method.model_type and read_json(folder / "config.json", {}).get("model_type") == method.model_type:
                return method
    if (checkpoint / "modules.json").is_file():
        raise UserError(f"{checkpoint} is a finished model, not a checkpoint: use or publish it as it is")
    names = [name for method in METHODS.values() for name in method.folders]
    exported = next((f"; did you mean {checkpoint / name}?" for name in names if (checkpoint / name).is_dir()), "")
    raise UserError(
        f"{checkpoint} is not a checkpoint: its config.json has none of the model types of the methods{exported}"
    )
