"""A repository on the Hub: its current files, the changes of a commit, and errors of the Hub as `UserError`.

A model, an index and the page of a model are published in a single commit, so that readers never get half of it. `HfApi.upload_folder` splits large uploads into
several commits, so we use `create_commit`. Files that the Hub already has are not uploaded again, so an interrupted upload is
resumed by running the same command again.
"""

import errno
import re
import socket
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    DatasetInfo,
    HfApi,
    ModelInfo,
    SpaceInfo,
    snapshot_download,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils.sha import git_hash, sha_fileobj

from revela_hub import __version__
from revela_hub.errors import UserError, causes, os_error
from revela_hub.hub_cards.verify.contents import belongs_by_name, code_files

# Connection errors of the client's HTTP library (httpx or httpx2, by version) are a base class of the Hub's errors.
_CONNECTION_ERRORS = (
    *(base for base in HfHubHTTPError.__bases__ if base is not OSError),
    *(ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError, LocalEntryNotFoundError),
)
_UNREACHABLE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
# hf_xet, the client for large files, raises a RuntimeError for most errors.
_XET_CONNECTION = re.compile(r"reqwest|\bCAS\b|\bconnect|\bnetwork\b|\btimed? ?out\b|\bdns\b|\btls\b", re.IGNORECASE)
COMMIT_MESSAGE = "Publish with revela-hub"
RepoInfo = ModelInfo | DatasetInfo | SpaceInfo
_URLS = {"model": "", "dataset": "datasets/", "space": "spaces/"}
# Files that were converted from weights, or contain pickles: other weights make them out of date.
OTHER_FORMATS = re.compile(
    r"(onnx|openvino)/.*|(tf|flax)_model.*|.*\.(onnx|onnx_data|h5|msgpack|ot|bin|ckpt|pt|pth|pkl|pickle|joblib)"
)
_NOT_LOGGED_IN = (
    "not logged in to the Hub, or the token is not valid: use one with write access (hf auth login, or HF_TOKEN)"
)
_GIT_NAME = re.compile(r"(?!-)(?!.*(\.\.|//|@\{|\.lock$))[\w./-]*[\w-]")


