"""A passage index on disk, written by `revela-hub index` and read by `search` and `answer`.

    index.json           metadata: model, fingerprint, similarity, index type
    texts-<hash>.arrow   the passages with their files and lines, next to a file of numbers
    vectors-<hash>/      their vectors, in shards (`vectors`)
    canary-<hash>.json   16 passages with their vectors (`canary`)
    *.faiss, milvus.db   an approximate index, if there is one

When an index is complete, the files of the one that it replaces are deleted: texts, canary and FAISS indexes. So are texts of
`revela-hub encode` that no index uses.

An index belongs to one model: opening it with another one raises an error.
"""

import contextlib
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError
from revela_hub.paths import local_path
from revela_hub.retrieval.canary import SAME_COSINE, Canary, finding, server_change, spread
from revela_hub.retrieval.dense import VectorIndex, milvus_uri, open_index
from revela_hub.retrieval.disk import claim_folder
from revela_hub.retrieval.encoder import SERVED_PREFIX, Encoder, similarity_of
from revela_hub.retrieval.index_metadata import METADATA, IndexMetadata, read_metadata
from revela_hub.retrieval.milvus import connect
from revela_hub.retrieval.passages import Hit, Passages
from revela_hub.retrieval.ranking import RankerSettings, document_store, document_vectors
from revela_hub.retrieval.stored_vectors import Vectors
from revela_hub.retrieval.texts import TextFile
from revela_hub.retrieval.top_k import Hits
from revela_hub.retrieval.vectors import VectorStore, store_folder, vectors_key
from revela_hub.whole_files import remove, write_text

logger = logging.getLogger(__name__)

DAY = 24 * 3600
_CONTENT = re.compile(r"(?:texts|canary)-([0-9a-f]{32})\.(?:arrow|json|[a-z]+\.npy)")
"""Files with the text of passages."""
_DERIVED = re.compile(r"bm25-[0-9a-f]{16}|[a-z0-9]+-[0-9a-f]{16}\.faiss")
"""Indexes of one version of the texts, which a search builds again if they are missing."""


