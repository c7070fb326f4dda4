"""Indexes over vectors, exact and approximate, behind one method: `search(vectors, k)`.

    exact       compares with all vectors on disk, block by block; up to 256 MiB stay in memory from the second search on
                (the default)
    flat        exact search by FAISS with all vectors in memory: faster for many single queries
    hnsw        FAISS, a graph of neighbours: approximate; milliseconds for millions of vectors, 1.1 times their size in memory
    ivfpq       FAISS, compressed to 1/16 of the vectors' size or less: approximate; ten times as many candidates as requested
                are rescored with the vectors on disk
    milvus      a Milvus server or cluster, or a local file (`milvus.MilvusIndex`)

Letters in names: Q queries, N vectors of a block, D their dimension, K hits.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError, require
from revela_hub.files import atomic
from revela_hub.retrieval.index_options import IndexOptions
from revela_hub.retrieval.top_k import Hits, best_hits
from revela_hub.retrieval.vectors import NumberedVectors

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import torch

QUERY_BLOCK = 4096
"""Queries searched together."""
PRODUCT_VECTORS = 2048
"""Vectors per matrix product: with 4,096 queries, 32 MiB of scores."""
FEW, BLOCK_BYTES = 128, 1 << 21
"""Up to this number of queries, the vectors of up to eight products are read and multiplied together, if they are this small."""

CACHED_BYTES = 1 << 28
"""Bytes of vectors that an exact index keeps in memory between searches: 170,000 texts with 384 dimensions."""

RESCORED_NUMBERS = 1 << 24
"""Vector components that are rescored at a time: 64 MiB."""

TRAINING_SIZE = 100_000
"""Minimum number of vectors that ivfpq is trained on, if there are that many."""


class VectorIndex(Protocol):
    """Numbered vectors, searched by dot product (cosine if the vectors have unit length)."""

    def search(self, vectors_QD: NDArray[np.float32], k: int) -> Hits:
        """Return the `k` vectors with the largest dot product with each of the Q queries."""
        ...


class ExactIndex:
    """Exact search over vectors on disk; ties are broken by the lower number."""

    def __init__(self, vectors: NumberedVectors, device: "str | torch.device" = "cpu") -> None:
        self._vectors = vectors
        self._device = device
        self._cached: dict[int, torch.Tensor] = {}
        self._searches = 0

    def __len__(self) -> int:
        return len(self._vectors)

    def search(self, vectors_QD: NDArray[np.float32], k: int) -> Hits:
        """See `VectorIndex`."""
        if not len(self) or not len(vectors_QD):
            return Hits.none(len(vectors_QD))
        import torch

        parts = (vectors_QD[start : start + QUERY_BLOCK] for start in range(0, len(vectors_QD), QUERY_BLOCK))
        return Hits.concatenate(best_hits(self._blocks(torch.from_numpy(part)), k) for part in parts)

    def _blocks(self, queries_QD: "torch.Tensor") -> "Iterator[tuple[int, torch.Tensor]]":
        import torch

        self._searches += 1
        queries_QD = queries_QD.to(self._device)
        size = PRODUCT_VECTORS * max(1, min(8, BLOCK_BYTES // (4 * PRODUCT_VECTORS * max(1, self._vectors.dimension))))
        for start in range(0, len(self), size):
            block_ND = self._cached.get(start)
            if block_ND is None:
                block_ND = torch.from_numpy(self._vectors.read(start, start + size)).to(self._device)
                # Not in the first search: a program that searches once needs no cache.
                if self._searches > 1 and 4 * (start + size) * self._vectors.dimension <= CACHED_BYTES:
                    self._cached[start] = block_ND
            columns = size if len(queries_QD) <= FEW else PRODUCT_VECTORS
            for first in range(0, len(block_ND), columns):
                yield start + first, queries_QD @ block_ND[first : first + columns].T


class FaissIndex:
    """A FAISS index of a kind ("flat", "hnsw" or "ivfpq"), read from its file or built from vectors.

    Without a path it is built in memory each time. The hits of compressed vectors are rescored with the vectors.
    """

    def __init__(self, vectors: NumberedVectors, kind: str, path: Path | None = None) -> None:
        require("faiss")
        import faiss

        self._faiss: Any = faiss
        self._vectors = vectors
        self._kind = kind
        if path is not None and path.is_file():
            try:
                self._index = self._faiss.read_index(str(path))
            except (RuntimeError, MemoryError) as error:  # a damaged file may ask for an absurd size
                raise UserError(f"{path} is damaged: delete it, and it will be rebuilt") from error
            if self._index.ntotal != len(vectors):
                raise UserError(
                    f"{path} has {self._index.ntotal:,} vectors, not {len(vectors):,}: delete it, and it will be rebuilt"
                )
        else:
            self._index = self._built()
            if path is not None:
                # Not faiss.write_index(path): on a full disk it may stop early without an error.
                with atomic(path) as temporary, temporary.open("wb") as stream:
                    self._faiss.write_index(self._index, self._faiss.PyCallbackIOWriter(stream.write))
        if kind != "flat":
            self._check_lengths()
        if kind == "ivfpq":
            self._index.nprobe = min(self._index.nlist, 32)
        elif kind == "hnsw":
            self._index.hnsw.efSearch = 128

    def _check_lengths(self) -> None:
        """Warn if vectors differ in length, as those of models that compare by dot product do."""
        lengths = np.linalg.norm(self._sample(1000), axis=1)
        low, high = (float(np.quantile(lengths, q)) for q in (0.01, 0.99)) if len(lengths) else (1.0, 1.0)
        if high <= 1.05 * low:
            return
        logger.warning(
            "the model compares by dot product, and its vectors have lengths of %.3g to %.3g: %s may miss many of the best passages; "
            "compare it with the index type exact",
            *(low, high, self._kind),
        )

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, vectors_QD: NDArray[np.float32], k: int) -> Hits:
        """See `VectorIndex`."""
        if not len(self) or not len(vectors_QD):
            return Hits.none(len(vectors_QD))
        is_rescored = self._kind == "ivfpq"
        wanted = min(10 * k if is_rescored else k, len(self))
        scores_QK, rows_QK = self._index.search(np.ascontiguousarray(vectors_QD, dtype=np.float32), wanted)
        if is_rescored:
            self._rescore(vectors_QD, rows_QK, scores_QK)
        scores_QK = np.where(rows_QK >= 0, scores_QK, -np.inf)
        order_QK = np.lexsort((rows_QK, -scores_QK))[:, : min(k, len(self))]  # ties: the lower number first
        return Hits(np.take_along_axis(scores_QK, order_QK, 1), np.take_along_axis(rows_QK, order_QK, 1))

    def _rescore(
        self, vectors_QD: NDArray[np.float32], rows_QK: NDArray[np.int64], scores_QK: NDArray[np.float32]
    ) -> None:
        """Replaces scores by exact dot products with the vectors on disk; each vector is read once per block."""
        size = max(1, RESCORED_NUMBERS // (rows_QK.shape[1] * self._vectors.dimension))
        for start in range(0, len(rows_QK), size):
            part = slice(start, start + size)
            rows_R, places = np.unique(rows_QK[part], return_inverse=True)
            found_QKD = self._vectors.take(np.maximum(rows_R, 0))[places.reshape(rows_QK[part].shape)]
            np.einsum("qkd,qd->qk", found_QKD, vectors_QD[part], out=scores_QK[part])

    def _built(self) -> Any:
        faiss, size, dimension = self._faiss, len(self._vectors), self._vectors.dimension
        if self._kind == "flat":
            index = faiss.IndexFlatIP(dimension)
        elif self._kind == "hnsw":
            index = faiss.IndexHNSWFlat(dimension, 32, faiss.METRIC_INNER_PRODUCT)
        else:
            if size < 1000:
                raise UserError(
                    f"ivfpq needs at least 1,000 vectors to train on, not {size:,}: use the index type exact"
                )
            # The number of lists follows FAISS's guidelines, with at least 39 training vectors each; one byte per 8
            # components, or per 4 or 2 for odd dimensions. Codes of 8 bits need at least 256 training vectors.
            lists = int(max(1, min(4 * np.sqrt(size), size / 39)))
            parts = next(
                parts
                for parts in (dimension // 8, dimension // 4, dimension // 2, 1)
                if parts and not dimension % parts
            )
            index = faiss.IndexIVFPQ(
                faiss.IndexFlatIP(dimension), dimension, lists, parts, 8, faiss.METRIC_INNER_PRODUCT
            )
            index.train(self._sample(max(TRAINING_SIZE, 40 * lists)))
        for start in range(0, size, 65_536):
            index.add(self._vectors.read(start, start + 65_536))
        return index

    def _sample(self, number: int) -> NDArray[np.float32]:
        """Return up to this many vectors, drawn with a fixed seed."""
        size = len(self._vectors)
        return self._vectors.take(np.sort(np.random.default_rng(0).choice(size, min(size, number), replace=False)))


def open_index(
    vectors: NumberedVectors,
    options: IndexOptions | None = None,
    *,
    folder: Path | None = None,
    device: "str | torch.device" = "cpu",
) -> VectorIndex:
    """Open the index over vectors, building it first if it is not in the folder yet; default: exact search on the device."""
    options = options or IndexOptions()
    kind = options.type
    if kind == "exact":
        return ExactIndex(vectors, device)
    if kind == "milvus":
        from revela_hub.retrieval.milvus import MilvusIndex

        return MilvusIndex(vectors, milvus_uri(options, folder))
    path = None if folder is None else folder / f"{kind}-{vectors.key[:16]}.faiss"
    return FaissIndex(vectors, kind, path)


def milvus_uri(options: IndexOptions, folder: Path | None) -> str:
    """Return the server of an index in Milvus, or the local file in its folder."""
    uri = options.milvus_uri or (folder and str(folder / "milvus.db"))
    if not uri:
        raise UserError("a Milvus index needs the URI of a server, or a folder for its local file")
    return uri
