"""Publish models: assemble a folder, verify it, upload it in one commit, and verify the download."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from revela_hub.data.own_folder import claim, names_in
from revela_hub.data.sources.report import counted
from revela_hub.errors import DISK_FULL, OS_ERRORS, UserError, causes, os_error, reason
from revela_hub.hub_cards.assemble import REFERENCE, Assemble, Assembled, Assembly, card_metadata
from revela_hub.hub_cards.card import CARD_METADATA, METADATA_FOLDER, check_card, write_card
from revela_hub.hub_cards.metadata import ModelCardMetadata
from revela_hub.hub_cards.method import Method, vectors_of
from revela_hub.hub_cards.repository import Destination, Plan, RepoInfo, Repository, files_of, hub_errors, sha256
from revela_hub.hub_cards.verify.consistency import contradictions
from revela_hub.hub_cards.verify.contents import Contents, contents
from revela_hub.hub_cards.verify.files import Check, folder_fault
from revela_hub.hub_cards.verify.verify import verify
from revela_hub.paths import local_path
from revela_hub.scratch import deleted_after, scratch_folder

# Not downloaded for a check: pickled weights, and weights for other libraries.
_NOT_CHECKED = ["*.bin", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "openvino/*", "model*.onnx", "model*.onnx_data"]
_ONNX = ["onnx/*"]
_OTHER_ONNX = ["onnx/[!m]*", "onnx/model_[!q]*", "onnx/model_q[!u]*", "onnx/model_qu[!a]*"]
_NO_METHODS: Mapping[str, Method] = MappingProxyType({})


@dataclass(frozen=True)
class Published:
    """The result of publishing.

    Attributes:
        checks: checks of the verified folder.
        files: path -> size, of the published files.
        skipped: path -> reason, of the files that are not published.
        deleted: deleted files of the previous model.
        stale: other formats and pickles of the previous weights that are still on the Hub.
        url: URL of the model; None after a dry run.
        commit: hash of the commit.
    """

    checks: list[Check]
    files: dict[str, int]
    skipped: dict[str, str] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    url: str | None = None
    commit: str | None = None


def publish(
    assemble: Assemble,
    checkpoint: str | Path,
    destination: Destination,
    assembly: Assembly | None = None,
    *,
    dry_run: bool = False,
    keep: str | Path | None = None,
    methods: Mapping[str, Method] = _NO_METHODS,
    log: Callable[[str], None] = lambda line: None,
) -> Published:
    """Publish the folder that `assemble` makes from a checkpoint, with a card for one of the methods.

    `revela_hub.checkpoints.publish` finds both itself, and documents the other arguments.
    """
    checkpoint, assembly = local_path(checkpoint), assembly or Assembly()
    repository, before, repo_id = Repository(destination), None, destination.repo_id
    remedy = "choose another --output_dir" if keep else ""
    with scratch_folder("publish") as scratch, _disk_errors("nothing was published", remedy), ExitStack() as stack:
        work = local_path(keep or scratch)
        if (work / "model").exists():
            raise UserError(f"{work / 'model'} exists already: choose another folder, or delete it")
        if keep and not (work.is_dir() and names_in(work)):  # a folder with the user's files stays theirs
            claim(work, "--output_dir")
        work.mkdir(parents=True, exist_ok=True)
        stack.enter_context(deleted_after(work / "model", KeyboardInterrupt))
        if not dry_run or destination.update:
            with hub_errors(repo_id, _not_published(repo_id)):
                before = repository.current()  # before the work, to report errors early
        assembled = _assembled(assemble, checkpoint, work, repo_id, assembly, methods, log)
        if assembled.adapter_of:
            with hub_errors(assembled.adapter_of, "nothing was published: run the same command again"):
                snapshot_download(assembled.adapter_of, token=destination.token)
        checks = _checks(assembled, assembled.folder)
        if fault := _first_fault(checks):
            raise UserError(f"not published: {fault}")
        sizes = {str(file.relative_to(assembled.folder)): file.stat().st_size for file in files_of(assembled.folder)}
        plan = repository.plan(assembled.folder, before or repository.main)
        published = Published(checks, sizes, assembled.skipped, plan.delete, plan.stale)
        if dry_run:
            return published
        for name in plan.delete:
            log(f"{repo_id}: deleting {name} of the previous model")
        for name in plan.stale:
            log(f"{repo_id}: keeping {name} of the previous weights: add --delete_stale, or convert the model again")
        with deleted_after(assembled.folder, Exception):
            commit, url = _upload(repository, assembled, plan, before)
    return replace(published, url=url, commit=commit)


def _not_published(repo_id: str) -> str:
    return f"nothing was published in {repo_id}: run the same command again to resume the upload"


def _assembled(
    assemble: Assemble,
    checkpoint: Path,
    work: Path,
    repo_id: str,
    assembly: Assembly,
    methods: Mapping[str, Method],
    log: Callable[[str], None],
) -> Assembled:
    """Assemble the folder with its card, after the checks that do not load the model."""
    assembled = assemble(checkpoint, work / "model", assembly)
    folder, reference = assembled.folder, assembled.reference
    if fault := folder_fault(folder):
        raise UserError(f"not published: {checkpoint}: {fault}")
    metadata = card_metadata(checkpoint, assembled, assembly.metadata, work, methods)
    if not assembled.keep_card or metadata != ModelCardMetadata():
        if assembled.keep_card:
            source = "--card" if assembly.metadata else str(checkpoint / CARD_METADATA)
            log(f"{checkpoint / 'README.md'} is replaced by a card made from {source}")
        write_card(folder, metadata, repo_id=repo_id)
    check_card(folder / "README.md")
    if reference is not None:
        reference = Path(shutil.copyfile(reference, work / "reference.safetensors"))
    shutil.rmtree(folder / METADATA_FOLDER, ignore_errors=True)
    skipped = contents(folder).skipped
    for name in skipped:
        (folder / name).unlink()
    return replace(
        assembled,
        reference=reference,
        vectors=vectors_of(folder, methods),
        skipped=assembled.skipped | skipped,
        timeout=assembly.timeout,
    )


def check(
    folder_or_id: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    timeout: float | None = None,
    methods: Mapping[str, Method] = _NO_METHODS,
) -> list[Check]:
    """Verify any model with the checks of `publish`.

    Args:
        folder_or_id: a model folder, or the id of a model on the Hub.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run the remote code of the model.
        timeout: time limit in seconds (default: 300, plus 180 per GB of weights).
        methods: methods with their own function for vectors, by name.

    Raises:
        UserError: the folder or model does not exist.
    """
    folder = local_path(folder_or_id)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, not a model folder")
    downloaded = not folder.is_dir()
    if downloaded:
        try:
            validate_repo_id(str(folder_or_id))
        except HFValidationError as error:
            raise UserError(f"{folder_or_id} is neither a folder nor a valid model id on the Hub") from error
        with hub_errors(str(folder_or_id), "run the same command again"):
            ignored = [*_NOT_CHECKED, *(_OTHER_ONNX if find_spec("onnxruntime") else _ONNX)]
            folder = Path(snapshot_download(str(folder_or_id), revision=revision, ignore_patterns=ignored))
    found, reference = contents(folder, downloaded=downloaded), folder / REFERENCE
    with scratch_folder("check") as scratch:
        staged = Path(scratch, folder.resolve().name or "model")  # only the files that would be published
        found.copy_to(staged, links=True)
        checks = verify(
            staged,
            trust_remote_code=trust_remote_code,
            adapter_only=(staged / "adapter_config.json").is_file() and not any(staged.glob("model*.safetensors")),
            reference=reference if reference.is_file() else None,
            vectors=vectors_of(staged, methods),
            offline=False,
            timeout=timeout,
        )
    return [Check.of("contents", _contents_faults(folder, found), _contents_summary(found)), *checks]


def _contents_faults(folder: Path, found: Contents) -> Iterator[str]:
    yield from found.links
    yield from contradictions(folder, found)
    if found.pickles:
        more = f" and {len(found.pickles) - 1} more" if len(found.pickles) > 1 else ""
        yield f"{found.pickles[0]}{more}: pickles can run code when loaded; delete them"


def _contents_summary(found: Contents) -> str:
    names = ", ".join(sorted(found.skipped)[:3]) + (" ..." if len(found.skipped) > 3 else "")
    others = f", and {counted(len(found.skipped), 'other file')}: {names}" if found.skipped else ""
    return f"{counted(len(found.included), 'model file')}{others}"


def _checks(assembled: Assembled, folder: Path) -> list[Check]:
    return verify(
        folder,
        trust_remote_code=assembled.remote_code,
        adapter_only=assembled.adapter_of is not None,
        reference=assembled.reference,
        vectors=assembled.vectors,
        timeout=assembled.timeout,
    )


def _first_fault(checks: list[Check]) -> str:
    return next((f"{check.name}: {check.detail}" for check in checks if not check.ok), "")


def _upload(repository: Repository, assembled: Assembled, plan: Plan, before: RepoInfo | None) -> tuple[str, str]:
    """Commit the changes, verify the download, set labels; return the hash and URL of the commit."""
    repo_id, destination = repository.repo_id, repository.destination
    with hub_errors(repo_id, _not_published(repo_id)):
        existing, known = None, before
        before = repository.prepare(before)
        if plan.empty:  # an earlier run was stopped after its commit, or a new branch has all files of main
            existing = (str(before.sha), repository.url())
        elif known is not None and destination.pull_request:
            existing = repository.find_pull_request(assembled.folder)
        elif known is not None and not destination.update:
            repository.check_no_model(known, plan.add)
        commit, url = existing or repository.commit(plan, before)
    unverified = (
        f"{repo_id} is at {commit[:10]}, but the download was not verified: run the same command again to do that. The"
        f" previous state is {repository.url(before.sha)}"
    )
    if fault := _download_fault(repository, assembled, commit, unverified):
        undone = f"the commit is {url}" if existing else repository.revert(plan, before, commit)
        raise UserError(f"published {repo_id} at {commit[:10]}, but {fault}; {undone}")
    with hub_errors(repo_id, f"{repo_id} is published and was verified at {commit[:10]}: run the same command again"):
        repository.tag_commit(commit)
    return commit, url


def _download_fault(repository: Repository, assembled: Assembled, commit: str, unverified: str) -> str:
    """Download the commit, compare every file, and verify the model; return the first fault, or an empty string."""
    repo_id, token = repository.repo_id, repository.destination.token
    with scratch_folder("download") as cache, _disk_errors(unverified):
        wanted = [file.relative_to(assembled.folder).as_posix() for file in files_of(assembled.folder)]
        with hub_errors(repo_id, unverified):
            copy = snapshot_download(repo_id, revision=commit, cache_dir=cache, token=token, allow_patterns=wanted)
        for name in wanted:
            file = Path(copy, name)
            if not file.is_file() or sha256(file) != sha256(assembled.folder / name):
                return f"{name} differs from the uploaded file"
        return _first_fault(_checks(assembled, Path(copy)))


@contextmanager
def _disk_errors(state: str, remedy: str = "") -> Iterator[None]:
    """Raise disk errors of Python and other libraries as a `UserError` with the state and a remedy for a full disk."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        numbers = {os_error(cause) for cause in causes(error)}
        if numbers & set(DISK_FULL):
            remedy = remedy or f"set TMPDIR (now {tempfile.gettempdir()}) to a larger disk"
            raise UserError(f"no space left on the disk: {state}. Free some, or {remedy}") from error
        if numbers & OS_ERRORS.keys():
            raise UserError(f"{reason(error)}; {state}") from error
        raise