@dataclass(frozen=True)
class Destination:
    """A repository to publish to.

    Attributes:
        repo_id: `namespace/name`.
        private: create a private repository; an existing public one is an error.
        revision: branch to commit to, created if it does not exist; by default the main branch.
        pull_request: open a pull request instead of committing.
        tag: tag of the new commit.
        update: replace an existing model; other files are kept.
        delete_stale: with `update`, also delete other formats and pickles of the old weights.
        collection: title of a collection in the namespace to add the model to, created if it does not exist.
        token: token instead of that from `hf auth login` or HF_TOKEN.
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
        """Reject values that the Hub would reject after everything else is done."""
        check_repo_id(self.repo_id, "model id")
        if self.pull_request and (self.revision or self.tag):
            raise UserError("a pull request is opened for the main branch, and cannot have a tag before it is merged")
        if self.delete_stale and not self.update:
            raise UserError(
                "--delete_stale deletes files of the model that --update replaces: add --update, or omit it"
            )
        for option, name in (("--revision", self.revision), ("--tag", self.tag)):
            if name is not None and not _GIT_NAME.fullmatch(name):
                raise UserError(f"{option} {name!r} is not a valid name in git: use letters, digits, '.', '-' and '_'")


@dataclass(frozen=True)
class Plan:
    """The changes of a commit."""

    add: Mapping[str, Path | bytes]  # path -> file or content, for files that the Hub does not have
    delete: list[str]  # files of the existing model that the new model does not have
    stale: list[str] = field(default_factory=list)  # other formats and pickles of the existing weights, which are kept

    @property
    def empty(self) -> bool:
        """Whether the Hub has all files already."""
        return not self.add and not self.delete


class Repository:
    """The repository of a destination."""

    def __init__(self, destination: Destination, kind: Literal["model", "dataset", "space"] = "model") -> None:
        self.destination, self.repo_id, self.kind = destination, destination.repo_id, kind
        self.target = f"the Space {self.repo_id}" if kind == "space" else self.repo_id
        self.api = HfApi(token=destination.token, library_name="revela-hub", library_version=__version__)
        self.main: RepoInfo | None = None
        """The state of main, with which a new branch starts; set by `state` if the branch does not exist."""

    def state(self) -> RepoInfo | None:
        """Return the current state; None if the branch or the repository does not exist.

        Raises:
            UserError: it is public instead of private, or the token cannot write to the namespace.
        """
        wanted, info = self.destination, None
        try:
            info = self._info(wanted.revision)
        except RepositoryNotFoundError:
            self._check_namespace()
            return None
        except RevisionNotFoundError:
            self.main = self._info(None)
        if wanted.private and not getattr(info or self.main, "private", None):
            raise UserError(
                f"{self.target} is public already, which --private cannot change: make it private in its settings on the"
                " Hub, or choose another name"
            )
        return info

    def current(self) -> RepoInfo | None:
        """Return `state`, if a model can be published in it.

        Raises:
            UserError: as `state`, or it already has the tag or contains another model.
        """
        wanted, info = self.destination, self.state()
        if info is None and self.main is None:
            return None
        commits = self.api.list_repo_commits(self.repo_id, revision=wanted.revision) if info else []
        maybe_ours = bool(commits) and commits[0].title.startswith(COMMIT_MESSAGE)
        if wanted.tag and not maybe_ours:
            self._check_tag()
        if info and not (wanted.update or wanted.pull_request or maybe_ours):
            self.check_no_model(info)
        return info

    def _info(self, revision: str | None) -> RepoInfo:
        info: Any = self.api.repo_info(self.repo_id, repo_type=self.kind, revision=revision, files_metadata=True)
        found: RepoInfo = info  # newer versions of huggingface_hub also have other kinds
        return found

    def _check_namespace(self) -> None:
        """Check that the token can write to the namespace, before the repository exists."""
        me = self.api.whoami()
        role = (me.get("auth", {}).get("accessToken") or {}).get("role")
        writable = {me["name"], *(group["name"] for group in me.get("orgs") or ())}
        if self.repo_id.partition("/")[0] not in writable or role == "read":
            raise UserError(_no_write_access(self.target))

    def _check_tag(self, commit: str | None = None, state: str = "") -> bool:
        """Return whether the commit has the tag.

        Raises:
            UserError: another commit has it.
        """
        tags = {tag.name: tag.target_commit for tag in self.api.list_repo_refs(self.repo_id).tags}
        tag = self.destination.tag or ""
        if tags.get(tag) not in (None, commit):
            raise UserError(
                f"{state}{self.repo_id} has the tag {tag} already, on another commit: choose another tag, or delete that one"
            )
        return tag in tags

    def check_no_model(self, info: RepoInfo, add: Iterable[str] = ("README.md",)) -> None:
        """Raise a UserError if the repository contains a model, or one of the files to add (the Hub itself writes .gitattributes)."""
        names = file_names(info)
        models = {name for name in names if belongs_by_name(name)}
        for what, found in (("a model", models), ("a file of this name", names & {*add} - {".gitattributes"})):
            if found:
                raise UserError(
                    f"{self.repo_id} already contains {what} ({min(found)}): choose another name, or add --update to replace it"
                )

    def find_pull_request(self, folder: Path) -> tuple[str, str] | None:
        """Return the commit and URL of an open pull request that contains these files, if there is one."""
        requests = self.api.list_repo_refs(self.repo_id, include_pull_requests=True).pull_requests or ()
        for request in requests:
            info = self._info(request.ref)
            number = request.ref.rpartition("/")[2]
            if not self.plan(folder, info).empty:
                continue
            if self.api.get_discussion_details(self.repo_id, int(number)).status in ("open", "draft"):
                return str(info.sha), f"{self.api.endpoint}/{self.repo_id}/discussions/{number}"
        return None

    def plan(self, folder: Path, info: RepoInfo | None) -> Plan:
        """Return the differences between the folder and the repository."""
        local = {file.relative_to(folder).as_posix(): file for file in files_of(folder)}
        old = file_names(info) - local.keys()
        # Would be loaded together with the new files, or are code of the old model.
        delete = {name for name in old if belongs_by_name(name)} | (old & self._code(info))
        stale = {name for name in old - delete if OTHER_FORMATS.fullmatch(name)}
        if self.destination.delete_stale:
            delete, stale = delete | stale, set()
        return Plan(changed_files(local, info), sorted(delete), sorted(stale))

    def _code(self, info: RepoInfo | None) -> set[str]:
        """Return the files of remote code of the model in a repository."""
        if info is None or not any(name.endswith(".py") for name in file_names(info)):
            return set()
        patterns = ["*config.json", "modules.json", "*.py"]
        options: dict[str, Any] = {"revision": info.sha, "token": self.destination.token, "allow_patterns": patterns}
        with hub_errors(self.repo_id, "nothing was published: run the same command again"):
            return code_files(Path(snapshot_download(self.repo_id, repo_type=self.kind, **options)))

    def prepare(self, info: RepoInfo | None) -> RepoInfo:
        """Create the repository and the branch if they do not exist, and return the current state."""
        if info is not None:
            return info
        wanted = self.destination
        if not self.api.repo_exists(self.repo_id, repo_type=self.kind):
            sdk = "gradio" if self.kind == "space" else None
            self.api.create_repo(self.repo_id, repo_type=self.kind, space_sdk=sdk, private=wanted.private or None)
        if wanted.revision:
            self.api.create_branch(self.repo_id, branch=wanted.revision, exist_ok=True)
        return self._info(wanted.revision)

    def commit(self, plan: Plan, before: RepoInfo) -> tuple[str, str]:
        """Upload the changes in a single commit, and return its hash and URL."""
        add = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in plan.add.items()]
        delete = [CommitOperationDelete(path_in_repo=name) for name in plan.delete]
        done = self._commit([*add, *delete], f"{COMMIT_MESSAGE} {__version__}", before.sha)
        return done.oid, done.pr_url or self.url()

    def _commit(self, operations: list[Any], message: str, parent: str | None) -> CommitInfo:
        return self.api.create_commit(
            self.repo_id,
            operations,
            repo_type=self.kind,
            commit_message=message,
            revision=self.destination.revision,
            create_pr=self.destination.pull_request,
            parent_commit=parent,
        )

    def url(self, revision: str | None = None) -> str:
        """Return the URL of the repository, or of a revision."""
        revision = revision or self.destination.revision
        return f"{self.api.endpoint}/{_URLS[self.kind]}{self.repo_id}" + (f"/tree/{revision}" if revision else "")

    def revert(self, plan: Plan, before: RepoInfo, commit: str) -> str:
        """Revert a commit with a second one, and return what was done, or how to do it."""
        if self.destination.pull_request:
            return "close the pull request"
        old = file_names(before)
        changed = [*(name for name in plan.add if name in old), *plan.delete]
        restore = [CommitOperationCopy(name, name, src_revision=before.sha) for name in changed]
        delete = [CommitOperationDelete(path_in_repo=name) for name in plan.add if name not in old]
        try:
            done = self._commit([*restore, *delete], f"Revert {commit[:10]}", commit)
        except Exception as error:  # report the error that made this necessary instead
            return f"it could not be reverted ({type(error).__name__}); the previous state is {self.url(before.sha)}"
        return f"it was reverted by a second commit, {done.oid[:10]}"

    def tag_commit(self, commit: str) -> None:
        """Tag the commit, and add the model to its collection.

        Raises:
            UserError: another commit has the tag, or the token cannot change the collection.
        """
        wanted = self.destination
        state = f"{self.repo_id} is published and was verified at {commit[:10]}, but"
        if wanted.tag and not self._check_tag(commit, f"{state} not tagged: "):
            with hub_errors(self.repo_id, f"{state} not tagged: run the same command again"):
                self.api.create_tag(self.repo_id, tag=wanted.tag, revision=commit)
        if wanted.collection:
            target = f"the collection {wanted.collection!r}"
            with hub_errors(target, f"{state} not in a collection: run the same command again"):
                namespace = self.repo_id.partition("/")[0]
                collection = self.api.create_collection(wanted.collection, namespace=namespace, exists_ok=True)
                self.api.add_collection_item(collection.slug, self.repo_id, "model", exists_ok=True)


def check_repo_id(repo_id: str, what: str, *, namespace: bool = True) -> None:
    """Raise a UserError for an id that is invalid, or has no namespace."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{repo_id!r} is not a valid {what}: {error}") from error
    if namespace and "/" not in repo_id:
        raise UserError(f"{repo_id!r} has no namespace: use your-name/{repo_id}")


