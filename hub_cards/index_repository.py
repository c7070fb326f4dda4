"""Push an index to a data set repository on the Hub, and download one (`hub_index` has the files)."""

import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download

from revela_hub.data.sources.report import counted
from revela_hub.data.sources.source import HUB_PREFIX
from revela_hub.errors import UserError
from revela_hub.hub_cards.hub_index import open_downloaded, read_index, write_files
from revela_hub.hub_cards.index_card import index_card
from revela_hub.hub_cards.repository import Destination, Repository, files_of
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.index_metadata import METADATA
from revela_hub.retrieval.store import PassageStore

CARD = "README.md"
_REPLACED = re.compile(r"canary-[0-9a-f]+\.json|data/passages-\d+\.parquet")


class IndexDestination(Repository):
    """A data set repository to push an index to; with `update`, an index in it is replaced."""

    def __init__(self, repo_id: str, private: bool = False, update: bool = False, token: str | None = None) -> None:
        super().__init__(Destination(repo_id, private=private, update=update, token=token), "dataset")

    def current(self) -> None:
        """Read the state.

        Raises:
            UserError: the repository cannot be written to, is public although it should be private, or holds something else.
        """
        self.read()
        others = {name for name in self.names() if not _REPLACED.fullmatch(name)} - {".gitattributes", CARD, METADATA}
        if METADATA not in self.names() and (others or (CARD in self.names() and not self.destination.update)):
            raise UserError(
                f"{self.repo_id} holds other files ({min(others, default=CARD)}): choose another name for the index"
            )


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
        UserError: See `IndexDestination.current`; the repository holds another index and `update` is off.
    """
    destination.current()
    # Not in the folder for temporary files, which may be small. If this process is killed, the next index command removes it.
    folder = store.folder / f"hub.{uuid.uuid4().hex}.tmp"
    try:
        metadata, written = write_files(store, folder, corpus)
        card = index_card(metadata, [folder / name for name in written], destination.repo_id)
        (folder / CARD).write_text(card, encoding="utf-8")
        files = files_of(folder)
        if METADATA in destination.names() and destination.changed(files) and not destination.destination.update:
            raise UserError(f"{destination.repo_id} already holds another index: choose another name, or add --update")
        log(f"pushing {counted(len(files), 'file')}")
        delete = sorted(name for name in destination.names() - files.keys() if _REPLACED.fullmatch(name))
        commit, url = destination.commit(files, delete)
        return f"{url} (commit {commit[:10]})"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def download_index(index: str) -> Path:
    """Download `hf:namespace/name` or `hf:namespace/name@revision`, and return the folder of a local index.

    What is in the Hub's cache is not downloaded again, and works offline.
    """
    repo_id, _, revision = index.removeprefix(HUB_PREFIX).partition("@")
    name = f"{HUB_PREFIX}{repo_id}"
    options: dict[str, Any] = {"repo_type": "dataset", "revision": revision or None}
    first = hf_hub_download(repo_id, METADATA, **options)
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
