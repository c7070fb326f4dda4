"""A passage index on disk, written by `revela-hub index` and read by `search` and `answer`.

    index.json             metadata: model, fingerprint, similarity, index type; written last
    texts-<hash>.arrow     the passages with their files and lines; the numbers next to it find duplicates and vectors
    vectors-<hash>/        their vectors, in shards (`vectors`)
    *.faiss, milvus.db     an approximate index, if there is one

An index belongs to one model: opening it with another one raises an error. One process writes at a time, files get their name
when they are complete, and a run that was interrupted keeps its shards of vectors.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from revela_hub.errors import UserError
from revela_hub.files import claim, local_path, remove, write_text
from revela_hub.retrieval.dense import VectorIndex, milvus_uri, open_index
from revela_hub.retrieval.encoder import Encoder, as_vectors, similarity_of
from revela_hub.retrieval.encoding import encode_texts
from revela_hub.retrieval.hits import Hits
from revela_hub.retrieval.index_options import IndexOptions
from revela_hub.retrieval.milvus import connect
from revela_hub.retrieval.passages import Hit, Passages
from revela_hub.retrieval.ranking import RankerSettings, document_store, document_vectors
from revela_hub.retrieval.vectors import Vectors

METADATA = "index.json"
COMPARED = 4
"""Passages that are encoded again when an index is opened."""
USABLE = 0.95
"""Similarity of their vectors below which search is wrong; int8 models reach 0.95 to 0.99."""
EQUAL = 0.999
"""Similarity from which vectors count as equal: float32 batches differ by 1e-6, bfloat16 by 1e-4."""


@dataclass(frozen=True)
class IndexMetadata:
    """The content of `index.json`: the model (Hub id or name of the folder) and its `model_identity`, the fingerprint of the passages, ...

    None means the model's own prompt and length; as `endpoint`, that the vectors were computed on this machine.
    """

    model: str
    fingerprint: str
    texts: str
    passages: int
    dimension: int
    similarity: str
    document_prompt: str | None = None
    max_length: int | None = None
    endpoint: str | None = None
    options: IndexOptions = IndexOptions()

    @classmethod
    def read(cls, folder: Path) -> "IndexMetadata":
        """Read the metadata of an index."""
        if not (folder / METADATA).is_file():
            raise UserError(f"{folder} is not an index ({METADATA} is missing): build one with revela-hub index")
        values = json.loads((folder / METADATA).read_text(encoding="utf-8"))
        return cls(**values | {"options": IndexOptions(**values["options"])})


class PassageStore:
    """An index on disk.

    Args:
        folder: The output folder of `revela-hub index`.
        fingerprint: `encoder.model_identity` of the model that encodes the queries; None skips the comparison.
        model: The model's name, for the message.
        documents: `encoder.document_identity` of the model: its documents have the vectors of this other model.
        derived: Folder of FAISS indexes; default: that of the index.

    Raises:
        UserError: There is no index, or it belongs to another model.
    """

    def __init__(
        self,
        folder: str | Path,
        fingerprint: str | None = None,
        model: str = "the model",
        *,
        documents: str | None = None,
        derived: Path | None = None,
    ) -> None:
        self.folder = local_path(folder)
        self.derived = derived or self.folder
        self.metadata = IndexMetadata.read(self.folder)
        if fingerprint is not None:
            self.check_fingerprint(fingerprint, model, documents=documents)
        self.passages = Passages(self.folder / f"texts-{self.metadata.texts}.arrow")

    @cached_property
    def vectors(self) -> Vectors:
        """The vectors of the passages; a `UserError` if some are missing."""
        built, options = self.metadata, self.metadata.options
        store = document_store(self.folder, built.fingerprint, built.document_prompt, options.dtype)
        is_cosine = built.similarity == "cosine"
        return store.vectors(self.passages, normalize=is_cosine, truncate_dim=options.truncate_dim)

    @cached_property
    def index(self) -> VectorIndex:
        """The index over the vectors."""
        return open_index(self.vectors, self.metadata.options, folder=self.derived)

    def check_fingerprint(self, fingerprint: str, model: str, *, documents: str | None = None) -> None:
        """Check that the index was built with a model, on its server and with its maximum length; see `PassageStore`."""
        built = self.metadata
        if built.fingerprint not in (fingerprint, documents):
            length = "" if built.max_length is None else f" with max_length {built.max_length}"
            server = "" if built.endpoint is None else f" on {built.endpoint}"
            raise UserError(
                f"{self.folder} was built with {built.model}{length}{server} ({built.fingerprint}), whose vectors are not"
                f" comparable with those of {model} ({fingerprint}): use the same model and options, or build another index"
            )

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, vectors: NDArray[np.float32], k: int) -> Hits:
        """Return the best `k` passages for Q query vectors (Q, D): scores (Q, K) and numbers (Q, K), padded with -1.

        The vectors need not have unit length; if the model compares by cosine, they are normalised. If the index is
        truncated, so are they.
        """
        vectors_QD = np.ascontiguousarray(vectors, dtype=np.float32)[..., : self.metadata.options.truncate_dim]
        return self.index.search(self._comparable(vectors_QD), k)

    def check_vectors(self, encoder: Encoder) -> None:
        """Check that an encoder of the same model still computes the stored vectors: a library or a server may have changed."""
        similarity = self.similarity(encoder)
        if similarity < USABLE:
            raise UserError(
                f"{self.folder}: the model computes other vectors now than when the index was built (similarity {similarity:.4f}):"
                " undo the change of a library, the device or the server, or build the index in a new folder"
            )

    def similarity(self, encoder: Encoder) -> float:
        """Return the similarity of some stored vectors to those that an encoder computes now: 1 if they are equal."""
        rows_R = np.unique(np.linspace(0, len(self) - 1, COMPARED).astype(np.int64))
        truncate_dim, prompt = self.metadata.options.truncate_dim, self.metadata.document_prompt
        now_RD = encode_texts(encoder, self.passages.read(rows_R), "document", prompt=prompt)[:, :truncate_dim]
        now_RD, then_RD = self._comparable(now_RD), self.vectors[rows_R]
        if now_RD.shape != then_RD.shape:
            return 0.0
        return float((now_RD * then_RD).sum() / max((now_RD**2).sum(), (then_RD**2).sum(), 1e-30))

    def _comparable(self, vectors_RD: NDArray[np.float32]) -> NDArray[np.float32]:
        return as_vectors(vectors_RD, len(vectors_RD), normalize=self.metadata.similarity == "cosine")

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
    """Build an index, or resume an interrupted build.

    Args:
        write: Writes the passages to a folder (`passages.read_passages`, `passages.write_passages`).
        encoder: Encodes the passages: any object with `encode_document`.
        output: The folder.
        settings: Fingerprint (`identity`), prompt and index options.
        model: The model's name, for the metadata.
        max_length: The number of tokens to which the encoder truncates passages, for the metadata.
        endpoint: The server that encodes the passages, for the metadata.

    Raises:
        UserError: There is no passage; the folder holds the index of another model.
        filelock.Timeout: Another process builds an index in the folder.
    """
    folder, path = claim(local_path(output)), local_path(model)
    with FileLock(folder / "index.lock", timeout=0):
        earlier = IndexMetadata.read(folder) if (folder / METADATA).is_file() else None
        if earlier is not None and earlier.fingerprint != settings.identity:
            raise UserError(f"{folder} holds the index of {earlier.model}: choose another folder, or delete it")
        passages = write(folder)
        if not len(passages):
            raise UserError("no passage contains any text")
        if settings.index.type == "milvus":  # raises errors before the texts are encoded
            connect(milvus_uri(settings.index, folder)).close()
        vectors = document_vectors(passages, encoder, settings, folder)
        if settings.index.type != "exact":
            open_index(vectors, settings.index, folder=folder)
        metadata = IndexMetadata(
            fingerprint=settings.identity,
            texts=passages.fingerprint,
            passages=len(passages),
            dimension=vectors.dimension,
            similarity=similarity_of(encoder),
            document_prompt=settings.document_prompt,
            options=settings.index,
            model=path.resolve().name if path.exists() else model,
            max_length=max_length,
            endpoint=endpoint,
        )
        write_text(folder / METADATA, json.dumps(asdict(metadata), indent=2) + "\n")
        # Removed text does not stay on the disk. Searches that have these files open can still read them.
        for file in [file for pattern in ("texts-*", "bm25-*", "*.faiss") for file in folder.glob(pattern)]:
            if metadata.texts not in file.name and vectors.key[:16] not in file.name:
                remove(file)
    return PassageStore(folder, settings.identity, model)
