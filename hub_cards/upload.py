"""Publish a model: assemble a folder, verify it in a clean process, and upload it in one commit."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from huggingface_hub import metadata_load, snapshot_download

from revela_hub.errors import UserError, loading
from revela_hub.files import local_path
from revela_hub.hub_cards.assemble import REFERENCE, Assemble, Assembled, Assembly
from revela_hub.hub_cards.card import CARD_METADATA, METADATA_FOLDER, write_card
from revela_hub.hub_cards.clean_process import verify
from revela_hub.hub_cards.contents import Check, contents, copy_model, is_of_model
from revela_hub.hub_cards.metadata import ModelCardMetadata, hub_model_id
from revela_hub.hub_cards.method import Method, vectors_of
from revela_hub.hub_cards.repository import Destination, Repository, files_of

# Downloaded for a check: no weights in other formats.
_CHECKED = ["*.safetensors", "*.json", "*.txt", "*.md", "*.model", "*.spm", "*.jinja", "*.py"]


@dataclass(frozen=True)
class Published:
    """The result of publishing."""

    checks: list[Check]
    files: dict[str, int]  #: path -> size
    skipped: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)  #: files of the previous model
    url: str | None = None  #: None after a dry run
    commit: str | None = None


def publish(
    assemble: Assemble,
    checkpoint: str | Path,
    destination: Destination,
    assembly: Assembly | None = None,
    *,
    dry_run: bool = False,
    keep: str | Path | None = None,
    methods: Mapping[str, Method] = MappingProxyType({}),
    log: Callable[[str], None] = lambda line: None,
    before_upload: Callable[[], object] = lambda: None,
) -> Published:
    """Publish the folder that `assemble` makes from a checkpoint, with a card for one of the methods.

    `revela_hub.checkpoints.publish` finds both itself, and documents the other arguments.
    """
    checkpoint, assembly = local_path(checkpoint), assembly or Assembly()
    repository = Repository(destination)
    if not dry_run or destination.update:
        repository.read()  # before the work, to report errors early
    with tempfile.TemporaryDirectory(prefix="revela-hub-") as scratch:
        work = local_path(keep or scratch)
        if (work / "model").exists():
            raise UserError(f"{work / 'model'} exists already: choose another folder, or delete it")
        work.mkdir(parents=True, exist_ok=True)
        assembled = _assembled(assemble, checkpoint, work, destination.repo_id, assembly, methods)
        folder = assembled.folder
        checks = verify(
            folder,
            trust_remote_code=assembled.remote_code,
            reference=assembled.reference,
            vectors=vectors_of(folder, methods),
            timeout=assembly.timeout,
        )
        if fault := next((f"{check.name}: {check.detail}" for check in checks if not check.ok), ""):
            raise UserError(f"not published: {fault}")
        if not (metadata_load(folder / "README.md") or {}).get("license"):
            log("the card has no license: `revela-hub publish --card FILE` adds it, with license: apache-2.0 in FILE")
        files = files_of(folder)
        delete = sorted(name for name in repository.names - files.keys() if is_of_model(name))
        sizes = {name: (folder / name).stat().st_size for name in files}
        published = Published(checks, sizes, assembled.skipped, delete)
        if dry_run:
            return published
        for name in delete:
            log(f"{destination.repo_id}: deleting {name} of the previous model")
        before_upload()
        commit, url = repository.commit(files, delete)
    return replace(published, url=url, commit=commit)


def _assembled(
    assemble: Assemble,
    checkpoint: Path,
    work: Path,
    repo_id: str,
    assembly: Assembly,
    methods: Mapping[str, Method],
) -> Assembled:
    """Assemble the folder with its card, and without files that do not belong to a model."""
    assembled = assemble(checkpoint, work / "model", assembly)
    folder, reference = assembled.folder, assembled.reference
    if assembly.metadata is not None or not assembled.keep_card:
        write_card(folder, _metadata(checkpoint, assembled, assembly.metadata, methods), repo_id=repo_id)
    if reference is not None:
        reference = Path(shutil.copyfile(reference, work / "reference.safetensors"))
    shutil.rmtree(folder / METADATA_FOLDER, ignore_errors=True)
    skipped = contents(folder).skipped
    for name in skipped:
        (folder / name).unlink()
    return replace(assembled, reference=reference, skipped=[*assembled.skipped, *skipped])


def _metadata(
    checkpoint: Path, assembled: Assembled, given: ModelCardMetadata | None, methods: Mapping[str, Method]
) -> ModelCardMetadata:
    """Return the metadata of the checkpoint, in which that given replaces fields, completed with method and base model."""
    # A run in Python has it only in its exported folders, whose training is that of the other parts, too.
    places = [
        checkpoint / name / METADATA_FOLDER for name in ("", *(assembled.method.folders if assembled.method else ()))
    ]
    files = [folder / CARD_METADATA for folder in (checkpoint, *places)]
    file = next((file for file in files if file.is_file()), None)
    own = ModelCardMetadata.from_file(file, methods) if file else ModelCardMetadata()
    if given and given.results:
        own = replace(own, verdict="")  # of other results
    metadata = replace(own, **{name: value for name, value in vars(given or own).items() if value})
    base = metadata.base_model or hub_model_id(assembled.base)
    return replace(metadata, method=metadata.method or assembled.method, base_model=base)


def check(
    folder_or_id: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    timeout: float | None = None,
    methods: Mapping[str, Method] = MappingProxyType({}),
) -> list[Check]:
    """Verify any model with the checks of `publish`.

    Args:
        folder_or_id: a model folder, or the id of a model on the Hub.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run the remote code of the model.
        timeout: time limit in seconds (default: 300, plus 180 per GB of weights).
        methods: methods with their own function for vectors, by name.
    """
    folder = local_path(folder_or_id)
    if not folder.is_dir():
        with loading(f"cannot check {folder_or_id}", folder_or_id):
            folder = Path(snapshot_download(str(folder_or_id), revision=revision, allow_patterns=_CHECKED))
    reference = folder / REFERENCE
    with tempfile.TemporaryDirectory(prefix="revela-hub-") as scratch:
        staged = Path(scratch, folder.resolve().name or "model")  # only the files that would be published
        copy_model(folder, staged, links=True)
        return verify(
            staged,
            trust_remote_code=trust_remote_code,
            reference=reference if reference.is_file() else None,
            vectors=vectors_of(staged, methods),
            offline=False,
            timeout=timeout,
        )
