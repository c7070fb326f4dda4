"""Building rankers of all four kinds from one description: vectors, weighted terms, BM25, or a hybrid of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError
from revela_hub.files import claim, key_of, local_path, scratch_folder
from revela_hub.retrieval.bm25 import BM25, BM25Settings
from revela_hub.retrieval.dense import VectorIndex, open_index
from revela_hub.retrieval.encoder import Encoder, as_vectors, similarity_of
from revela_hub.retrieval.encoding import encode_texts
from revela_hub.retrieval.hybrid import BM25_WEIGHT, Fusion, Hybrid, part_weights
from revela_hub.retrieval.index_options import IndexOptions
from revela_hub.retrieval.ranker import Ranker
from revela_hub.retrieval.rerank import RerankedRanker, Reranker
from revela_hub.retrieval.sparse import SparseIndex, as_terms, pack_terms
from revela_hub.retrieval.texts import TextSource
from revela_hub.retrieval.top_k import Hits
from revela_hub.retrieval.vectors import Vectors, VectorStore, truncated_dimension

if TYPE_CHECKING:
    import torch

Part = Literal["dense", "sparse", "bm25"]
Mode = Literal["dense", "sparse", "bm25", "hybrid"]
Own = Literal["self"]
"""The reranker that compares the encoder's own token vectors."""


