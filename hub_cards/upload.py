"""Publishing: assemble, verify in a clean process, upload in one commit, read back what was uploaded and verify that.

All files become visible in one commit, the last step, so that a connection that breaks off leaves nothing half-published
and the same command, run again, sends only what had not arrived. That is why the files do not go through the client's
`upload_folder`, which commits a large folder in several parts. A token is read by the client (HF_TOKEN, `hf auth login`)
and never by this code.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from revela_hub import __version__
from revela_hub.errors import UserError
from revela_hub.hub_cards.assemble import REFERENCE, Assemble, Assembled, Assembly, card_facts
from revela_hub.hub_cards.card import write_card
from revela_hub.hub_cards.facts import ModelCardFacts
from revela_hub.hub_cards.verify.files import Check
from revela_hub.hub_cards.verify.verify import verify

# What a check does not need: the same weights for other libraries, and pickled ones, which nobody should load.
OTHER_FORMATS = ["*.bin", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.onnx_data", "onnx/*", "openvino/*"]
# Files of a repository that are not part of a model: they do not stand in the way of publishing, and stay.
NOT_THE_MODEL = {".gitattributes", "README.md"}
# The bases of the Hub's own error are OSError and the root of the HTTP library's errors, httpx or httpx2 by version;
# a failed upload of one file comes as a RuntimeError around either.
BROKEN_OFF: tuple[type[BaseException], ...] = (*HfHubHTTPError.__bases__, RuntimeError)

NOT_LOGGED_IN = (
    "the Hub does not know who is asking: log in with a token that may write (hf auth login), or put one into HF_TOKEN"
)


@dataclass(frozen=True)
class Destination:
    """Where to publish.

    Attributes:
        repo_id: `namespace/name`.
        private: make the repository private, if it is new.
        revision: branch to commit to, made if it is not there; None for the main one.
        pull_request: open a pull request instead of committing.
        tag: to set on the new commit.
        update: replace the model that is already there.
        collection: title of a collection of the same namespace to add the model to, made if it is not there.
        token: to use instead of the one of `hf auth login` or HF_TOKEN; never written anywhere.
    """

    repo_id: str
    private: bool = False
    revision: str | None = None
    pull_request: bool = False
    tag: str | None = None
    update: bool = False
    collection: str | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Refuses what the Hub would refuse after everything else is done."""
        try:
            validate_repo_id(self.repo_id)
        except HFValidationError as error:
            raise UserError(f"{self.repo_id!r} cannot be the id of a model: {error}") from error
        if "/" not in self.repo_id:
            raise UserError(f"{self.repo_id!r} has no namespace: write your-name/{self.repo_id}")
        if self.pull_request and (self.revision or self.tag):
            raise UserError("a pull request goes to the main branch and cannot be tagged before it is merged")


@dataclass(frozen=True)
class Published:
    """What came out: the verified folder's checks, and, unless it was a dry run, where it is now."""

    checks: list[Check]
    files: dict[str, int]
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
) -> Published:
    """Publishes what is made of a checkpoint, or refuses to and says why. `revela_hub.checkpoints.publish` is for people.

    Args:
        assemble: makes it: the method's own, or `copy_finished`.
        checkpoint: folder that a trainer saved, or a finished sentence-transformers folder.
        destination: where to.
        assembly: what of it, and how.
        dry_run: stop before the upload; the Hub is not asked anything (but for the base of an adapter).
        keep: folder to leave the assembled files in; they are deleted otherwise.

    Raises:
        UserError: the checkpoint cannot be assembled, a check failed, or the Hub refused; nothing is visible there then.
    """
    checkpoint, assembly = Path(checkpoint), assembly or Assembly()
    with tempfile.TemporaryDirectory(prefix="revela-hub-publish-") as scratch, _disk_errors("nothing was published"):
        work = Path(keep) if keep else Path(scratch)
        if (work / "model").exists():
            raise UserError(f"{work / 'model'} is there already: choose another folder, or delete it")
        work.mkdir(parents=True, exist_ok=True)
        if not dry_run:
            with _hub_errors(destination.repo_id):
                _look(_client(destination.token), destination)  # before the work, not after it
        assembled = _without_reference(assemble(checkpoint, work / "model", assembly), work)
        facts = card_facts(checkpoint, assembled, assembly.facts, work)
        if facts != ModelCardFacts() or not (assembled.folder / "README.md").is_file():
            write_card(assembled.folder, facts, repo_id=destination.repo_id)
        if assembled.adapter_of:
            with _hub_errors(assembled.adapter_of):
                snapshot_download(assembled.adapter_of, token=destination.token)
        checks = _verified(assembled, assembled.folder, "not published")
        files = {str(file.relative_to(assembled.folder)): file.stat().st_size for file in _files(assembled.folder)}
        if dry_run:
            return Published(checks, files)
        commit, url = _upload(assembled.folder, destination)
        _read_back(assembled, destination, commit)
    return Published(checks, files, url, commit)


