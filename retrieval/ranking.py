"""Building rankers of all four kinds from one description: vectors, weighted terms, BM25, or a hybrid of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError, require
from revela_hub.files import claim, local_path, scratch_folder
from revela_hub.retrieval.bm25 import BM25, BM25Settings
from revela_hub.retrieval.dense import VectorIndex, open_index
from revela_hub.retrieval.encoder import Encoder, as_vectors, similarity_of
from revela_hub.retrieval.encoding import encode_texts
from revela_hub.retrieval.hits import Hits, Ranker
from revela_hub.retrieval.hybrid import BM25_WEIGHT, Fusion, Hybrid, check_weights
from revela_hub.retrieval.index_options import IndexOptions
from revela_hub.retrieval.rerank import RerankedRanker, Reranker
from revela_hub.retrieval.sparse import SparseRanker
from revela_hub.retrieval.texts import TextSource
from revela_hub.retrieval.vectors import Vectors, VectorStore

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
        fusion: Hybrid: "sum" or "minmax" (see `hybrid`).
        weights: Hybrid: one weight per part; None: with minmax, 0.3 for BM25, and the rest in equal shares for the
            others; with sum, all 1.
        depth: Hybrid: hits of each part to fuse.
        identity: A string that identifies the model in a cache folder (`encoder.model_identity`).
        sparse_identity: The same for the sparse model.
        query_prompt: A prompt for queries that replaces the model's own.
        document_prompt: A prompt for documents that replaces the model's own.
        batch_size: Texts per forward pass.
        index: How vectors are stored and searched.
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
    bm25: BM25Settings = field(default_factory=BM25Settings)
    device: "str | torch.device" = "cpu"
    show_progress_bar: bool = False
    rerank_depth: int = 50
    rerank_weight: float = 1.0

    def __post_init__(self) -> None:
        """Raise a `UserError` for an unknown mode, part, fusion or weight, before vectors are computed."""
        if not set(self.used) <= set(get_args(Part)) or len(set(self.used)) < len(self.used):
            raise UserError(f"{' '.join(self.used)}: the parts of a ranker are some of {', '.join(get_args(Part))}")
        if self.fusion not in get_args(Fusion):
            raise UserError(f"the fusion is one of {', '.join(get_args(Fusion))}, not {self.fusion}")
        if self.mode == "hybrid":
            check_weights(self.part_weights, len(self.parts))

    @property
    def part_weights(self) -> Sequence[float]:
        """The weights of the parts of a hybrid; see `weights`."""
        if self.weights is not None or self.fusion == "sum":
            return self.weights or [1.0] * len(self.parts)
        bm25 = BM25_WEIGHT if "bm25" in self.parts else 0
        others = sum(part != "bm25" for part in self.parts)
        return [bm25 if part == "bm25" else (1 - bm25) / others for part in self.parts]

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
    index: VectorIndex | None = None,
) -> Ranker:
    """Build a ranker of these texts; encodes the texts that are not in the folder yet.

    Args:
        texts: The texts to rank.
        settings: The kind of ranker.
        folder: The folder of vectors, terms and indexes.
        dense: The encoder for vectors, if the settings need one.
        sparse: The `SparseEncoder` for terms, if the settings need one.
        reranker: Scores the best `settings.rerank_depth` results again; "self": the encoder's own token vectors, with the prompts
            of the settings.
        index: The index of the texts' vectors, if there is one (`PassageStore.index`).

    Raises:
        UserError: A package is not installed; vectors with NaN or infinity; "self" is not possible.
        ValueError: The identity of a model is missing.
    """
    if reranker == "self":
        prompts = {"query": settings.query_prompt, "document": settings.document_prompt}
        # Before the texts are encoded: it raises an error for encoders without token vectors.
        reranker = Reranker(dense, batch_size=settings.batch_size, prompts=prompts)  # type: ignore[arg-type]
    rankers: list[Ranker] = []
    for part in settings.used:
        identity = {"dense": settings.identity, "sparse": settings.sparse_identity}.get(part)
        if identity == "":  # the vectors of two models would be mixed
            raise ValueError("a cache needs the model's identity: RankerSettings(identity=model_identity(name))")
        if part == "bm25":
            rankers.append(BM25(texts, settings.bm25, show_progress_bar=settings.show_progress_bar, folder=folder))
        elif part == "sparse":
            shared = ("query_prompt", "document_prompt", "batch_size", "show_progress_bar")
            options: dict[str, Any] = {name: getattr(settings, name) for name in shared}
            rankers.append(SparseRanker(sparse, texts, folder, settings.sparse_identity, **options))
        else:
            encoder: Any = dense
            if index is None:
                vectors = document_vectors(texts, encoder, settings, folder)
                index = open_index(vectors, settings.index, folder=folder, device=settings.device)
            rankers.append(VectorRanker(encoder, index, settings))
    ranker = rankers[0]
    if settings.mode == "hybrid":
        ranker = Hybrid(rankers, settings.part_weights, settings.fusion, settings.depth)
    if reranker is None:
        return ranker
    show = settings.show_progress_bar
    depth, weight = settings.rerank_depth, settings.rerank_weight
    return RerankedRanker(ranker, reranker, texts, depth, weight, show_progress_bar=show)


def document_store(folder: Path, identity: str, prompt: str | None, dtype: str) -> VectorStore:
    """Return the store of the documents' vectors of a model, given its `encoder.model_identity` and the prompt."""
    return VectorStore(folder, f"{identity} document {prompt!r}", dtype=dtype)


