"""Publishing: assemble, verify in a clean process, upload in one commit, read back what was uploaded and verify that."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from huggingface_hub import ModelInfo, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from revela_hub.errors import DISK_FULL, OS_ERRORS, UserError, causes, os_error, reason
from revela_hub.hub_cards.assemble import REFERENCE, Assemble, Assembled, Assembly, card_facts
from revela_hub.hub_cards.card import OURS, check_card, write_card
from revela_hub.hub_cards.method import Method, vectors_of
from revela_hub.hub_cards.repository import Destination, Plan, Repository, files_of, hub_errors, names, sha256
from revela_hub.hub_cards.verify.consistency import contradictions
from revela_hub.hub_cards.verify.contents import Contents, belongs_by_name, contents
from revela_hub.hub_cards.verify.files import Check, folder_fault
from revela_hub.hub_cards.verify.verify import verify

# What a check does not need: the same weights for other libraries, and pickled ones, which nobody should load.
OTHER_FORMATS = ["*.bin", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.onnx_data", "onnx/*", "openvino/*"]
NOTHING_VISIBLE = "nothing of {} is visible, and what has arrived is kept: run the same command again"


@dataclass(frozen=True)
class Published:
    """What came out.

    Attributes:
        checks: of the verified folder.
        files: path -> size, of what is published.
        stays: path -> why, for what the folder held and is not published.
        deleted: what belonged to the model that was there before.
        stale: weights in other formats and pickles that are on the Hub, and of the model that was there before.
        url: where it is now; None if it was a dry run.
        commit: that it is in.
    """

    checks: list[Check]
    files: dict[str, int]
    stays: dict[str, str] = field(default_factory=dict)
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
    methods: Mapping[str, Method] = MappingProxyType({}),
    say: Callable[[str], None] = lambda line: None,
) -> Published:
    """Publishes what is made of a checkpoint, or refuses to and says why. `revela_hub.checkpoints.publish` is for people.

    Args:
        assemble: makes it: the method's own, or `copy_finished`.
        checkpoint: folder that a trainer saved, or a finished sentence-transformers folder.
        destination: where to.
        assembly: what of it, and how.
        dry_run: stop before the upload; the Hub is asked nothing but, with `update`, what is there now.
        keep: folder to leave the assembled files in; they are deleted otherwise.
        methods: those that a card may name, by name.
        say: told, before the upload, what it will delete.

    Raises:
        UserError: the checkpoint cannot be assembled, a check failed, or the Hub refused; the message says what is visible.
    """
    checkpoint, assembly = Path(checkpoint), assembly or Assembly()
    repository, before = Repository(destination), None
    repo_id = destination.repo_id
    remedy = "choose another --output_dir" if keep else ""
    with (
        tempfile.TemporaryDirectory(prefix="revela-hub-publish-") as scratch,
        _disk_errors("nothing was published", remedy),
    ):
        work = Path(keep) if keep else Path(scratch)
        if (work / "model").exists():
            raise UserError(f"{work / 'model'} is there already: choose another folder, or delete it")
        work.mkdir(parents=True, exist_ok=True)
        if not dry_run or destination.update:
            with hub_errors(repo_id, NOTHING_VISIBLE.format(repo_id)):
                before = repository.look()  # before the work, not after it
        assembled = _assembled(assemble, checkpoint, work, repo_id, assembly, methods)
        if assembled.adapter_of:
            with hub_errors(assembled.adapter_of, "nothing was published: run the same command again"):
                snapshot_download(assembled.adapter_of, token=destination.token)
        checks = _verified(assembled, assembled.folder, "not published")
        sizes = {str(file.relative_to(assembled.folder)): file.stat().st_size for file in files_of(assembled.folder)}
        plan = repository.plan(assembled.folder, before)
        published = Published(checks, sizes, assembled.stays, plan.delete, plan.stale)
        if dry_run:
            return published
        for name in plan.delete:
            say(f"{repo_id}: {name} is of the model that was there, and goes")
        for name in plan.stale:
            say(
                f"{repo_id}: {name} was made from the weights that were there, and stays: add --delete_stale, or make it anew"
            )
        commit, url = _upload(repository, assembled, plan, before)
    return replace(published, url=url, commit=commit)


def _assembled(
    assemble: Assemble,
    checkpoint: Path,
    work: Path,
    repo_id: str,
    assembly: Assembly,
    methods: Mapping[str, Method],
) -> Assembled:
    """The folder with its card, both looked at as far as that needs no model."""
    assembled = assemble(checkpoint, work / "model", assembly)
    if fault := folder_fault(assembled.folder):
        raise UserError(f"not published: {checkpoint}: {fault}")
    facts = card_facts(checkpoint, assembled, assembly.facts, work, methods)
    if assembled.own_card is None or facts != assembled.own_card:
        write_card(assembled.folder, facts, repo_id=repo_id)
    check_card(assembled.folder / "README.md")
    reference = assembled.reference
    if reference is not None:
        reference = Path(shutil.copyfile(reference, work / "reference.safetensors"))
    shutil.rmtree(assembled.folder / OURS, ignore_errors=True)
    found = contents(assembled.folder)
    for name in found.stays:
        (assembled.folder / name).unlink()
    return replace(
        assembled,
        reference=reference,
        vectors=vectors_of(assembled.folder, methods),
        stays=assembled.stays | found.stays,
        timeout=assembly.timeout,
    )


def check(
    folder_or_id: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    timeout: float | None = None,
    methods: Mapping[str, Method] = MappingProxyType({}),
) -> list[Check]:
    """Verifies a model, ours or not, as `publish` verifies what it uploads.

    Args:
        folder_or_id: a model folder, or the id of a model on the Hub, which is downloaded.
        revision: branch, tag or commit of a model on the Hub.
        trust_remote_code: run the code that the model brings with it.
        timeout: seconds that it may take; by default 300, and 180 more for each GB of weights.
        methods: those whose models are checked by their own vectors.

    Raises:
        UserError: there is no such folder and no such model.
    """
    folder = Path(folder_or_id)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, not the folder of a model")
    downloaded = not folder.is_dir()
    if downloaded:
        try:
            validate_repo_id(str(folder_or_id))
        except HFValidationError as error:
            raise UserError(f"{folder_or_id} is neither a folder nor the id of a model on the Hub") from error
        with hub_errors(str(folder_or_id), "run the same command again"):
            folder = Path(snapshot_download(str(folder_or_id), revision=revision, ignore_patterns=OTHER_FORMATS))
    found = contents(folder, downloaded=downloaded)
    reference = folder / REFERENCE
    with tempfile.TemporaryDirectory(prefix="revela-hub-check-") as scratch:
        # What is checked is what would be published, under the folder's name.
        staged = Path(scratch, folder.resolve().name or "model")
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
    return [_contents_check(folder, found), *checks]


def _contents_check(folder: Path, found: Contents) -> Check:
    for fault in (*found.links, *contradictions(folder, found)):
        return Check("contents", False, fault)
    if found.pickles:
        more = f" and {len(found.pickles) - 1} more" if len(found.pickles) > 1 else ""
        return Check("contents", False, f"{found.pickles[0]}{more}: a pickle runs code on whoever reads it; delete it")
    stay = f", {len(found.stays)} others are no part of it: {', '.join(sorted(found.stays)[:3])}" if found.stays else ""
    return Check("contents", True, f"{len(found.goes)} files of a model{stay}{' ...' if len(found.stays) > 3 else ''}")


def _verified(assembled: Assembled, folder: Path, consequence: str) -> list[Check]:
    checks = verify(
        folder,
        trust_remote_code=assembled.remote_code,
        adapter_only=assembled.adapter_of is not None,
        reference=assembled.reference,
        vectors=assembled.vectors,
        timeout=assembled.timeout,
    )
    if failed := [check for check in checks if not check.ok]:
        raise UserError(f"{consequence}: {failed[0].name}: {failed[0].detail}")
    return checks


def _upload(repository: Repository, assembled: Assembled, plan: Plan, before: ModelInfo | None) -> tuple[str, str]:
    """Commits what the Hub does not have, reads it back, labels it; returns the commit and its address."""
    repo_id, destination = repository.repo_id, repository.destination
    state = NOTHING_VISIBLE.format(repo_id)
    with hub_errors(repo_id, state):
        there = None
        if before is not None and plan.empty:  # an earlier run's, which was stopped after its commit
            there = (str(before.sha), repository.address())
        elif before is not None and destination.pull_request:
            there = repository.same_pull_request(assembled.folder)
        elif before is not None and any(map(belongs_by_name, names(before))) and not destination.update:
            raise UserError(repository.taken())
        before = repository.prepare(before)
        commit, url = there or repository.commit(plan, before)
    visible = (
        f"{repo_id} shows {commit[:10]}, which was not read back: run the same command again, which does that; what was there"
        f" before is {repository.address(before.sha)}"
    )
    try:
        _read_back(repository, assembled, commit, visible)
    except _NotAsUploaded as error:
        undone = f"what is there is {url}" if there else repository.take_back(plan, before, commit)
        raise UserError(
            f"published as {repo_id} at {commit[:10]}, but not as it should be: {error}; {undone}"
        ) from error
    with hub_errors(repo_id, f"{repo_id} is published and was read back at {commit[:10]}: run the same command again"):
        repository.label(commit)
    return commit, url


class _NotAsUploaded(Exception):
    """What was read back is something else."""


def _read_back(repository: Repository, assembled: Assembled, commit: str, visible: str) -> None:
    """Downloads the commit, compares every file, and verifies the download."""
    repo_id, token = repository.repo_id, repository.destination.token
    with tempfile.TemporaryDirectory(prefix="revela-hub-read-back-") as cache, _disk_errors(visible):
        with hub_errors(repo_id, visible):
            wanted = [file.relative_to(assembled.folder).as_posix() for file in files_of(assembled.folder)]
            copy = Path(
                snapshot_download(repo_id, revision=commit, cache_dir=cache, token=token, allow_patterns=wanted)
            )
        for name in wanted:
            if not (copy / name).is_file() or sha256(copy / name) != sha256(assembled.folder / name):
                raise _NotAsUploaded(f"{name} is not what was uploaded")
        try:
            _verified(assembled, copy, "")
        except UserError as error:
            raise _NotAsUploaded(str(error).removeprefix(": ")) from error


@contextmanager
def _disk_errors(state: str, remedy: str = "") -> Iterator[None]:
    """Turns what a disk refuses into one line with how things stand, whoever noticed it: Python, or a library in its own words.

    Args:
        state: how things stand if the disk fails here.
        remedy: where else to write; by default another folder for temporary files.
    """
    try:
        yield
    except (UserError, _NotAsUploaded):
        raise
    except Exception as error:
        numbers = [os_error(cause) for cause in causes(error)]
        if any(number in DISK_FULL for number in numbers):
            remedy = remedy or f"set TMPDIR (now {tempfile.gettempdir()}) to a larger disk"
            raise UserError(f"no space left on the disk: {state}. Free some, or {remedy}") from error
        if any(number in OS_ERRORS for number in numbers):
            raise UserError(f"{reason(error)}; {state}") from error
        raise
