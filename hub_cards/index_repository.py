"""Push an index to a data set repository on the Hub, and download one (`hub_index` has the files)."""

import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, DatasetInfo, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

from revela_hub import __version__
from revela_hub.errors import UserError
from revela_hub.hub_cards.hub_index import PREFIX, open_downloaded, read_index, write_files
from revela_hub.hub_cards.index_card import index_card
from revela_hub.hub_cards.repository import changed_files, check_repo_id, file_names, files_of, hub_client, hub_errors
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.store import METADATA, PassageStore

_OURS = re.compile(r"index\.json|canary-[0-9a-f]+\.json|data/passages-\d+\.parquet|README\.md|\.gitattributes")
_AGAIN = "run the same command again"


@dataclass(frozen=True)
class IndexDestination:
    """Where to push an index.

    Attributes:
        repo_id: `namespace/name` of a data set repository.
        private: Create a private repository.
        update: Replace an index in it.
        token: A token instead of that of `hf auth login` or HF_TOKEN.

    Raises:
        UserError: The name is invalid.
    """

    repo_id: str
    private: bool = False
    update: bool = False
    token: str | None = None

    def __post_init__(self) -> None:
        check_repo_id(self.repo_id, "name of a repository")

    def current(self) -> DatasetInfo | None:
        """Return the current state of the repository; None if it does not exist.

        Raises:
            UserError: It cannot be written to, is public although it should be private, or holds something else.
        """
        api = hub_client(self.token)
        with hub_errors(self.repo_id, f"nothing was pushed: {_AGAIN}"):
            try:
                info = api.dataset_info(self.repo_id, files_metadata=True)
            except RepositoryNotFoundError:
                api.whoami()
                return None
        if others := sorted(name for name in file_names(info) if not _OURS.fullmatch(name)):
            raise UserError(f"{self.repo_id} holds other files ({others[0]}): choose another name for the index")
        if "README.md" in file_names(info) and METADATA not in file_names(info) and not self.update:
            raise UserError(
                f"{self.repo_id} already holds a README.md: choose another name, or add --update to replace it"
            )
        if self.private and not info.private:
            raise UserError(
                f"{self.repo_id} is public already: make it private in its settings, or choose another name"
            )
        return info


def push_index(
    store: PassageStore,
    destination: IndexDestination,
    corpus: Sequence[str],
    say: Callable[[str], None] = lambda _: None,
) -> str:
    """Push an index in one commit, and return its URL with the commit.

    An interrupted push is resumed by running it again: files that the Hub has are not uploaded again. `corpus` are the paths that
    the index was made of; `say` is called with lines about the progress.

    Raises:
        UserError: See `IndexDestination.current`; the repository holds another index and `update` is off; the connection fails.
    """
    before, repo_id = destination.current(), destination.repo_id
    # Not in the folder for temporary files, which may be small. If this process is killed, the next index command removes it.
    folder = store.folder / f"hub.{uuid.uuid4().hex}.tmp"
    try:
        metadata, written = write_files(store, folder, corpus)
        card = index_card(metadata, [folder / name for name in written], repo_id)
        (folder / "README.md").write_text(card, encoding="utf-8")
        files = {file.relative_to(folder).as_posix(): file for file in files_of(folder)}
        say(f"pushing {sum(file.stat().st_size for file in files.values()):,} bytes in {len(files)} files")
        with hub_errors(repo_id, f"nothing was pushed: {_AGAIN} to resume"):
            return _commit(destination, before, files)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _commit(destination: IndexDestination, before: DatasetInfo | None, files: dict[str, Path]) -> str:
    api, repo_id = hub_client(destination.token), destination.repo_id
    if before is None:
        api.create_repo(repo_id, repo_type="dataset", private=destination.private or None, exist_ok=True)
        before = api.dataset_info(repo_id, files_metadata=True)
    add, stale = changed_files(files, before), sorted(file_names(before) - files.keys() - {".gitattributes"})
    url = f"{api.endpoint}/datasets/{repo_id}"
    if not add and not stale:
        return f"{url} (commit {str(before.sha)[:10]}, unchanged)"
    if METADATA in file_names(before) and not destination.update:
        raise UserError(f"{repo_id} already holds another index: choose another name, or add --update to replace it")
    operations: list[Any] = [CommitOperationAdd(name, file) for name, file in add.items()]
    operations += [CommitOperationDelete(name) for name in stale]
    done = api.create_commit(
        repo_id,
        operations,
        repo_type="dataset",
        commit_message=f"Index by revela-hub {__version__}",
        parent_commit=before.sha,
    )
    return f"{url} (commit {done.oid[:10]})"


def download_index(index: str) -> Path:
    """Download `hf:namespace/name` or `hf:namespace/name@revision`, and return the folder of a local index.

    What is in the Hub's cache is not downloaded again, and works offline.

    Raises:
        UserError: The repository or revision does not exist or holds no index; a file is damaged; no connection.
    """
    repo_id, _, revision = index.removeprefix(PREFIX).partition("@")
    check_repo_id(repo_id, "name of a repository", namespace=False)
    name = f"{PREFIX}{repo_id}"
    options: dict[str, Any] = {"repo_type": "dataset", "revision": revision or None}
    with hub_errors(index, _AGAIN):
        try:
            first = hf_hub_download(repo_id, METADATA, **options)
        except LocalEntryNotFoundError as error:
            raise UserError(
                f"the Hub cannot be reached, and {index} was not downloaded before: try again later"
            ) from error
        except EntryNotFoundError as error:
            raise UserError(
                f"{index} holds no index ({METADATA} is missing): push one with revela-hub index"
            ) from error
        commit = Path(first).parent.name
        metadata, files = read_index(Path(first).parent, name)
        wanted = [METADATA, f"canary-{metadata.canary}.json", *files]
        snapshot = snapshot_download(repo_id, allow_patterns=wanted, **options | {"revision": commit})
    return open_downloaded(Path(snapshot), name)


def open_index_of(
    index: str, encoder: Encoder | None, fingerprint: str | None, model: str, documents: str | None = None
) -> tuple[PassageStore, str]:
    """Open a local index or one on the Hub, and compare its canary; returns it with a warning, or an empty string.

    An index on the Hub may name the same model in another way, for example as a folder. Its canary decides then. The encoder is
    None if no vectors are used; the other arguments are those of `PassageStore`.

    Raises:
        UserError: See `PassageStore`, `PassageStore.compare_canary` and `download_index`.
    """
    if not index.startswith(PREFIX):
        store = PassageStore(index, fingerprint, model, documents=documents)
        return store, "" if encoder is None else store.compare_canary(encoder)
    store = PassageStore(download_index(index))
    if encoder is None or fingerprint is None:
        return store, ""
    if store.metadata.fingerprint in (fingerprint, documents):
        return store, store.compare_canary(encoder)
    if not store.has_vectors_of(encoder):
        store.check_fingerprint(fingerprint, model, documents=documents)
    return store, ""
