"""A repository of the Hub as publishing sees it: what is there, what a commit would change, and what an error means.

All files become visible in one commit. It is recognised by what it holds: where the Hub has the same files already, there
is nothing to upload, and so the same command goes on where it was stopped, at whatever step. That is why the files do not
go through the client's `upload_folder`, which commits a large folder in several parts. A token is read by the client
(HF_TOKEN, `hf auth login`) and never by this code.
"""

from __future__ import annotations

import errno
import hashlib
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi, ModelInfo
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import validate_repo_id

from revela_hub import __version__
from revela_hub.errors import UserError, causes, os_error
from revela_hub.hub_cards.verify.contents import belongs_by_name

# The client's HTTP library is httpx or httpx2 by version: the root of its errors is a base of the Hub's own, beside OSError.
CONNECTION = (
    *(base for base in HfHubHTTPError.__bases__ if base is not OSError),
    *(ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError, LocalEntryNotFoundError),
)
UNREACHABLE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
# The client for large files (hf_xet) is written in Rust; what it cannot sort into a class is a RuntimeError.
_IN_RUST = re.compile(r"reqwest|\bCAS\b|\bconnect|\bnetwork\b|\btimed? ?out\b|\bdns\b|\btls\b", re.IGNORECASE)
MESSAGE = "Publish with revela-hub"
OTHER_FORMATS = re.compile(
    r"(onnx|openvino)/.*|(tf|flax)_model.*|.*\.(onnx|onnx_data|h5|msgpack|ot|bin|ckpt|pt|pth|pkl|pickle|joblib)"
)

NOT_LOGGED_IN = (
    "the Hub does not know who is asking: log in with a token that may write (hf auth login), or put one into HF_TOKEN"
)


@dataclass(frozen=True)
class Destination:
    """Where to publish.

    Attributes:
        repo_id: `namespace/name`.
        private: make the repository private, if it is new; one that is public already is refused.
        revision: branch to commit to, made if it is not there; None for the main one.
        pull_request: open a pull request instead of committing.
        tag: to set on the new commit.
        update: replace the model that is already there; what is no part of a model stays.
        delete_stale: with `update`, delete also what was made from the weights that were there: other formats, pickles.
        collection: title of a collection of the same namespace to add the model to, made if it is not there.
        token: to use instead of the one of `hf auth login` or HF_TOKEN; never written anywhere.
    """

    repo_id: str
    private: bool = False
    revision: str | None = None
    pull_request: bool = False
    tag: str | None = None
    update: bool = False
    delete_stale: bool = False
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
        if self.delete_stale and not self.update:
            raise UserError("--delete_stale is about the model that --update replaces: add --update, or leave it out")
        for kind, name in (("--revision", self.revision), ("--tag", self.tag)):
            if name is not None and not re.fullmatch(r"(?!-)(?!.*(\.\.|//|@\{|\.lock$))[\w./-]*[\w-]", name):
                raise UserError(f"{kind} {name!r} cannot be a name in git: use letters, digits, '.', '-' and '_'")


@dataclass(frozen=True)
class Plan:
    """What a commit would change.

    Attributes:
        add: path -> file, those that the Hub does not have.
        delete: what belongs to the model that is there now, and not to the new one.
        stale: the weights in other formats and the pickles that are there now; they stay, and are of the old model.
    """

    add: dict[str, Path]
    delete: list[str]
    stale: list[str]

    @property
    def empty(self) -> bool:
        """Whether the Hub has all of it."""
        return not self.add and not self.delete