@dataclass(frozen=True)
class RankerSettings:
    """The kind of ranker and its settings. How vectors are compared is a property of the encoder (`similarity_of`).

    Attributes:
        mode: "dense", "sparse", "bm25", or "hybrid".
        parts: Hybrid: two or three of the others.
        fusion: Hybrid: "sum" or "minmax" (`hybrid.fuse`).
        weights: Hybrid: one weight per part; None: with minmax, 0.3 for BM25, and the rest in equal shares for the
            others; with sum, equal weights.
        depth: Hybrid: hits of each part to fuse.
        identity: A string that identifies the model in a cache folder (`encoder.model_identity`).
        sparse_identity: The same for the sparse model.
        query_prompt: A prompt for queries that replaces the model's own.
        document_prompt: A prompt for documents that replaces the model's own.
        batch_size: Texts per forward pass.
        index: How vectors are stored and searched.
        max_terms: Sparse: terms stored per text, the heaviest ones.
        bm25: The parameters of BM25.
        device: The device of exact search.
        show_progress_bar: Whether to show progress bars on standard error.
        rerank_depth: Number of results per query that a reranker scores again.
        rerank_weight: Weight of the reranker's scores, from 0 to 1; below 1, they are combined with the ranker's.
    """

    mode: Mode | str = "dense"
    parts: Sequence[Part | str] = ("dense", "bm25")
    fusion: Fusion | str = "minmax"
    weights: Sequence[float] | None = None
    depth: int = 100
    identity: str = ""
    sparse_identity: str = ""
    query_prompt: str | None = None
    document_prompt: str | None = None
    batch_size: int = 32
    index: IndexOptions = field(default_factory=IndexOptions)
    max_terms: int = 256
    bm25: BM25Settings = field(default_factory=BM25Settings)
    device: "str | torch.device" = "cpu"
    show_progress_bar: bool = False
    rerank_depth: int = 50
    rerank_weight: float = 1.0

    def __post_init__(self) -> None:
        """Raises UserError for an unknown choice or a value out of range."""
        if self.mode not in get_args(Mode):
            raise UserError(f"the mode must be one of {', '.join(get_args(Mode))}, not {self.mode!r}")
        for name in ("depth", "batch_size", "max_terms", "rerank_depth"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.rerank_weight <= 1:
            raise UserError(f"rerank_weight must be between 0 and 1, not {self.rerank_weight:g}")
        if self.mode == "hybrid":
            parts = set(self.parts)
            if not 2 <= len(self.parts) == len(parts) or not parts <= set(get_args(Part)):
                raise UserError(f"a hybrid has two or three of {', '.join(get_args(Part))}, not {' '.join(self.parts)}")
            part_weights(self.weights, len(parts), self.fusion)  # raises before the vectors are computed

    @property
    def part_weights(self) -> list[float]:
        """The weights of the parts of a hybrid; see `weights`."""
        if self.weights is None and self.fusion == "minmax" and "bm25" in self.parts:
            share = (1 - BM25_WEIGHT) / (len(self.parts) - 1)
            return [BM25_WEIGHT if part == "bm25" else share for part in self.parts]
        return part_weights(self.weights, len(self.parts), self.fusion)

    @property
    def used(self) -> tuple[str, ...]:
        """The parts that the ranker consists of."""
        return tuple(self.parts) if self.mode == "hybrid" else (str(self.mode),)


@contextmanager
def ranking_folder(cache_dir: str | Path | None, settings: RankerSettings) -> Iterator[tuple[Path, RankerSettings]]:
    """Yield a folder for the vectors and indexes of a ranker, and the settings of the ranker.

    Without a cache folder, it is a temporary one, in which the models need no identity.
    """
    if cache_dir is not None:
        yield claim(local_path(cache_dir)), settings
        return
    unnamed = "the only model in this folder"
    with scratch_folder("ranking") as temporary:
        yield temporary, replace(settings, identity=unnamed, sparse_identity=unnamed)


def build_ranker(
    texts: TextSource,
    settings: RankerSettings,
    folder: Path,
    *,
    dense: Encoder | None = None,
    sparse: Any = None,
    reranker: Reranker | Own | None = None,
    vectors: Vectors | None = None,
    index: VectorIndex | None = None,
) -> Ranker:
    """Builds a ranker of these texts; encodes the texts that are not in the folder yet.

    Args:
        texts: The texts to rank.
        settings: The kind of ranker.
        folder: The folder of vectors, terms and indexes.
        dense: The encoder for vectors, if the settings need one.
        sparse: The `SparseEncoder` for terms, if the settings need one.
        reranker: Scores the best `settings.rerank_depth` results again; "self": the encoder's own token vectors, with the prompts
            of the settings.
        vectors: The vectors of the texts, if they are known (`PassageStore.vectors`).
        index: The index of the vectors, if it is open (`PassageStore.index`).

    Raises:
        UserError: A package is not installed; vectors with NaN or infinity; a full disk; "self" is not possible.
        ValueError: An encoder, or its identity, is missing.
    """
    if reranker == "self":
        prompts = {"query": settings.query_prompt, "document": settings.document_prompt}
        shared: Any = {"batch_size": settings.batch_size, "identity": settings.identity, "prompts": prompts}
        reranker = Reranker(dense, **shared)  # type: ignore[arg-type]  # raises for encoders without token vectors
    rankers = [_build(part, texts, settings, folder, dense, sparse, vectors, index) for part in settings.used]
    ranker: Ranker = rankers[0]
    if settings.mode == "hybrid":
        ranker = Hybrid(rankers, settings.fusion, settings.part_weights, settings.depth)
    if reranker is not None:
        show = settings.show_progress_bar
        depth, weight = settings.rerank_depth, settings.rerank_weight
        ranker = RerankedRanker(ranker, reranker, texts, depth, weight, show_progress_bar=show)
    return ranker


def _build(
    part: str,
    texts: TextSource,
    settings: RankerSettings,
    folder: Path,
    dense: Any,
    sparse: Any,
    vectors: Vectors | None,
    index: VectorIndex | None,
) -> Ranker:
    if part == "bm25":
        return BM25(texts, settings.bm25, show_progress_bar=settings.show_progress_bar, folder=folder)
    if part == "sparse":
        if sparse is None or not settings.sparse_identity:
            raise ValueError("mode sparse needs a SparseEncoder and its identity: RankerSettings(sparse_identity=...)")
        return SparseRanker(sparse, texts, settings, folder)
    if not isinstance(dense, Encoder):
        raise ValueError(f"the ranker must be an encoder or bm25, not {dense!r}")
    if not settings.identity:
        raise ValueError("a cache needs the model's identity: RankerSettings(identity=model_identity(name))")
    if vectors is None:
        vectors = document_vectors(texts, dense, settings, folder)
    index = index or open_index(vectors, settings.index, folder=folder, device=settings.device)
    return VectorRanker(dense, vectors, index, settings)


def document_store(identity: str, prompt: str | None) -> str:
    """Return the name of the store of the documents' vectors, by `encoder.model_identity` and the prompt."""
    return f"{identity} document {prompt!r}"


def document_vectors(texts: TextSource, encoder: Encoder, settings: RankerSettings, folder: Path) -> Vectors:
    """Return the vectors of texts; encodes those that are not in the folder yet."""
    normalize = similarity_of(encoder) == "cosine"  # this and the next lines raise before the texts are encoded
    settings.index.check_installed()
    size = getattr(encoder, "get_embedding_dimension", int)() or 0
    truncated_dimension(size, settings.index.truncate_dim)
    store = VectorStore(folder, document_store(settings.identity, settings.document_prompt), dtype=settings.index.dtype)
    fill_store(store, texts, encoder, settings)
    return store.vectors(texts, normalize=normalize, truncate_dim=settings.index.truncate_dim)


def fill_store(
    store: VectorStore,
    texts: TextSource,
    encoder: Any,
    settings: RankerSettings,
    *,
    part: slice = slice(None),
    convert: Any = None,
) -> None:
    """Encode the texts, or a part of them, that are missing from the store."""
    how: dict[str, Any] = {"batch_size": settings.batch_size, "prompt": settings.document_prompt, "convert": convert}
    store.fill(
        texts,
        lambda batch, progress: encode_texts(encoder, batch, "document", progress=progress, **how),
        "Encoding passages" if settings.show_progress_bar else None,
        part=part,
    )


class VectorRanker:
    """Ranks by the vectors of an encoder (a `Ranker`)."""

    def __init__(self, encoder: Encoder, vectors: Vectors, index: VectorIndex, settings: RankerSettings) -> None:
        self.vectors = vectors
        self.key = key_of("dense", vectors.key, settings.query_prompt, settings.index.type)
        self._encoder = encoder
        self._index = index
        self._settings = settings

    def encode(self, queries: Sequence[str]) -> NDArray[np.float32]:
        """See `Ranker`: vectors (Q, D)."""
        settings = self._settings
        if not queries:
            return np.empty((0, self.vectors.dimension), dtype=np.float32)
        vectors_QD = encode_texts(
            self._encoder, list(queries), "query", batch_size=settings.batch_size, prompt=settings.query_prompt
        )
        if settings.index.truncate_dim is not None:
            vectors_QD = vectors_QD[:, : settings.index.truncate_dim]
        return as_vectors(vectors_QD, len(queries), normalize=similarity_of(self._encoder) == "cosine")

    def search(self, queries: NDArray[np.float32], k: int) -> Hits:
        """See `Ranker`."""
        return self._index.search(queries, k)

    def why_nothing(self, queries: NDArray[np.float32]) -> list[str]:
        """See `Ranker`: a dense query always has hits."""
        return [""] * len(queries)

    def pair_scores(
        self, queries: NDArray[np.float32], queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """See `Ranker`."""
        scores_P = np.empty(len(rows_P), dtype=np.float32)
        for start in range(0, len(rows_P), 8192):
            part = slice(start, start + 8192)
            scores_P[part] = np.einsum("pd,pd->p", queries[queries_P[part]], self.vectors.take(rows_P[part]))
        return scores_P


class SparseRanker(SparseIndex):
    """Ranks by the weighted terms of a `SparseEncoder` (a `Ranker`); encodes the texts that are not in the folder yet."""

    def __init__(self, encoder: Any, texts: TextSource, settings: RankerSettings, folder: Path) -> None:
        self._encoder = encoder
        self._settings = settings
        most = settings.max_terms
        store = VectorStore(folder, f"{settings.sparse_identity} terms {most} {settings.document_prompt!r}")
        fill_store(store, texts, encoder, settings, convert=lambda weights, _: pack_terms(weights, most))
        terms = store.vectors(texts)
        self.key = key_of("sparse", terms.key, settings.query_prompt)
        super().__init__(terms, int(self.encode(["how many terms"]).shape[1]))

    def encode(self, queries: Sequence[str]) -> Any:
        """See `Ranker`: a sparse matrix (Q, V)."""
        return encode_texts(
            self._encoder,
            list(queries),
            "query",
            batch_size=self._settings.batch_size,
            prompt=self._settings.query_prompt,
            convert=lambda weights, _: as_terms(weights),
        )

    def why_nothing(self, queries: Any) -> list[str]:
        """See `Ranker`."""
        reason = "the sparse model assigns no term of the query a weight above 0"
        return ["" if terms else reason for terms in np.diff(queries.indptr)]