class PassageStore:
    """An index on disk.

    Args:
        folder: The output folder of `revela-hub index`.
        fingerprint: `encoder.model_identity` of the model that encodes the queries; None skips the comparison.
        model: The model's name, for the message.
        documents: `encoder.document_identity` of the model: its documents have the vectors of this other model.

    Raises:
        UserError: There is no index, it belongs to another model, or its texts are damaged.
    """

    def __init__(
        self,
        folder: str | Path,
        fingerprint: str | None = None,
        model: str = "the model",
        *,
        documents: str | None = None,
    ) -> None:
        """Opens the index without reading texts or vectors, in the same time for any size."""
        self.folder = local_path(folder)
        self.metadata = read_metadata(self.folder)
        if fingerprint is not None:
            self.check_fingerprint(fingerprint, model, documents=documents)
        self.passages = Passages(TextFile(self.folder / f"texts-{self.metadata.texts}.arrow"))
        self._vectors: Vectors | None = None
        self._canary: Canary | None = None
        # Read now, because `revela-hub index` may replace the index while it is open.
        with contextlib.suppress(UserError):  # missing or damaged: an error only if they are needed
            self._canary = self.canary()
        with contextlib.suppress(UserError):
            self._vectors = self._found_vectors()

    @property
    def vectors(self) -> Vectors:
        """The vectors of the passages.

        Raises:
            UserError: Some are missing or damaged.
        """
        return self._found_vectors() if self._vectors is None else self._vectors

    def _found_vectors(self) -> Vectors:
        """Return the vectors; those of an index with changed files are looked up by their texts."""
        metadata, texts = self.metadata, self.passages.texts
        identity, dtype = metadata.store_name, metadata.options.dtype
        how: dict[str, Any] = {
            "normalize": metadata.similarity == "cosine",
            "truncate_dim": metadata.options.truncate_dim,
        }
        found = Vectors.from_layout(
            store_folder(self.folder, identity, dtype),
            texts.fingerprint,
            texts.digests_N2,
            key=vectors_key(identity, dtype, texts.fingerprint, **how),
            **how,
        )
        if found is None:
            found = VectorStore(self.folder, identity, dtype=dtype, option="--output_dir").vectors(texts, **how)
            with contextlib.suppress(UserError):  # a read-only index
                found.write_layout(texts.fingerprint)
        return found

    @cached_property
    def index(self) -> VectorIndex:
        """The index over the vectors.

        Raises:
            UserError: Its file is damaged, or a package is not installed.
        """
        return open_index(self.vectors, self.metadata.options, folder=self.folder)

    def check_fingerprint(self, fingerprint: str, model: str, *, documents: str | None = None) -> None:
        """Check that the index was built with a model; for the arguments see `PassageStore`.

        Raises:
            UserError: It was built with another model, or on another server.
        """
        if self.metadata.fingerprint in (fingerprint, documents):
            return
        if fingerprint.partition(SERVED_PREFIX)[0] == self.metadata.fingerprint.partition(SERVED_PREFIX)[0]:
            built = self.metadata.endpoint
            with_server = "with --endpoint and --endpoint_model as then"
            raise UserError(
                f"{self.folder} was built with vectors of {built or 'this machine'}, which may differ from those that"
                f" the queries would get: search it {with_server if built else 'without --endpoint'}"
            )
        length = self.metadata.max_length
        own = self.metadata.fingerprint.removesuffix(f":{length}").partition(":")[0]
        if own in {one.partition(":")[0] for one in (fingerprint, documents) if one}:
            remedy = "leave out --max_length" if length is None else f"add --max_length {length}"
            raise UserError(f"{self.folder} was built with this model and another maximum length: {remedy}")
        raise UserError(
            f"{self.folder} was built with {self.metadata.model} ({_short(self.metadata.fingerprint)}), but {model} is "
            f"a different model or version ({_short(fingerprint)}), whose vectors are not comparable; build an index "
            f"for it (revela-hub index {model} --corpus ... --output_dir ...)"
        )

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, vectors: NDArray[np.float32], k: int) -> Hits:
        """Return the best `k` passages for Q query vectors (Q, D): scores (Q, K) and numbers (Q, K), padded with -1.

        The vectors need not have unit length; if the model compares by cosine, they are normalised. If the index is
        truncated, so are they.

        Raises:
            UserError: The vectors have the wrong dimension.
        """
        vectors_QD = np.ascontiguousarray(vectors, dtype=np.float32)[..., : self.metadata.options.truncate_dim]
        if vectors_QD.ndim != 2 or vectors_QD.shape[1] != self.metadata.dimension:
            raise UserError(
                f"{self.folder} has vectors of dimension {self.metadata.dimension}, but the queries have the shape {vectors_QD.shape}"
            )
        if self.metadata.similarity == "cosine":
            vectors_QD = vectors_QD / np.maximum(np.linalg.norm(vectors_QD, axis=1, keepdims=True), 1e-12)
        return self.index.search(vectors_QD, k)

    def compare_canary(self, encoder: Encoder) -> str:
        """Compare the vectors of 16 passages with those that an encoder of the same model computes now.

        Returns:
            A warning if they differ by no more than an int8 model's rounding; empty if they do not differ.

        Raises:
            UserError: They differ by more, so that search would return the wrong passages; or the canary is damaged.
        """
        metadata, canary = self.metadata, self.canary()
        similarities = self._similarities(canary, encoder)
        causes = [*canary.changes(), *server_change(metadata.endpoint, encoder)]
        usable, sentence = finding(similarities, metadata.similarity, causes)
        if not usable:
            server = metadata.endpoint is not None
            cause = (
                "the server or its settings (see revela-hub check --endpoint)" if server else "a library or the device"
            )
            raise UserError(
                f"{self.folder}: {sentence}. Queries would find the wrong passages: undo the change of {cause}, or build the"
                " index in a new folder"
            )
        return f"{self.folder}: {sentence}. Results may differ slightly" if sentence else ""

    def has_vectors_of(self, encoder: Encoder) -> bool:
        """Return whether an encoder, loaded from wherever, computes the stored vectors of the canary.

        Raises:
            UserError: The canary is damaged.
        """
        canary = self.canary()
        try:
            return bool(self._similarities(canary, encoder).min(initial=1) >= SAME_COSINE)
        except UserError:  # another dimension
            return False

    def canary(self) -> Canary:
        """Return the canary.

        Raises:
            UserError: Its file is missing or damaged.
        """
        return self._canary or Canary.read(self.folder, self.metadata.canary)

    def _similarities(self, canary: Canary, encoder: Encoder) -> NDArray[np.float64]:
        prompt, truncate_dim = self.metadata.document_prompt, self.metadata.options.truncate_dim
        return canary.similarities(encoder, self.metadata.similarity, prompt=prompt, truncate_dim=truncate_dim)

    def texts(self, rows: Any) -> list[str]:
        """Return the passages with these numbers."""
        return self.passages.texts.read(int(row) for row in rows)

    def found(self, hits: Hits) -> list[list[Hit]]:
        """Return the retrieved passages of each query with their locations, best first."""
        return self.passages.found(hits)