def _without_reference(assembled: Assembled, work: Path) -> Assembled:
    """Takes the reference vectors, which are no part of the model, out of the folder."""
    if (inside := assembled.folder / REFERENCE).is_file():
        reference = Path(shutil.move(inside, work / "reference.safetensors"))
        inside.parent.rmdir()
        return replace(assembled, reference=reference)
    return assembled


def check(folder_or_id: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> list[Check]:
    """Verifies a model, ours or not, as `publish` verifies what it uploads.

    Args:
        folder_or_id: a model folder, or the id of a model on the Hub, which is downloaded.
        revision: branch, tag or commit of a model on the Hub.
        trust_remote_code: run the code that the model brings with it.

    Raises:
        UserError: there is no such folder and no such model.
    """
    if Path(folder_or_id).is_dir():
        return verify(folder_or_id, trust_remote_code=trust_remote_code, offline=False)
    try:
        validate_repo_id(str(folder_or_id))
    except HFValidationError as error:
        raise UserError(f"{folder_or_id} is neither a folder nor the id of a model on the Hub") from error
    with _hub_errors(str(folder_or_id)):
        snapshot = snapshot_download(str(folder_or_id), revision=revision, ignore_patterns=OTHER_FORMATS)
    return verify(snapshot, trust_remote_code=trust_remote_code, offline=False)


def _client(token: str | None) -> HfApi:
    return HfApi(token=token, library_name="revela-hub", library_version=__version__)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _verified(assembled: Assembled, folder: Path, consequence: str) -> list[Check]:
    checks = verify(
        folder,
        trust_remote_code=assembled.remote_code,
        adapter_only=assembled.adapter_of is not None,
        reference=assembled.reference,
    )
    if failed := [check for check in checks if not check.ok]:
        raise UserError(f"{consequence}: {failed[0].name}: {failed[0].detail}")
    return checks


def _upload(folder: Path, destination: Destination) -> tuple[str, str]:
    """Uploads all files in one commit, and returns its hash and the address where it can be seen."""
    api, repo_id, revision = _client(destination.token), destination.repo_id, destination.revision
    with _hub_errors(repo_id):
        before = _prepared(api, destination)
        local = {file.relative_to(folder).as_posix(): file for file in _files(folder)}
        # What an earlier version left (a second shard, code) would be loaded with the new files.
        stale = sorted(_names(before) - local.keys() - NOT_THE_MODEL)
        done = api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in local.items()),
                *(CommitOperationDelete(path_in_repo=name) for name in stale),
            ],
            commit_message=f"Publish with revela-hub {__version__}",
            revision=revision,
            create_pr=destination.pull_request,
            parent_commit=before.sha,
        )
    return done.oid, done.pr_url or f"{api.endpoint}/{repo_id}" + (f"/tree/{revision}" if revision else "")


