"""Indexes of vectors, exact and approximate: `search(vectors, k)` is all that `search`, `mine` and ImpRAG know of them.

    exact       block by block over the vectors on disk, of which the first 256 MiB stay in memory (the default)
    flat        the same by FAISS, with all vectors in memory: faster for many single queries
    hnsw        FAISS, a graph of neighbours: approximate, milliseconds for millions of vectors, 1.1 times their size in memory
    ivfpq       FAISS, vectors in 1/16 of their size or less in memory: approximate; the rest of an error is made good by
                comparing the vectors on disk of ten times as many candidates as asked for
    milvus      a Milvus server or cluster, or a local file (`milvus.MilvusIndex`)

Letters in names: Q queries, N vectors of a block, D their dimension, K hits.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError, install_hint
from revela_hub.retrieval.disk import whole_file
from revela_hub.retrieval.top_k import Hits, best_hits
from revela_hub.retrieval.vectors import NumberedVectors

if TYPE_CHECKING:
    import torch

IndexKind = Literal["exact", "flat", "hnsw", "ivfpq", "milvus"]

QUERY_BLOCK = 4096
"""Queries for which the vectors are read once."""
COLUMNS = 2048
"""Vectors compared at a time: with 4,096 queries 32 MiB of scores."""

KEEP = 1 << 28
"""Bytes of vectors that an exact index keeps in memory for the next query: those of 170,000 texts of 384 numbers."""

COMPARED = 1 << 24
"""Numbers of vectors that are compared exactly at a time: 64 MiB."""

TRAINING_SIZE = 100_000
"""Vectors that ivfpq learns its codes from, at least."""


class VectorIndex(Protocol):
    """Numbered vectors that can be searched by dot product (of unit vectors: cosine)."""

    def __len__(self) -> int: ...

    def search(self, vectors_QD: NDArray[np.float32], k: int) -> Hits:
        """The `k` vectors with the largest dot product with each of the Q given."""
        ...


class ExactIndex:
    """Exact search over vectors on disk, the lower number first among equals.

    Args:
        vectors: What to search.
        device: Where the products are computed.
    """

    def __init__(self, vectors: NumberedVectors, device: "str | torch.device" = "cpu") -> None:
        """Reads nothing yet."""
        self._vectors = vectors
        self._device = device
        self._kept: dict[int, torch.Tensor] = {}

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

        queries_QD = queries_QD.to(self._device)
        for start in range(0, len(self), COLUMNS):
            block_ND = self._kept.get(start)
            if block_ND is None:
                block_ND = torch.from_numpy(self._vectors.read(start, start + COLUMNS)).to(self._device)
                if 4 * (start + COLUMNS) * self._vectors.dimension <= KEEP:
                    self._kept[start] = block_ND
            yield start, queries_QD @ block_ND.T


class FaissIndex:
    """A FAISS index, made of vectors or read from its file.

    Args:
        vectors: What to search; also what the hits of `ivfpq` are compared with exactly.
        kind: "flat", "hnsw" or "ivfpq".
        path: Where the index is kept; None makes it anew each time.
        option: Where the user chose its place, for messages.

    Raises:
        UserError: FAISS is not installed, there are too few vectors to learn codes from, the file is damaged, or the disk
            is full.
    """

    def __init__(
        self, vectors: NumberedVectors, kind: str, path: Path | None = None, option: str = "--cache_dir"
    ) -> None:
        """Reads the index, or makes it."""
        self._faiss = require_faiss()
        self._vectors = vectors
        self._kind = kind
        if path is not None and path.is_file():
            try:
                self._index = self._faiss.read_index(str(path))
            except (RuntimeError, MemoryError) as error:  # a number in a damaged file is read as a size
                raise UserError(f"{path} is damaged: delete this file, and it is made again") from error
            if self._index.ntotal != len(vectors):
                raise UserError(
                    f"{path} has {self._index.ntotal:,} vectors, not {len(vectors):,}: make the index again"
                )
        else:
            self._index = self._made()
            if path is not None:
                # Not FAISS's own file: where the disk is full, it may end too early without an error.
                with whole_file(path, option) as stream:
                    self._faiss.write_index(self._index, self._faiss.PyCallbackIOWriter(stream.write))
        if kind == "ivfpq":
            self._index.nprobe = min(self._index.nlist, 32)
        elif kind == "hnsw":
            self._index.hnsw.efSearch = 128

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, vectors_QD: NDArray[np.float32], k: int) -> Hits:
        """See `VectorIndex`."""
        if not len(self) or not len(vectors_QD):
            return Hits.none(len(vectors_QD))
        wanted = min(10 * k if self._kind == "ivfpq" else k, len(self))
        scores_QK, rows_QK = self._index.search(np.ascontiguousarray(vectors_QD, dtype=np.float32), wanted)
        if self._kind == "ivfpq":
            self._compare(vectors_QD, rows_QK, scores_QK)
        scores_QK = np.where(rows_QK >= 0, scores_QK, -np.inf)
        order_QK = np.lexsort((rows_QK, -scores_QK))[:, : min(k, len(self))]  # the lower number first among equals
        return Hits(np.take_along_axis(scores_QK, order_QK, 1), np.take_along_axis(rows_QK, order_QK, 1))

    def _compare(
        self, vectors_QD: NDArray[np.float32], rows_QK: NDArray[np.int64], scores_QK: NDArray[np.float32]
    ) -> None:
        """Puts the dot products with the vectors on disk into the scores; what several queries found is read once."""
        size = max(1, COMPARED // (rows_QK.shape[1] * self._vectors.dimension))
        for start in range(0, len(rows_QK), size):
            part = slice(start, start + size)
            rows_R, places = np.unique(rows_QK[part], return_inverse=True)
            found_QKD = self._vectors.take(np.maximum(rows_R, 0))[places.reshape(rows_QK[part].shape)]
            np.einsum("qkd,qd->qk", found_QKD, vectors_QD[part], out=scores_QK[part])

    def _made(self) -> Any:
        faiss, size, dimension = self._faiss, len(self._vectors), self._vectors.dimension
        if self._kind == "flat":
            index = faiss.IndexFlatIP(dimension)
        elif self._kind == "hnsw":
            index = faiss.IndexHNSWFlat(dimension, 32, faiss.METRIC_INNER_PRODUCT)
        else:
            if size < 1000:
                raise UserError(f"ivfpq learns its codes from at least 1,000 vectors, and here are {size:,}: use exact")
            # About as many lists as FAISS's guidelines have them, each trained on 39 vectors or more; a byte for every 8th
            # number, or for every 4th where there are few. 8 bits need 256 vectors or more to learn from.
            lists = int(max(1, min(4 * np.sqrt(size), size / 39)))
            parts = next(
                parts
                for parts in (dimension // 8, dimension // 4, dimension // 2, 1)
                if parts and not dimension % parts
            )
            index = faiss.IndexIVFPQ(
                faiss.IndexFlatIP(dimension), dimension, lists, parts, 8, faiss.METRIC_INNER_PRODUCT
            )
            sample = np.sort(
                np.random.default_rng(0).choice(size, min(size, max(TRAINING_SIZE, 40 * lists)), replace=False)
            )
            index.train(self._vectors.take(sample))
        for start in range(0, size, 65_536):
            index.add(self._vectors.read(start, start + 65_536))
        return index


def open_index(
    vectors: NumberedVectors,
    kind: IndexKind | str = "exact",
    *,
    folder: Path | None = None,
    device: "str | torch.device" = "cpu",
    milvus_uri: str | None = None,
    option: str = "--cache_dir",
) -> VectorIndex:
    """An index over vectors, made where it is not on disk yet.

    Args:
        vectors: What to search.
        kind: See above.
        folder: Where FAISS's indexes are kept, and the file of an embedded Milvus.
        device: Where "exact" computes.
        milvus_uri: A Milvus server; None: a file in the folder.
        option: Where the user chose the folder, for messages.

    Raises:
        UserError: There is no such kind; a package is not installed; a server does not answer.
    """
    if kind not in get_args(IndexKind):
        raise UserError(f"the index must be one of {', '.join(get_args(IndexKind))}, not {kind!r}")
    if kind == "exact":
        return ExactIndex(vectors, device)
    if kind == "milvus":
        from revela_hub.retrieval.milvus import MilvusIndex

        if milvus_uri is None and folder is None:
            raise UserError("a Milvus index needs the URI of a server, or a folder for its file")
        return MilvusIndex(vectors, milvus_uri or str(folder / "milvus.db"))  # type: ignore[operator]
    path = None if folder is None else folder / f"{kind}-{vectors.key[:16]}.faiss"
    return FaissIndex(vectors, kind, path, option)


def require_faiss() -> Any:
    """The package faiss.

    Raises:
        UserError: It is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise UserError(install_hint("faiss")) from error
    return faiss