def build_store(
    write: Callable[[Path], Passages],
    encoder: Encoder,
    output: str | Path,
    settings: RankerSettings,
    *,
    model: str,
    max_length: int | None = None,
    endpoint: str | None = None,
) -> PassageStore:
    """Builds an index, or resumes an interrupted build.

    Args:
        write: Writes the passages to a folder (`passages.read_passages`, `passages.write_passages`).
        encoder: Encodes the passages: any object with `encode_document`.
        output: The folder.
        settings: Fingerprint (`identity`), prompt and index options.
        model: The model's name, for the metadata.
        max_length: The number of tokens to which the encoder truncates passages, for the metadata.
        endpoint: The server that encodes the passages, for the metadata.

    Raises:
        UserError: There is no passage; the folder holds the index of another model; the disk is full.
    """
    folder = claim_folder(local_path(output), "--output_dir")
    earlier, written = None, 0.0
    with contextlib.suppress(UserError):  # missing or damaged: written again at the end
        earlier, written = read_metadata(folder), (folder / METADATA).stat().st_mtime
    if earlier is not None and earlier.fingerprint != settings.identity:
        raise UserError(f"{folder} holds the index of {earlier.model}: choose another --output_dir, or delete it")
    passages = write(folder)
    if not len(passages):
        raise UserError("no passage contains any text")
    started = passages.texts.path.stat().st_mtime
    if settings.index.type == "milvus":  # raises errors before the texts are encoded
        connect(milvus_uri(settings.index, folder)).close()
    own = store_folder(folder, document_store(settings.identity, settings.document_prompt), settings.index.dtype)
    if not own.exists() and any(folder.glob("vectors-*")):
        logger.warning(
            "%s has vectors of another --dtype, --document_prompt or --max_length: they are not used, and all passages are encoded",
            folder,
        )
    vectors = document_vectors(passages.texts, encoder, settings, folder, option="--output_dir")
    vectors.write_layout(passages.texts.fingerprint)
    rows = spread(len(passages))
    canary = Canary.of(passages.texts.read(rows.tolist()), replace(vectors, normalize=False).take(rows))
    open_index(vectors, settings.index, folder=folder, option="--output_dir")
    metadata = IndexMetadata(
        model=model,
        fingerprint=settings.identity,
        texts=passages.texts.fingerprint,
        passages=len(passages),
        dimension=vectors.dimension,
        similarity=similarity_of(encoder),
        document_prompt=settings.document_prompt,
        max_length=max_length,
        options=settings.index,
        endpoint=endpoint,
        canary=canary.write(folder),
    )
    write_text(folder / METADATA, metadata.to_json(), "--output_dir")
    _delete_texts(folder, metadata, max(written, started - DAY) if earlier else started)
    if earlier is not None:
        _delete_replaced(folder, earlier, metadata, vectors.key[:16])
    return PassageStore(folder, settings.identity, model)


def _delete_texts(folder: Path, metadata: IndexMetadata, limit: float) -> None:
    """Delete the texts and canaries that an index does not use, so that removed passages do not stay on the disk.

    Searches that have opened these files can still read them. Files newer than the limit are kept: another process may be encoding
    these texts or building an index of them in this folder.
    """
    for path in sorted(folder.iterdir()):
        found = _CONTENT.fullmatch(path.name)
        with contextlib.suppress(FileNotFoundError):  # another process deleted it
            if found and found[1] not in (metadata.texts, metadata.canary) and path.stat().st_mtime <= limit:
                remove(path)


def _delete_replaced(folder: Path, earlier: IndexMetadata, metadata: IndexMetadata, key: str) -> None:
    """Delete the FAISS and BM25 indexes of replaced texts, except those whose name has the key."""
    if earlier.texts != metadata.texts:
        for path in sorted(folder.iterdir()):
            if _DERIVED.fullmatch(path.name) and key not in path.name:
                remove(path)


def _short(fingerprint: str) -> str:
    name, _, version = fingerprint.partition("@")
    return f"{name}@{version[:12]}"