def _look(api: HfApi, destination: Destination) -> ModelInfo | None:
    """Returns what is at the destination now, None if that branch or the whole repository is not there yet.

    Raises:
        UserError: there is a model already.
    """
    repo_id = destination.repo_id
    try:
        info = api.model_info(repo_id, revision=destination.revision)
    except RepositoryNotFoundError:
        api.whoami()  # the one thing that can be asked about a token before it is used
        return None
    except RevisionNotFoundError:
        return None
    if _names(info) - NOT_THE_MODEL and not (destination.update or destination.pull_request):
        raise UserError(
            f"{repo_id} is taken: it holds a model already. Choose another name, or add --update to replace it"
        )
    return info


def _prepared(api: HfApi, destination: Destination) -> ModelInfo:
    """Makes the repository and the branch where they are missing, and returns what is there."""
    repo_id, revision = destination.repo_id, destination.revision
    info = _look(api, destination)
    if info is None:
        if not api.repo_exists(repo_id):
            api.create_repo(repo_id, private=destination.private or None)
        if revision:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        info = api.model_info(repo_id, revision=revision)
    return info


def _names(info: ModelInfo) -> set[str]:
    return {file.rfilename for file in info.siblings or ()}


def _read_back(assembled: Assembled, destination: Destination, commit: str) -> None:
    """Downloads the commit, compares every file, verifies the download, and only then tags it and adds it to its collection."""
    consequence = f"published as {destination.repo_id} at {commit[:10]}, but not as it should be"
    not_read = f"published as {destination.repo_id} at {commit[:10]}, but not read back"
    with tempfile.TemporaryDirectory(prefix="revela-hub-read-back-") as cache, _disk_errors(not_read):
        with _hub_errors(destination.repo_id):
            copy = Path(
                snapshot_download(destination.repo_id, revision=commit, cache_dir=cache, token=destination.token)
            )
        for file in _files(assembled.folder):
            name = file.relative_to(assembled.folder)
            if not (copy / name).is_file() or _sha256(copy / name) != _sha256(file):
                raise UserError(f"{consequence}: {name} is not what was uploaded")
        _verified(assembled, copy, consequence)
    api = _client(destination.token)
    with _hub_errors(destination.repo_id):
        if destination.tag:
            api.create_tag(destination.repo_id, tag=destination.tag, revision=commit)
        if destination.collection:
            namespace = destination.repo_id.partition("/")[0]
            collection = api.create_collection(destination.collection, namespace=namespace, exists_ok=True)
            api.add_collection_item(collection.slug, destination.repo_id, "model", exists_ok=True)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """Turns what the client raises into one line that says what happened and what to do."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise UserError(NOT_LOGGED_IN) from error
    except OfflineModeIsEnabled as error:
        raise UserError("the Hub cannot be reached: HF_HUB_OFFLINE is set") from error
    except BROKEN_OFF as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            raise
        if not isinstance(cause, HfHubHTTPError):
            raise UserError(
                f"the connection to the Hub broke off ({type(cause).__name__}: {cause}). Nothing of {repo_id} is visible"
                " before the last step, and what has arrived is kept: run the same command again"
            ) from error
        raise UserError(_refusal(cause, repo_id)) from error


def _refusal(error: HfHubHTTPError, repo_id: str) -> str:
    status = error.response.status_code
    if status == 401:
        return NOT_LOGGED_IN
    if status == 403:
        return f"you may not write to {repo_id}: ask its owner for the right to, or publish under a name of your own"
    if status == 404:
        return f"{repo_id} is not on the Hub, or not for you to see"
    if status == 409:
        return f"{repo_id} is taken: choose another name, or add --update to replace it"
    detail = " ".join((error.server_message or str(error)).split())
    return f"the Hub refused {repo_id} with status {status}: {detail}"


@contextmanager
def _disk_errors(state: str) -> Iterator[None]:
    """Says that the disk is full, whoever noticed it: Python, or a copier or a writer of weights in words of its own."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        words = (f"os error {errno.ENOSPC}", f"Errno {errno.ENOSPC}]")
        if getattr(error, "errno", None) == errno.ENOSPC or any(word in str(error) for word in words):
            raise UserError(
                f"no space left on the disk: {state}. Free some, or set TMPDIR (now {tempfile.gettempdir()}) to a larger disk"
            ) from error
        raise
