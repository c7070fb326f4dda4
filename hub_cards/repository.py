"""A repository on the Hub: its current files, and a commit whose files are compared with the local ones.

A model and the page of a model are published in a single commit, so that readers never get half of it. `HfApi.upload_folder` splits
large uploads into several commits, so we use `create_commit`. Files that the Hub already has are not uploaded again, so an
interrupted upload is resumed by running the same command again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, DatasetInfo, HfApi, ModelInfo, SpaceInfo
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils.sha import git_hash, sha_fileobj

from revela_hub import __version__
from revela_hub.errors import UserError

COMMIT_MESSAGE = "Publish with revela-hub"
RepoInfo = ModelInfo | DatasetInfo | SpaceInfo
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
        tag: tag of the new commit.
        update: replace an existing model; other files are kept.
        collection: title of a collection in the namespace to add the model to, created if it does not exist.
        token: token instead of that from `hf auth login` or HF_TOKEN.
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
        """Reject values that the Hub would reject after everything else is done."""
        validate_repo_id(self.repo_id)
        if "/" not in self.repo_id:
            raise UserError(f"{self.repo_id!r} has no namespace: use your-name/{self.repo_id}")
        if self.pull_request and (self.revision or self.tag):
            raise UserError("a pull request is opened for the main branch, and cannot have a tag before it is merged")


class Repository:
    """The repository of a destination.

    Attributes:
        info: current state of the branch; that of main, with which a new branch starts; None if there is no repository.
        new_branch: whether the branch does not exist.
    """

    def __init__(self, destination: Destination, kind: Literal["model", "dataset", "space"] = "model") -> None:
        self.destination, self.repo_id, self.kind = destination, destination.repo_id, kind
        self.api = HfApi(token=destination.token, library_name="revela-hub", library_version=__version__)
        self.info: RepoInfo | None = None
        self.new_branch = False

    def read(self) -> None:
        """Read the current state."""
        wanted = self.destination
        try:
            self.info = self._info(wanted.revision)
        except RepositoryNotFoundError:
            self.info = None
        except RevisionNotFoundError:
            self.info, self.new_branch = self._info(None), True
        if wanted.private and self.info is not None and not getattr(self.info, "private", None):
            raise UserError(
                f"{self.url()} is public, which --private cannot change: make it private in its settings on the Hub"
            )
        if not wanted.pull_request:
            self._check_access()
        if wanted.tag and self.info is not None:
            tags = {
                tag.name: tag.target_commit for tag in self.api.list_repo_refs(self.repo_id, repo_type=self.kind).tags
            }
            if tags.get(wanted.tag) not in (None, self.info.sha):
                raise UserError(
                    f"{self.repo_id} has the tag {wanted.tag} already, on another commit: choose another tag"
                )

    def _info(self, revision: str | None) -> RepoInfo:
        info: Any = self.api.repo_info(self.repo_id, repo_type=self.kind, revision=revision, files_metadata=True)
        found: RepoInfo = info  # newer versions of huggingface_hub also have other kinds
        return found

    def _check_access(self) -> None:
        """Check that the token can write to the namespace, before the work."""
        me = self.api.whoami()
        role = (me.get("auth", {}).get("accessToken") or {}).get("role")
        orgs = {group["name"] for group in me.get("orgs") or () if group.get("roleInOrg") != "read"}
        if self.repo_id.partition("/")[0] not in {me["name"], *orgs} or role == "read":
            raise UserError(f"no write access to {self.repo_id}: log in with a token that can write to this namespace")

    @property
    def is_ours(self) -> bool:
        """Whether the last commit of the branch is of this program: an interrupted command may have made it."""
        if self.info is None or self.new_branch:
            return False
        commits = self.api.list_repo_commits(self.repo_id, repo_type=self.kind, revision=self.destination.revision)
        return bool(commits) and commits[0].title.startswith(COMMIT_MESSAGE)

    def names(self) -> set[str]:
        """Return the paths of the current files."""
        return {file.rfilename for file in (self.info and self.info.siblings) or ()}

    def changed(self, files: Files) -> dict[str, Path | bytes]:
        """Return the files that the repository does not have with the same content."""
        return _changed(files, self.info)

    def commit(self, files: Files, delete: list[str]) -> tuple[str, str]:
        """Make one commit with the files that differ, and compare its files with the local ones; return its hash and URL.

        Without changes there is no new commit.
        """
        wanted = self.destination
        if self.info is None:
            sdk = "gradio" if self.kind == "space" else None
            self.api.create_repo(self.repo_id, repo_type=self.kind, space_sdk=sdk, private=wanted.private or None)
        if wanted.revision and (self.info is None or self.new_branch):
            self.api.create_branch(self.repo_id, repo_type=self.kind, branch=wanted.revision, exist_ok=True)
        before = self._info(wanted.revision)
        add = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=file)
            for name, file in _changed(files, before).items()
        ]
        if not add and not delete:
            return str(before.sha), self.url()
        done = self.api.create_commit(
            self.repo_id,
            [*add, *(CommitOperationDelete(path_in_repo=name) for name in delete)],
            repo_type=self.kind,
            commit_message=f"{COMMIT_MESSAGE} {__version__}",
            revision=wanted.revision,
            create_pr=wanted.pull_request,
            parent_commit=before.sha,  # fails if another user commits at the same time
        )
        url = done.pr_url or self.url()
        if different := sorted(_changed(files, self._info(done.oid))):
            raise UserError(
                f"{url} at {done.oid[:10]}: {different[0]} differs from the local file: publish it again with --update"
            )
        return done.oid, url

    def url(self) -> str:
        """Return the URL of the repository or the branch."""
        revision = self.destination.revision
        return f"{self.api.endpoint}/{_URLS[self.kind]}{self.repo_id}" + (f"/tree/{revision}" if revision else "")

    def label(self, commit: str) -> None:
        """Tag the commit, and add the model to its collection."""
        wanted, namespace = self.destination, self.repo_id.partition("/")[0]
        if wanted.tag:
            again = self.info is not None and self.info.sha == commit
            self.api.create_tag(self.repo_id, tag=wanted.tag, revision=commit, exist_ok=again)
        if wanted.collection:
            collection = self.api.create_collection(wanted.collection, namespace=namespace, exists_ok=True)
            self.api.add_collection_item(collection.slug, self.repo_id, "model", exists_ok=True)


def files_of(folder: Path) -> dict[str, Path | bytes]:
    """Return the files of a folder that is published, by their paths in it."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _changed(files: Files, info: RepoInfo | None) -> dict[str, Path | bytes]:
    remote = {file.rfilename: file for file in (info and info.siblings) or ()}
    return {name: file for name, file in files.items() if not (name in remote and _is_same(remote[name], file))}


def _is_same(remote: Any, file: Path | bytes) -> bool:
    """Return whether a file on the Hub has the hash of a local one: SHA-256 for large files, that of git for others."""
    if isinstance(file, bytes):
        return bool(remote.blob_id == git_hash(file))
    if remote.lfs is None:
        return bool(remote.blob_id == git_hash(file.read_bytes()))
    with file.open("rb") as stream:
        return bool(remote.lfs.sha256 == sha_fileobj(stream).hex())