class Repository:
    """The destination's repository on the Hub, through the client."""

    def __init__(self, destination: Destination) -> None:
        self.destination, self.repo_id = destination, destination.repo_id
        self.api = HfApi(token=destination.token, library_name="revela-hub", library_version=__version__)
        self.made = False  # whether this run made the repository

    def look(self) -> ModelInfo | None:
        """What is at the destination now; None if that branch or the whole repository is not there yet.

        Raises:
            UserError: it is public and was to be private, is for others to write, has the tag, or holds another model.
        """
        wanted = self.destination
        try:
            info = self.api.model_info(self.repo_id, revision=wanted.revision, files_metadata=True)
        except RepositoryNotFoundError:
            self._check_namespace()
            return None
        except RevisionNotFoundError:
            info = None
        if wanted.private and not self.api.model_info(self.repo_id).private:
            raise UserError(
                f"{self.repo_id} is public already, and --private does not change that: make it private in its settings"
                " on the Hub first, or choose another name"
            )
        maybe_ours = info is not None and self._made_by_us()
        if wanted.tag and not maybe_ours and self._tagged():
            raise UserError(self._tag_is_there())
        holds_a_model = info is not None and any(belongs_by_name(name) for name in names(info))
        if holds_a_model and not (wanted.update or wanted.pull_request or maybe_ours):
            raise UserError(self.taken())
        return info

    def same_pull_request(self, folder: Path) -> tuple[str, str] | None:
        """The commit and address of a pull request that holds these files already."""
        requests = self.api.list_repo_refs(self.repo_id, include_pull_requests=True).pull_requests or ()
        for request in requests:
            info = self.api.model_info(self.repo_id, revision=request.ref, files_metadata=True)
            if self.plan(folder, info).empty:
                number = request.ref.rpartition("/")[2]
                return str(info.sha), f"{self.api.endpoint}/{self.repo_id}/discussions/{number}"
        return None

    def taken(self) -> str:
        """The message where there is another model."""
        return f"{self.repo_id} is taken: it holds a model already. Choose another name, or add --update to replace it"

    def _check_namespace(self) -> None:
        """Asks who is asking: the one thing that can be known before a repository is made."""
        me = self.api.whoami()
        namespace = self.repo_id.partition("/")[0]
        role = (me.get("auth", {}).get("accessToken") or {}).get("role")
        if namespace not in {me["name"], *(group["name"] for group in me.get("orgs") or ())} or role == "read":
            raise UserError(may_not_write(self.repo_id))

    def _made_by_us(self) -> bool:
        commits = self.api.list_repo_commits(self.repo_id, revision=self.destination.revision)
        return bool(commits) and commits[0].title.startswith(MESSAGE)

    def _tagged(self) -> str | None:
        tags = {tag.name: tag.target_commit for tag in self.api.list_repo_refs(self.repo_id).tags}
        return tags.get(self.destination.tag or "")

    def _tag_is_there(self) -> str:
        tag = self.destination.tag
        return f"{self.repo_id} has the tag {tag} already, on another commit: choose another name for the tag, or delete it there"

    def plan(self, folder: Path, info: ModelInfo | None) -> Plan:
        """Compares the folder's files with those that are there."""
        there = {sibling.rfilename: sibling for sibling in (info.siblings or ()) if info} if info else {}
        local = {file.relative_to(folder).as_posix(): file for file in files_of(folder)}
        # What an earlier version left (a second shard, code) would be loaded with the new files.
        delete = {name for name in there.keys() - local.keys() if belongs_by_name(name)}
        stale = {name for name in there.keys() - local.keys() - delete if OTHER_FORMATS.fullmatch(name)}
        if self.destination.delete_stale:
            delete, stale = delete | stale, set()
        add = {name: file for name, file in local.items() if not same_content(file, there.get(name))}
        return Plan(add, sorted(delete), sorted(stale))

    def prepare(self, info: ModelInfo | None) -> ModelInfo:
        """Makes the repository and the branch where they are missing, and returns what is there."""
        if info is not None:
            return info
        wanted = self.destination
        if not self.api.repo_exists(self.repo_id):
            self.api.create_repo(self.repo_id, private=wanted.private or None)
            self.made = True
        if wanted.revision:
            self.api.create_branch(self.repo_id, branch=wanted.revision, exist_ok=True)
        return self.api.model_info(self.repo_id, revision=wanted.revision, files_metadata=True)

    def commit(self, plan: Plan, before: ModelInfo) -> tuple[str, str]:
        """Makes the plan visible in one commit, and returns its hash and the address where it can be seen."""
        done = self.api.create_commit(
            self.repo_id,
            [
                *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in plan.add.items()),
                *(CommitOperationDelete(path_in_repo=name) for name in plan.delete),
            ],
            commit_message=f"{MESSAGE} {__version__}",
            revision=self.destination.revision,
            create_pr=self.destination.pull_request,
            parent_commit=before.sha,
        )
        return done.oid, done.pr_url or self.address()

    def address(self, revision: str | None = None) -> str:
        """Where the repository, or a revision of it, can be seen."""
        revision = revision or self.destination.revision
        return f"{self.api.endpoint}/{self.repo_id}" + (f"/tree/{revision}" if revision else "")

    def take_back(self, plan: Plan, before: ModelInfo, commit: str) -> str:
        """Undoes a commit by a second one, and says what it did, or how to undo it by hand."""
        if self.destination.pull_request:
            return "close the pull request"
        was_there = names(before)
        changed = [*(name for name in plan.add if name in was_there), *plan.delete]
        operations: list[CommitOperationCopy | CommitOperationDelete] = [
            *(CommitOperationCopy(name, name, src_revision=before.sha) for name in changed),
            *(CommitOperationDelete(path_in_repo=name) for name in plan.add if name not in was_there),
        ]
        try:
            done = self.api.create_commit(
                self.repo_id,
                operations,
                commit_message=f"Take back {commit[:10]}",
                revision=self.destination.revision,
                parent_commit=commit,
            )
        except Exception as error:  # whatever it is, the first fault is the one to report
            return f"it could not be taken back ({type(error).__name__}): what was there before is {self.address(before.sha)}"
        return f"it was taken back by a second commit, {done.oid[:10]}"

    def label(self, commit: str) -> None:
        """Tags the commit and adds the model to its collection.

        Raises:
            UserError: the tag is on another commit, or the collection is not for this token to change.
        """
        wanted = self.destination
        state = f"{self.repo_id} is published and was read back at {commit[:10]}"
        if wanted.tag and (target := self._tagged()) != commit:
            if target:
                raise UserError(f"{state}, but not tagged: {self._tag_is_there()}")
            with hub_errors(self.repo_id, f"{state}, but not tagged: run the same command again"):
                self.api.create_tag(self.repo_id, tag=wanted.tag, revision=commit)
        if wanted.collection:
            namespace, again = self.repo_id.partition("/")[0], "run the same command again"
            with hub_errors(f"the collection {wanted.collection!r}", f"{state}, but in no collection: {again}"):
                collection = self.api.create_collection(wanted.collection, namespace=namespace, exists_ok=True)
                self.api.add_collection_item(collection.slug, self.repo_id, "model", exists_ok=True)