def file_names(info: RepoInfo | None) -> set[str]:
    """Return the paths of the files in a repository."""
    return {file.rfilename for file in (info and info.siblings) or ()}


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder that is published."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sha256(file: Path) -> str:
    """Return the hash that the Hub stores for large files."""
    with file.open("rb") as stream:
        return sha_fileobj(stream).hex()


def changed_files(local: dict[str, Path], info: RepoInfo | None) -> dict[str, Path]:
    """Return the files, by their paths in a repository, that it does not have with the same content."""
    changed = dict(local)
    for remote in (info and info.siblings) or ():
        if (file := local.get(remote.rfilename)) is not None:
            same = remote.lfs.sha256 == sha256(file) if remote.lfs else remote.blob_id == git_hash(file.read_bytes())
            if same:
                del changed[remote.rfilename]
    return changed


@contextmanager
def hub_errors(target: str, state: str) -> Iterator[None]:
    """Raise errors of the Hub client about a target as a `UserError`, with the state after the error and what to do."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise UserError(_NOT_LOGGED_IN) from error
    except OfflineModeIsEnabled as error:
        raise UserError("the Hub cannot be reached because HF_HUB_OFFLINE is set") from error
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, UnicodeEncodeError) and error.encoding == "ascii":  # the token is sent in a header
            raise UserError(_NOT_LOGGED_IN) from error
        for cause in causes(error):  # for example of a RuntimeError about the upload of a file
            if isinstance(cause, HfHubHTTPError):
                raise UserError(_http_error(cause, target, state)) from error
            if _is_connection_error(cause):
                found = f"the connection to the Hub failed ({type(cause).__name__}: {cause})"
                raise UserError(f"{found}; {state}") from error
        raise


def _is_connection_error(error: BaseException) -> bool:
    if isinstance(error, _CONNECTION_ERRORS) or (isinstance(error, OSError) and error.errno in _UNREACHABLE):
        return True
    return type(error) is RuntimeError and os_error(error) is None and bool(_XET_CONNECTION.search(str(error)))


def _no_write_access(target: str) -> str:
    return f"no write access to {target}: ask its owner for access, or publish in your own namespace"


def _http_error(error: HfHubHTTPError, target: str, state: str) -> str:
    status = error.response.status_code
    detail = " ".join((error.server_message or str(error)).split())
    left = state.partition(":")[0]  # without the advice to repeat the command
    # The Hub also rejects a commit with 409 while another one is in progress.
    if status == 409 and error.response.request.url.path.endswith("/repos/create"):
        return f"{target} already exists: choose another name, or add --update to replace it ({left})"
    known = {
        401: _NOT_LOGGED_IN,
        403: f"{_no_write_access(target)} ({left})",
        404: f"{target} is not on the Hub, or you have no access to it",
        412: (
            f"another user committed to {target} at the same time, so nothing was published: check the new state, and run the"
            " same command again"
        ),
    }
    return known.get(status, f"the Hub rejected {target} with status {status}: {detail}; {state}")
