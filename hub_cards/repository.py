"""A repository on the Hub: its current files, and a commit whose files are compared with the local ones.

A model and the page of a model are published in a single commit, so that readers never get half of it. Files that the Hub already
has are not uploaded again, so an interrupted upload is resumed by running the same command again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils.sha import git_hash, sha_fileobj

from revela_hub import __version__
from revela_hub.errors import UserError

Files = Mapping[str, Path | bytes]
"""Path in a repository -> file or content."""
_URLS = {"model": "", "dataset": "datasets/", "space": "spaces/"}


@dataclass(frozen=True)
class Destination:
    """A repository to publish to.

    Attributes:
        repo_id: `namespace/name`.
        private: create a private repository; an existing public one is an error.
        revision: branch to commit to, created if it does not exist; by default the main branch.
        pull_request: open a pull request instead of committing.
        update: replace an existing model; other files are kept.
        token: token instead of that from `hf auth login` or HF_TOKEN.
    """

    repo_id: str
    private: bool = False
    revision: str | None = None
    pull_request: bool = False
    update: bool = False
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Reject values that the Hub would reject after everything else is done."""
        validate_repo_id(self.repo_id)
        if "/" not in self.repo_id:
            raise UserError(f"{self.repo_id!r} has no namespace: use your-name/{self.repo_id}")
        if self.pull_request and self.revision:
            raise UserError("a pull request is opened for the main branch: leave out the revision")


class Repository:
    """The repository of a destination; `names` are the paths of its files, which `read` finds."""

    def __init__(self, destination: Destination, kind: Literal["model", "dataset", "space"] = "model") -> None:
        self.destination, self.repo_id, self.kind = destination, destination.repo_id, kind
        self.api = HfApi(token=destination.token, library_name="revela-hub", library_version=__version__)
        self.names: set[str] = set()

    def read(self, files: Files | None = None) -> None:
        """Read the files of the branch, and check before the work that this destination can be written.

        A repository that has these `files` already is that of an interrupted upload.
        """
        wanted, new_branch = self.destination, False
        try:
            info = self._info(wanted.revision)
        except RepositoryNotFoundError:
            info = None
        except RevisionNotFoundError:
            info, new_branch = self._info(None), True
        if info is not None:
            remote = {file.rfilename: file for file in info.siblings or ()}
            self.names = {*remote}
            resumed = bool(files) and all(_is_same(remote.get(name), file) for name, file in (files or {}).items())
            if wanted.private and not info.private:
                raise UserError(f"{self.url()} is public: make it private on the Hub, or leave out private")
            if self.names - {".gitattributes"} and not (wanted.update or wanted.pull_request or new_branch or resumed):
                raise UserError(f"{self.url()} holds files already: choose another name, or set update")
        if not wanted.pull_request:
            self._check_access()

    def _check_access(self) -> None:
        """Raise an error if the token cannot write to the namespace."""
        me = self.api.whoami()
        role = (me.get("auth", {}).get("accessToken") or {}).get("role")
        orgs = {group["name"] for group in me.get("orgs") or () if group.get("roleInOrg") != "read"}
        if self.repo_id.partition("/")[0] not in {me["name"], *orgs} or role == "read":
            raise UserError(f"no write access to {self.repo_id}: log in with a token that can write to this namespace")

    def commit(self, files: Files, delete: list[str]) -> tuple[str, str]:
        """Make one commit, and compare its files with the local ones; return its hash and URL.

        Without changes there is no new commit.
        """
        wanted = self.destination
        sdk = "gradio" if self.kind == "space" else None
        self.api.create_repo(
            self.repo_id, repo_type=self.kind, space_sdk=sdk, private=wanted.private or None, exist_ok=True
        )
        if wanted.revision:
            self.api.create_branch(self.repo_id, repo_type=self.kind, branch=wanted.revision, exist_ok=True)
        done = self.api.create_commit(
            self.repo_id,
            [
                *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in files.items()),
                *(CommitOperationDelete(path_in_repo=name) for name in delete),
            ],
            repo_type=self.kind,
            commit_message=f"Publish with revela-hub {__version__}",
            revision=wanted.revision,
            create_pr=wanted.pull_request,
            parent_commit=self._info(wanted.revision).sha,  # fails if another user commits at the same time
        )
        url = done.pr_url or self.url()
        remote = {file.rfilename: file for file in self._info(done.oid).siblings}
        if different := [name for name, file in files.items() if not _is_same(remote.get(name), file)]:
            raise UserError(
                f"{url} at {done.oid[:10]}: {different[0]} differs from the local file: publish it again with update"
            )
        return done.oid, url

    def _info(self, revision: str | None) -> Any:
        return self.api.repo_info(self.repo_id, repo_type=self.kind, revision=revision, files_metadata=True)

    def url(self) -> str:
        """Return the URL of the repository or the branch."""
        revision = self.destination.revision
        return f"{self.api.endpoint}/{_URLS[self.kind]}{self.repo_id}" + (f"/tree/{revision}" if revision else "")


def files_of(folder: Path) -> dict[str, Path | bytes]:
    """Return the files of a folder that is published, by their paths in it."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _is_same(remote: Any, file: Path | bytes) -> bool:
    """Return whether a file on the Hub has the hash of a local one: SHA-256 for large files, that of git for others."""
    if remote is None:
        return False
    if isinstance(file, bytes) or remote.lfs is None:
        return bool(remote.blob_id == git_hash(file if isinstance(file, bytes) else file.read_bytes()))
    with file.open("rb") as stream:
        return bool(remote.lfs.sha256 == sha_fileobj(stream).hex())