def names(info: ModelInfo) -> set[str]:
    """The paths of a repository's files."""
    return {file.rfilename for file in info.siblings or ()}


def files_of(folder: Path) -> list[Path]:
    """The files of an assembled folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sha256(file: Path) -> str:
    """The hash by which the Hub knows a large file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def same_content(file: Path, there: RepoSibling | None) -> bool:
    """Whether the Hub has the file, by its hash."""
    if there is None:
        return False
    if there.lfs is not None:
        return there.lfs.sha256 == sha256(file)
    data = file.read_bytes()
    return there.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def hub_errors(repo_id: str, state: str) -> Iterator[None]:
    """Turns what the client raises into one line that says what happened, how things stand, and what to do.

    Args:
        repo_id: what is asked for.
        state: how things stand if it breaks off here, with the remedy.
    """
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise UserError(NOT_LOGGED_IN) from error
    except OfflineModeIsEnabled as error:
        raise UserError("the Hub cannot be reached: HF_HUB_OFFLINE is set") from error
    except UserError:
        raise
    except Exception as error:  # a failed upload of one file comes as a RuntimeError from what it failed by
        for cause in causes(error):
            if isinstance(cause, HfHubHTTPError):
                raise UserError(_refusal(cause, repo_id, state)) from error
            if _is_connection(cause):
                words = f"the connection to the Hub broke off ({type(cause).__name__}: {cause})"
                raise UserError(f"{words}; {state}") from error
        raise  # a disk, a device or a bug: nothing about the Hub


def _is_connection(error: BaseException) -> bool:
    """Whether an error says that the Hub could not be reached, or not to the end."""
    if isinstance(error, CONNECTION) or (isinstance(error, OSError) and error.errno in UNREACHABLE):
        return True
    return type(error) is RuntimeError and os_error(error) is None and bool(_IN_RUST.search(str(error)))


def may_not_write(repo_id: str) -> str:
    """The message where the token may not."""
    return f"you may not write to {repo_id}: ask its owner for the right to, or publish under a name of your own"


def _refusal(error: HfHubHTTPError, repo_id: str, state: str) -> str:
    status = error.response.status_code
    if status == 401:
        return NOT_LOGGED_IN
    if status == 403:
        return f"{may_not_write(repo_id)} ({state})"
    if status == 404:
        return f"{repo_id} is not on the Hub, or not for you to see"
    if status == 409:
        return f"{repo_id} is taken: choose another name, or add --update to replace it ({state})"
    if status == 412:
        return (
            f"somebody else committed to {repo_id} while this command was at work: nothing of yours is visible. Look at what"
            " is there now, and run the command again"
        )
    detail = " ".join((error.server_message or str(error)).split())
    return f"the Hub refused {repo_id} with status {status}: {detail}; {state}"
