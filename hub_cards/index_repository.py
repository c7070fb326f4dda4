"""Push an index to a data set repository on the Hub, and download one (`hub_index` has the files)."""

import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from revela_hub.data.sources.report import counted
from revela_hub.data.sources.source import HUB_PREFIX
from revela_hub.errors import UserError
from revela_hub.hub_cards.hub_index import open_downloaded, read_index, write_files
from revela_hub.hub_cards.index_card import index_card, is_unchanged
from revela_hub.hub_cards.repository import (
    Destination,
    Plan,
    RepoInfo,
    Repository,
    changed_files,
    check_repo_id,
    file_names,
    files_of,
    hub_errors,
)
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.index_metadata import METADATA
from revela_hub.retrieval.store import PassageStore

CARD = "README.md"
_REPLACED = re.compile(r"canary-[0-9a-f]+\.json|data/passages-\d+\.parquet")
_AGAIN = "run the same command again"


class IndexDestination(Repository):
    """A repository to push an index to.

    Args:
        repo_id: `namespace/name` of a data set repository.
        private: Create a private repository.
        update: Replace an index in it.
        token: A token instead of that of `hf auth login` or HF_TOKEN.

    Raises:
        UserError: The name is invalid.
    """

    def __init__(self, repo_id: str, private: bool = False, update: bool = False, token: str | None = None) -> None:
        check_repo_id(repo_id, "name of a repository")
        super().__init__(Destination(repo_id, private=private, update=update, token=token), "dataset")

    def current(self) -> RepoInfo | None:
        """Return the current state of the repository; None if it does not exist.

        Raises:
            UserError: It cannot be written to, is public although it should be private, or holds something else.
        """
        with hub_errors(self.repo_id, f"nothing was pushed: {_AGAIN}"):
            info = self.state()
        names = file_names(info) - {".gitattributes"}
        if METADATA in names:  # an index; other files of the user are kept
            return info
        if others := sorted(name for name in names if name != CARD and not _REPLACED.fullmatch(name)):
            raise UserError(f"{self.repo_id} holds other files ({others[0]}): choose another name for the index")
        if CARD in names and not self.destination.update:
            raise UserError(
                f"{self.repo_id} already holds a {CARD}: choose another name, or add --update to replace it"
            )
        return info


def push_index(
    store: PassageStore,
    destination: IndexDestination,
    corpus: Sequence[str],
    log: Callable[[str], None] = lambda _: None,
) -> str:
    """Push an index in one commit, and return its URL with the commit.

    An interrupted push is resumed by running it again: files that the Hub has are not uploaded again. `corpus` are the paths that
    the index was made of; `log` is called with lines about the progress.

    Raises:
        UserError: See `IndexDestination.current`; the repository holds another index and `update` is off; the connection fails.
    """
    before, repo_id = destination.current(), destination.repo_id
    # Not in the folder for temporary files, which may be small. If this process is killed, the next index command removes it.
    folder = store.folder / f"hub.{uuid.uuid4().hex}.tmp"
    try:
        metadata, written = write_files(store, folder, corpus)
        card = index_card(metadata, [folder / name for name in written], repo_id)
        (folder / CARD).write_text(card, encoding="utf-8")
        files = {file.relative_to(folder).as_posix(): file for file in files_of(folder)}
        log(f"pushing {sum(file.stat().st_size for file in files.values()):,} bytes in {counted(len(files), 'file')}")
        with hub_errors(repo_id, f"nothing was pushed: {_AGAIN} to resume"):
            return _commit(destination, before, files, log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _commit(
    repository: IndexDestination, before: RepoInfo | None, files: dict[str, Path], log: Callable[[str], None]
) -> str:
    wanted, before = repository.destination, repository.prepare(before)
    old, add = file_names(before), changed_files(files, before)
    delete = sorted(name for name in old - files.keys() if _REPLACED.fullmatch(name))
    if not delete and add.keys() <= {CARD} & old:  # the card of another version, or with changes by the user
        return f"{repository.url()} (commit {str(before.sha)[:10]}, unchanged)"
    if METADATA in old and not wanted.update:
        raise UserError(
            f"{wanted.repo_id} already holds another index: choose another name, or add --update to replace it"
        )
    if {METADATA, CARD} <= old and CARD in add:
        card = hf_hub_download(wanted.repo_id, CARD, repo_type="dataset", revision=before.sha, token=wanted.token)
        if not is_unchanged(Path(card).read_text(encoding="utf-8", errors="replace")):
            log(
                f"{wanted.repo_id}: keeping the edited {CARD}, which describes the earlier index: delete it for a new one"
            )
            del add[CARD]
    commit, url = repository.commit(Plan(add, delete), before)
    return f"{url} (commit {commit[:10]})"


def download_index(index: str) -> Path:
    """Download `hf:namespace/name` or `hf:namespace/name@revision`, and return the folder of a local index.

    What is in the Hub's cache is not downloaded again, and works offline.

    Raises:
        UserError: The repository or revision does not exist or holds no index; a file is damaged; no connection.
    """
    repo_id, _, revision = index.removeprefix(HUB_PREFIX).partition("@")
    check_repo_id(repo_id, "name of a repository", namespace=False)
    name = f"{HUB_PREFIX}{repo_id}"
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
    if not index.startswith(HUB_PREFIX):
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
