"""Export and publish checkpoints of any method; the methods are listed in `trainers/methods.py`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from revela_hub.errors import UserError
from revela_hub.files import atomic, cache_folder, key_of, local_path
from revela_hub.hub_cards.assemble import Assemble, Assembly, assemble_part, copy_finished, export_parts
from revela_hub.hub_cards.card import METADATA_FOLDER
from revela_hub.hub_cards.contents import HYBRID, read_json
from revela_hub.hub_cards.method import Method
from revela_hub.hub_cards.repository import Destination
from revela_hub.hub_cards.upload import Published
from revela_hub.hub_cards.upload import publish as publish_assembled
from revela_hub.loading import PEFT_ADAPTER, model_json, model_kind
from revela_hub.retrieval.encoder import model_identity, model_in
from revela_hub.trainers.base.checkpoints import RECORD, last_checkpoint
from revela_hub.trainers.methods import METHODS as METHODS


class ModelRef(NamedTuple):
    """The Hub id or folder of a model, and its method by its `model_type`: of a checkpoint or a model with remote code.

    The path of an output folder of `adapt` or `train` is its only retriever, unless the folder is a checkpoint, too. That of a bare
    PEFT adapter is the folder in the cache of the retriever that it is merged into.
    """

    path: str
    method: Method | None

    @property
    def finished(self) -> bool:
        """Whether it is a sentence-transformers folder, not a checkpoint."""
        return (local_path(self.path) / "modules.json").is_file()


def resolve(name: str | Path) -> ModelRef:
    """Return the model of a folder or a Hub id."""
    if (method := _method_of(name)) is not None:
        return ModelRef(str(name), method)
    path = model_in(str(name))
    return ModelRef(str(_merged_adapter(path)) if is_adapter(path) else path, None)


def is_adapter(name: str | Path) -> bool:
    """Return whether a model is a bare PEFT adapter, not a checkpoint with adapters."""
    return model_kind(name) == PEFT_ADAPTER and _method_of(name) is None


def _method_of(name: str | Path) -> Method | None:
    folder = local_path(name)
    folders = {folder / method.config_folder for method in METHODS.values()}
    places = filter(Path.is_dir, folders) if folder.is_dir() else [name]
    try:
        types = {(model_json(place, "config.json") or {}).get("model_type") for place in places}
    except (OSError, ValueError):  # the model does not exist: loading reports it
        return None
    return next((method for method in METHODS.values() if method.model_type in types), None)


def _merged_adapter(name: str) -> Path:
    base = model_json(name, "adapter_config.json")["base_model_name_or_path"]
    folder = cache_folder("adapters") / key_of(model_identity(name), model_identity(base))
    if not folder.is_dir():
        from revela_hub.hub_cards.peft_adapters import export_adapter

        with atomic(folder) as new:
            export_adapter(name, new)
    return folder


def checkpoint_method(ref: ModelRef) -> Method:
    """Return the method of a checkpoint; a finished or unknown model is a `UserError`."""
    if ref.finished:
        raise UserError(f"{ref.path} is a finished model, not a checkpoint: use or publish it as it is")
    if ref.method is None:
        folder = local_path(ref.path)
        if last_checkpoint(folder) or (folder / "work" / "state.json").is_file():  # of train or adapt
            how = "repeat its command (adapt as it was, train with --resume_from_checkpoint last)"
            raise UserError(f"the run in {folder} is unfinished: {how}")
        fault = f"{ref.path} {'has no model' if folder.exists() else 'does not exist'}"
        raise UserError(f"{fault}: give the output folder of train or adapt, or a sentence-transformers folder")
    return ref.method


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    lm: bool = False,
    max_length: int | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Export a checkpoint, with merged adapters, to the model folders of its method (`Method.folders`), and with `lm` to `output/lm`.

    The maximum length in tokens with EOS and the type of the weights are those of the checkpoint, unless given.
    """
    checkpoint, output = local_path(checkpoint), local_path(output)
    method, own = checkpoint_method(resolve(checkpoint)), output.resolve() == checkpoint.resolve()
    folders: dict[str, str] = ({"lm": "lm"} if lm else {}) | {**method.folders}
    for folder in [output / name for name in folders]:
        of_a_run = (output / RECORD).is_file()  # its result is not replaced by that of one of its checkpoints
        replaceable = own or ((folder / METADATA_FOLDER).is_dir() and not of_a_run)
        if folder.exists() and not replaceable and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists, and is not an earlier export of this kind: choose another output folder")
    export_parts(method, checkpoint, output, folders, assembly=Assembly(max_length=max_length, dtype=dtype))
    return output


def no_gain(folder: Path) -> str:
    """Return why an exported model or run is not published; empty if training, or BM25 and late interaction, brought a gain."""
    places = (folder / "outcome.json", folder.parent / "outcome.json")
    fitted, outcome = read_json(folder / HYBRID, {}), read_json(next(filter(Path.is_file, places), places[0]), {})
    if fitted.get("verdict") == "BETTER" or (outcome.get("step") != 0 and fitted.get("trained") is not False):
        return ""
    found = "; BM25 and late interaction: {difference:+.3f} [{low:+.3f}, {high:+.3f}], not significant with {queries} queries"
    return f"nothing to publish: base model kept{found.format(**fitted['difference']) if fitted else ''}"


def publish(
    checkpoint: str | Path,
    destination: Destination | str,
    assembly: Assembly | None = None,
    *,
    dry_run: bool = False,
    keep: str | Path | None = None,
    log: Callable[[str], None] = lambda line: None,
    before_upload: Callable[[], object] = lambda: None,
) -> Published:
    """Publish a checkpoint or a finished sentence-transformers folder on the Hub, if all checks pass.

    Args:
        checkpoint: folder that a trainer saved, output folder of a training command or of `adapt`, or a finished sentence-transformers
            folder.
        destination: where to publish: `namespace/name`, or a `Destination` with more settings.
        assembly: options.
        dry_run: stop before the upload; the Hub is only accessed with `update`, to compare the files.
        keep: folder for the assembled files, which are deleted by default.
        log: called with a line on an unchanged base model, and with each file that will be deleted.
        before_upload: called when all checks have passed.

    Raises:
        UserError: the checkpoint cannot be assembled, a check fails, the model is the base model unchanged, or the commit has
            other files than the local ones.
    """
    if isinstance(destination, str):
        destination = Destination(destination)
    model = resolve(checkpoint)
    folder = local_path(model.path)
    if (model.finished or (folder / "outcome.json").is_file()) and (reason := no_gain(folder)):
        raise UserError(f"{reason} ({folder})")
    fitted = read_json(folder / HYBRID, {})
    if fitted.get("trained") is False:
        base = fitted.get("base") or "the base model"
        log(f"the weights are those of {base}, unchanged: only the search settings in {HYBRID} are new")
    assemble: Assemble = copy_finished if model.finished else partial(assemble_part, checkpoint_method(model))
    options: dict[str, Any] = {"dry_run": dry_run, "keep": keep, "log": log, "before_upload": before_upload}
    return publish_assembled(assemble, model.path, destination, assembly, methods=METHODS, **options)
