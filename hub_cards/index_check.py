"""The full check of an index, which reads every byte; opening one compares names, sizes and a sample (`PassageStore`)."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.hub_cards.contents import Check
from revela_hub.retrieval.canary import Canary, spread
from revela_hub.retrieval.disk import checksum, mapped
from revela_hub.retrieval.index_metadata import IndexMetadata, read_metadata
from revela_hub.retrieval.store import PassageStore
from revela_hub.retrieval.stored_vectors import Vectors
from revela_hub.retrieval.texts import TextFile, TextList
from revela_hub.retrieval.vectors import store_folder

ROWS = 8192
_AGAIN = "run revela-hub index again with the same model, corpus and folder"


def check_index(folder: str | Path) -> Iterator[Check]:
    """Yield the checks of an index: its texts, the checksums of its vectors, their places, and its canary."""
    folder = local_path(folder)
    metadata = read_metadata(folder)
    yield Check(
        "index", True, f"{counted(metadata.passages, 'passage')}, {metadata.dimension} dimensions, of {metadata.model}"
    )
    try:
        texts = TextFile(folder / f"texts-{metadata.texts}.arrow")
    except UserError as error:
        yield Check("texts", False, str(error))
        return
    yield _texts(texts, metadata)
    yield (vectors := _shards(folder, metadata))
    if vectors.ok:
        yield from _places(folder, metadata, texts)


def _texts(texts: TextFile, metadata: IndexMetadata) -> Check:
    wrong = 0
    for start in range(0, len(texts), ROWS):
        rows = range(start, min(start + ROWS, len(texts)))
        found_R2 = TextList(texts.read(rows)).digests_N2
        wrong += int((found_R2 != texts.digests_N2[start : rows.stop]).any(axis=1).sum())
    if wrong or len(texts) != metadata.passages:
        texts_found = counted(wrong or len(texts), "text")
        found = f"{texts_found} changed" if wrong else f"{texts_found}, not {metadata.passages:,}"
        return Check("texts", False, f"{texts.path}: {found}: delete it, and {_AGAIN}")
    return Check("texts", True, "their hashes match")


def _shards(folder: Path, metadata: IndexMetadata) -> Check:
    store = store_folder(folder, metadata.store_name, metadata.options.dtype)
    shards = [path for path in sorted(store.glob("*.npy")) if len(path.stem) == 32]
    damaged = [path for path in shards if not _is_intact(path)]
    if damaged or not shards:
        first = damaged[0] if damaged else store
        count = f"{len(damaged):,} of {len(shards):,} shards are damaged, such as" if damaged else "no vectors in"
        return Check("vectors", False, f"{count} {first}: delete them, and {_AGAIN}")
    return Check("vectors", True, f"the checksums of {counted(len(shards), 'shard')} match")


def _is_intact(path: Path) -> bool:
    try:
        return checksum(mapped(path)) == path.stem
    except (OSError, ValueError, EOFError):
        return False


def _places(folder: Path, metadata: IndexMetadata, texts: TextFile) -> Iterator[Check]:
    try:
        store = PassageStore(folder)
        vectors = replace(store.vectors, normalize=False)
        wrong = sum(_misplaced(vectors, texts, start) for start in range(0, len(texts), ROWS))
        found = (
            "each passage has its vector"
            if not wrong
            else f"{counted(wrong, 'passage')} with the vector of another one: {_AGAIN}"
        )
        yield Check("places", not wrong, found)
        canary = Canary.read(folder, metadata.canary)
        same = np.array_equal(np.array(canary.vectors, np.float32), vectors.take(spread(len(texts))))
        yield Check("canary", same, "equals the vectors" if same else f"its vectors differ from the index: {_AGAIN}")
    except UserError as error:
        yield Check("places", False, str(error))


def _misplaced(vectors: Vectors, texts: TextFile, start: int) -> int:
    rows = np.arange(start, min(start + ROWS, len(texts)))
    return int((vectors.records(rows)["digest"] != texts.digests_N2[rows]).any(axis=1).sum())