def document_vectors(texts: TextSource, encoder: Encoder, settings: RankerSettings, folder: Path) -> Vectors:
    """Return the vectors of texts; encodes those that are not in the folder yet."""
    normalize = similarity_of(encoder) == "cosine"  # this and the next lines raise before the texts are encoded
    if settings.index.type != "exact":
        require("pymilvus" if settings.index.type == "milvus" else "faiss")
    store = document_store(folder, settings.identity, settings.document_prompt, settings.index.dtype)
    fill_store(store, texts, encoder, settings)
    return store.vectors(texts, normalize=normalize, truncate_dim=settings.index.truncate_dim)


def fill_store(
    store: VectorStore, texts: TextSource, encoder: Encoder, settings: RankerSettings, part: slice = slice(None)
) -> None:
    """Encode the texts, or a part of them, that are missing from the store."""
    how: dict[str, Any] = {"batch_size": settings.batch_size, "prompt": settings.document_prompt}
    show = settings.show_progress_bar
    store.fill(texts, lambda batch: encode_texts(encoder, batch, "document", **how), part, show_progress_bar=show)


class VectorRanker:
    """Ranks by the vectors of an encoder (a `Ranker`)."""

    def __init__(self, encoder: Encoder, index: VectorIndex, settings: RankerSettings) -> None:
        self._encoder, self._index, self._settings = encoder, index, settings
        self.is_cosine = similarity_of(encoder) == "cosine"
        self._encoded = lru_cache(maxsize=1)(self._encode)

    def search(self, queries: Sequence[str], k: int) -> Hits:
        """See `Ranker`."""
        return self._index.search(self._encoded(tuple(queries)), k)

    def pair_scores(
        self, queries: Sequence[str], queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """See `Ranker`."""
        queries_QD = self._encoded(tuple(queries))
        scores_P = np.empty(len(rows_P), dtype=np.float32)
        for start in range(0, len(rows_P), 8192):
            part = slice(start, start + 8192)
            scores_P[part] = np.einsum("pd,pd->p", queries_QD[queries_P[part]], self._index.vectors[rows_P[part]])
        return scores_P

    def _encode(self, queries: tuple[str, ...]) -> NDArray[np.float32]:
        settings = self._settings
        if not queries:
            return np.empty((0, self._index.vectors.shape[1]), dtype=np.float32)
        vectors_QD = encode_texts(
            self._encoder, queries, "query", batch_size=settings.batch_size, prompt=settings.query_prompt
        )[:, : settings.index.truncate_dim]
        return as_vectors(vectors_QD, len(queries), normalize=self.is_cosine)


def score_name(ranker: Ranker) -> str:
    """Return the name of a ranker's scores: those that are scaled to 0..1 for each query are relative."""
    if isinstance(ranker, Hybrid) and ranker.fusion == "minmax":
        return "relative score"
    if isinstance(ranker, RerankedRanker) and ranker.weight < 1:
        return "relative score"
    return "cosine" if isinstance(ranker, VectorRanker) and ranker.is_cosine else "score"


def cosines(ranker: Ranker, queries: Sequence[str], hits: Hits) -> NDArray[np.float32] | None:
    """Return the cosines (Q, K) of the hits of the last search, which needs no encoding; None without vectors of unit length."""
    ranker = ranker.ranker if isinstance(ranker, RerankedRanker) else ranker
    for part in ranker.parts if isinstance(ranker, Hybrid) else [ranker]:
        if isinstance(part, VectorRanker) and part.is_cosine:
            queries_QK = np.indices(hits.rows_QK.shape)[0]
            found_QK = part.pair_scores(queries, queries_QK.ravel(), hits.rows_QK.ravel().clip(0))
            return found_QK.reshape(hits.rows_QK.shape)
    return None
