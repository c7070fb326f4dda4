"""A passage index on disk: what `revela-hub index` makes, and `search`, `answer` and ImpRAG read.

    index.json           what it is: model, fingerprint, similarity, kind of index
    texts-<hash>.arrow   the passages, with the files and lines they are from; beside it their numbers
    vectors-<hash>/      their vectors, in shards (`vectors`)
    *.faiss, milvus.db   an approximate index, where there is one

It belongs to one model: who opens it with another gets an error, not the hits of vectors that mean something else.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError
from revela_hub.retrieval.dense import open_index
from revela_hub.retrieval.disk import claim_folder, whole_file
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.passages import Hit, Passages
from revela_hub.retrieval.ranking import RankerSettings, document_vectors
from revela_hub.retrieval.texts import Texts
from revela_hub.retrieval.top_k import Hits
from revela_hub.retrieval.vectors import VectorStore

FACTS = "index.json"


@dataclass(frozen=True)
class IndexFacts:
    """What `index.json` says.

    Attributes:
        model: The name by which the model was loaded: an id of the Hub, or a folder's name.
        fingerprint: `encoder.model_identity` of the model.
        texts: The passages' fingerprint.
        passages: How many there are.
        dimension: Of the vectors.
        similarity: "cosine" or "dot".
        dtype: What vectors are kept as.
        index: The kind of index.
        document_prompt: What went before every passage, None for the model's own.
        max_length: The number of tokens at which passages were cut, None for the model's own limit.
        milvus_uri: The server, where there is one.
    """

    model: str
    fingerprint: str
    texts: str
    passages: int
    dimension: int
    similarity: str = "cosine"
    dtype: str = "float32"
    index: str = "exact"
    document_prompt: str | None = None
    max_length: int | None = None
    milvus_uri: str | None = None


class PassageStore:
    """An index that is on disk.

    Args:
        folder: What `revela-hub index --output_dir` wrote.
        fingerprint: Of the model whose vectors will be searched for (`encoder.model_identity`); None: not compared.
        model: The model's name, for the message.

    Raises:
        UserError: There is no index, it was made by another model, or it is damaged.
    """

    def __init__(self, folder: str | Path, fingerprint: str | None = None, model: str = "the model") -> None:
        """Opens it; nothing is read into memory but numbers."""
        self.folder = Path(folder).expanduser()
        self.facts = read_facts(self.folder)
        if fingerprint is not None and fingerprint != self.facts.fingerprint:
            raise UserError(
                f"{self.folder} was made by {self.facts.model} ({_short(self.facts.fingerprint)}), and {model} is another "
                f"model or version ({_short(fingerprint)}): its vectors mean something else; make an index for it "
                f"(revela-hub index {model} --corpus ... --output_dir ...)"
            )
        self.passages = Passages(Texts(self.folder / f"texts-{self.facts.texts}.arrow"))
        identity = f"{self.facts.fingerprint} document {self.facts.document_prompt!r}"
        store = VectorStore(self.folder, identity, dtype=self.facts.dtype, option="--output_dir")
        self.vectors = store.vectors(self.passages.texts, normalize=self.facts.similarity == "cosine")
        self.index = open_index(self.vectors, self.facts.index, folder=self.folder, milvus_uri=self.facts.milvus_uri)

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, vectors: NDArray[np.float32], k: int) -> Hits:
        """The best `k` passages of each of the Q vectors (Q, D): scores (Q, K) and numbers (Q, K), -1 where there are fewer.

        Where the model compares by cosine, the vectors need not be of unit length.

        Raises:
            UserError: The vectors have another dimension.
        """
        vectors_QD = np.ascontiguousarray(vectors, dtype=np.float32)
        if vectors_QD.ndim != 2 or vectors_QD.shape[1] != self.facts.dimension:
            raise UserError(
                f"{self.folder} has vectors of {self.facts.dimension} numbers, and these are of shape {vectors_QD.shape}"
            )
        if self.facts.similarity == "cosine":
            vectors_QD = vectors_QD / np.maximum(np.linalg.norm(vectors_QD, axis=1, keepdims=True), 1e-12)
        return self.index.search(vectors_QD, k)

    def texts(self, rows: Any) -> list[str]:
        """The passages of these numbers."""
        return self.passages.texts.read(int(row) for row in rows)

    def found(self, hits: Hits) -> list[list[Hit]]:
        """The passages that were found for each query, with their places, best first."""
        return self.passages.found(hits)


def build_store(
    write: Callable[[Path], Passages],
    encoder: Encoder,
    output: str | Path,
    settings: RankerSettings,
    *,
    model: str,
    max_length: int | None = None,
) -> PassageStore:
    """Makes an index, or goes on with one that was interrupted.

    Args:
        write: Writes the passages to a folder (`passages.read_passages`, `passages.write_passages`).
        encoder: Encodes them: anything with `encode_document`.
        output: The folder.
        settings: Fingerprint (`identity`), similarity, prompt, type and kind of index.
        model: The model's name, for people.
        max_length: At how many tokens the encoder cuts passages, for the record.

    Raises:
        UserError: There is no passage; the folder has the index of another model; the disk is full.
    """
    folder = claim_folder(Path(output).expanduser(), "--output_dir")
    if (folder / FACTS).is_file() and read_facts(folder).fingerprint != settings.identity:
        raise UserError(
            f"{folder} has the index of {read_facts(folder).model}: choose another --output_dir, or delete it"
        )
    passages = write(folder)
    if not len(passages):
        raise UserError("there is no passage with text in it")
    vectors = document_vectors(passages.texts, encoder, settings, folder, option="--output_dir")
    facts = IndexFacts(
        model=model,
        fingerprint=settings.identity,
        texts=passages.texts.fingerprint,
        passages=len(passages),
        dimension=vectors.dimension,
        similarity=settings.compared_by(encoder),
        dtype=settings.dtype,
        index=settings.index,
        document_prompt=settings.document_prompt,
        max_length=max_length,
        milvus_uri=settings.milvus_uri,
    )
    open_index(vectors, settings.index, folder=folder, milvus_uri=settings.milvus_uri, option="--output_dir")
    with whole_file(folder / FACTS, "--output_dir") as stream:
        stream.write(json.dumps(asdict(facts), indent=2).encode() + b"\n")
    return PassageStore(folder, settings.identity, model)


def adopt(settings: RankerSettings, facts: IndexFacts) -> RankerSettings:
    """Settings that find the vectors of an index: what it was made with, in place of what was asked for."""
    names = ("similarity", "dtype", "index", "document_prompt", "milvus_uri")
    return replace(settings, **{name: getattr(facts, name) for name in names})


def read_facts(folder: str | Path) -> IndexFacts:
    """What an index is.

    Raises:
        UserError: There is none, or its `index.json` is damaged.
    """
    path = Path(folder).expanduser() / FACTS
    if not path.is_file():
        raise UserError(f"{folder} is no index (it has no {FACTS}): make one with revela-hub index")
    try:
        return IndexFacts(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): make the index again") from error


def _short(fingerprint: str) -> str:
    name, _, version = fingerprint.partition("@")
    return f"{name}@{version[:12]}"
