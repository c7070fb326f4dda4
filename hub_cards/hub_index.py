"""An index of passages in a data set repository on the Hub: the folder of the index, without the indexes derived from it."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from revela_hub.data.sources.source import HUB_PREFIX
from revela_hub.errors import UserError
from revela_hub.files import cache_folder, key_of
from revela_hub.hub_cards.repository import Repository, files_of
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.index import EQUAL, METADATA, PassageStore

FILES = re.compile(r"texts-[0-9a-f]{32}\.(arrow|npz)|vectors-[0-9a-f]{16}/(vectors|digests)-[0-9a-f-]+\.npy")
"""The files besides index.json. FAISS indexes are built on each machine, because FAISS trusts their content."""
CARD = """\
---
task_categories:
- text-retrieval
tags:
- revela-hub
- retrieval-index
---

# {title}

{index.passages:,} passages with their vectors ({index.dimension} dimensions, {index.similarity}), computed by `{index.model}`.
Search them with the same model:

```bash
revela-hub search {index.model} "your question" --index hf:{repo_id}
```
"""


def push_index(store: PassageStore, repository: Repository) -> str:
    """Push an index in one commit, and return the URL of its repository with the commit.

    The text of the passages is published. Other files in the repository are kept, and so is a card that exists.
    """
    if store.metadata.options.type == "milvus":
        raise UserError("the vectors of this index are in Milvus: build one of another --index_type to push it")
    # Without the address of a server, and without the path of a model there.
    fingerprint = re.sub(r"(?<=:)/[^:]*/", "", store.metadata.fingerprint)
    metadata = replace(store.metadata, endpoint=None, fingerprint=fingerprint)
    files = {name: path for name, path in files_of(store.folder).items() if FILES.fullmatch(name)}
    files[METADATA] = (json.dumps(asdict(metadata), indent=2) + "\n").encode()
    if "README.md" not in repository.names:
        repo_id = repository.repo_id
        card = CARD.format(title=repo_id.partition("/")[2], index=metadata, repo_id=repo_id)
        files["README.md"] = card.encode()
    delete = sorted(name for name in repository.names - files.keys() if FILES.fullmatch(name))
    commit, url = repository.commit(files, delete)
    return f"{url}/commit/{commit}"


def open_store(
    index: str, encoder: Encoder | None, fingerprint: str | None, model: str, documents: str | None = None
) -> PassageStore:
    """Open an index in a folder, or `hf:namespace/name[@revision]`, and check that it belongs to the model, if vectors are used.

    An index on the Hub may name the same model in another way, for example as a folder: then the vectors of some passages decide.
    """
    if not index.startswith(HUB_PREFIX):
        store = PassageStore(index, fingerprint, model, documents=documents)
    else:
        folder = _download(index)
        store = PassageStore(folder, derived=cache_folder("indexes") / key_of(index.partition("@")[0], folder.name))
        if store.metadata.options.type == "milvus":  # the address of a server, to which MILVUS_TOKEN would be sent
            raise UserError(f"{index} names a server of Milvus: an index on the Hub must hold its vectors")
        store.derived.mkdir(parents=True, exist_ok=True)
        if fingerprint is not None and (encoder is None or store.similarity(encoder) < EQUAL):
            store.check_fingerprint(fingerprint, model, documents=documents)
    if encoder is not None:
        store.check_vectors(encoder)
    return store


def _download(index: str) -> Path:
    """Download an index, and return its folder; files in the Hub's cache are not downloaded again, and work offline."""
    repo_id, _, revision = index.removeprefix(HUB_PREFIX).partition("@")
    patterns = [METADATA, "texts-*", "vectors-*/*.npy"]
    options: dict[str, Any] = {"repo_type": "dataset", "revision": revision or None, "allow_patterns": patterns}
    return Path(snapshot_download(repo_id, **options))
