"""Indexes over vectors, exact and approximate, behind one method: `search(vectors, k)`.

    exact       compares with all vectors on disk, block by block; up to 256 MiB of them stay in memory (the default)
    flat        exact search by FAISS with all vectors in memory: faster for many single queries
    hnsw        FAISS, a graph of neighbours: approximate; milliseconds for millions of vectors, 1.1 times their size in memory
    ivfpq       FAISS, compressed to 1/16 of the vectors' size or less: approximate; ten times as many candidates as requested
                are rescored with the vectors on disk
    milvus      a Milvus server or cluster, or a local file (`milvus.MilvusIndex`)

Letters in names: Q queries, N vectors of a block, D their dimension, K hits.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError, require
from revela_hub.files import atomic
from revela_hub.retrieval.hits import Hits, sort_hits
from revela_hub.retrieval.index_options import IndexOptions
from revela_hub.retrieval.vectors import Vectors

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

QUERY_BLOCK = 2048
"""Queries searched together."""
MIN_BLOCK, BLOCK_NUMBERS = 8192, 1 << 22
"""Vectors per matrix product: up to 16 MiB of vectors and of scores, but not fewer than these: `torch.topk` is two to three times as fast
if a row has at least 64 times as many scores as it returns."""
CACHED_BYTES = 1 << 28
"""Bytes of vectors that an exact index keeps in memory: 170,000 texts with 384 dimensions."""
RESCORED_NUMBERS = 1 << 24
"""Vector components that are rescored at a time: 64 MiB."""
TRAINING_SIZE = 100_000
"""Minimum number of vectors that ivfpq is trained on, if there are that many."""


class VectorIndex(Protocol):
    """Numbered vectors, searched by dot product (cosine if the vectors have unit length)."""

    vectors: Vectors | NDArray[np.float32]

    def search(self, vectors_QD: NDArray[np.float32], k: int) -> Hits:
        """Return the `k` vectors with the largest dot product with each of the Q queries."""


class ExactIndex:
    """Exact search over vectors on disk or in memory; ties are broken by the lower number."""

    def __init__(self, vectors: Vectors | NDArray[np.float32], device: "str | torch.device" = "cpu") -> None:
        import torch

        self.vectors, self._device = vectors, device
        size, dimension = vectors.shape
        self._stored: Any = vectors
        if 4 * size * dimension <= CACHED_BYTES:
            self._stored = torch.from_numpy(vectors[:]).to(device)

    def search(self, vectors_QD: NDArray[np.float32], k: int) -> Hits:
        """See `VectorIndex`."""
        import torch

        k = min(k, len(self.vectors))
        found = [Hits.none(0, k)]
        size = QUERY_BLOCK if str(self._device) == "cpu" else 8 * QUERY_BLOCK  # each block of queries reads all vectors
        for start in range(0, len(vectors_QD) if k else 0, size):
            queries_QD = torch.from_numpy(vectors_QD[start : start + size]).to(self._device)
            found.append(best_hits(self._scores(queries_QD), k))
        return Hits(*map(np.concatenate, zip(*found, strict=True))) if k else Hits.none(len(vectors_QD))

    def _scores(self, queries_QD: "torch.Tensor") -> "Iterator[tuple[int, torch.Tensor]]":
        import torch

        size, dimension = self.vectors.shape
        block = max(MIN_BLOCK, min(BLOCK_NUMBERS // max(1, dimension), BLOCK_NUMBERS // len(queries_QD)))
        for start in range(0, size, block):
            yield start, queries_QD @ torch.as_tensor(self._stored[start : start + block], device=self._device).T


def best_hits(blocks: "Iterable[tuple[int, torch.Tensor]]", k: int) -> Hits:
    """Return the `k` best of scores given block by block, each with the number of its first text; ties are broken by the lower number.

    `torch.topk` does not define which of several equal scores it returns, so with duplicate documents in the corpus, or with a
    model that maps everything to one vector, its result alone is not deterministic.
    """
    import torch

    best: tuple[torch.Tensor, torch.Tensor] | None = None
    for first, scores_QN in blocks:
        shape = len(scores_QN), k
        earlier_QK, rows_QK = best or (
            scores_QN.new_full(shape, -torch.inf),
            scores_QN.new_full(shape, -1, dtype=torch.long),
        )
        all_QM = torch.cat([earlier_QK, scores_QN], dim=1)
        scores_QM, columns_QM = all_QM.topk(k + 1, dim=1)
        tied_Q = scores_QM[:, k - 1] == scores_QM[:, k]  # more candidates for the last place than places
        if tied_Q.any():
            sorted_QM, order_QM = all_QM[tied_Q].sort(dim=1, descending=True, stable=True)
            scores_QM[tied_Q], columns_QM[tied_Q] = sorted_QM[:, : k + 1], order_QM[:, : k + 1]
        # Equal scores further up: order by column first, which the stable sort by score preserves.
        columns_QK, order_QK = columns_QM[:, :k].sort(dim=1)
        scores_QK, order_QK = scores_QM.gather(1, order_QK).sort(dim=1, descending=True, stable=True)
        columns_QK = columns_QK.gather(1, order_QK)
        of_earlier_QK = rows_QK.gather(1, columns_QK.clamp(max=k - 1))
        best = scores_QK, torch.where(columns_QK < k, of_earlier_QK, columns_QK - k + first)
    assert best is not None
    return Hits(best[0].cpu().float().numpy(), best[1].cpu().numpy())


class FaissIndex:
    """A FAISS index of a kind ("flat", "hnsw" or "ivfpq"), read from its file or built from vectors.

    Without a path it is built in memory each time. The hits of compressed vectors are rescored with the vectors.
    """

    def __init__(self, vectors: Vectors | NDArray[np.float32], kind: str, path: Path | None = None) -> None:
        require("faiss")
        import faiss

        self.vectors, self._kind = vectors, kind
        if path is not None and path.is_file():
            self._index: Any = faiss.read_index(str(path))
        else:
            self._index = _built(vectors, kind)
            if path is not None:
                # Not faiss.write_index(path): on a full disk it may stop early without an error.
                with atomic(path) as temporary, temporary.open("wb") as stream:
                    faiss.write_index(self._index, faiss.PyCallbackIOWriter(stream.write))  # type: ignore[attr-defined]
        low, high = np.quantile(np.linalg.norm(_sample(vectors, 1000), axis=1), [0.01, 0.99])
        if kind != "flat" and high > 1.05 * low:  # those of models that compare by dot product
            logger.warning(
                "the model compares by dot product, and its vectors have lengths of %.3g to %.3g: %s may miss many of the best "
                "passages; compare it with the index type exact",
                *(low, high, kind),
            )
        if kind == "ivfpq":
            self._index.nprobe = min(self._index.nlist, 32)
        elif kind == "hnsw":
            self._index.hnsw.efSearch = 128

    def search(self, vectors_QD: NDArray[np.float32], k: int) -> Hits:
        """See `VectorIndex`."""
        k = min(k, len(self.vectors))
        if not len(vectors_QD):
            return Hits.none(0, k)
        wanted = min(10 * k, len(self.vectors)) if self._kind == "ivfpq" else k
        scores_QM, rows_QM = self._index.search(np.ascontiguousarray(vectors_QD, dtype=np.float32), wanted)
        if self._kind == "ivfpq":
            size = max(1, RESCORED_NUMBERS // (wanted * self.vectors.shape[1]))
            for start in range(0, len(rows_QM), size):
                part = slice(start, start + size)
                found_QMD = self.vectors[rows_QM[part].clip(0).ravel()].reshape(*rows_QM[part].shape, -1)
                np.einsum("qmd,qd->qm", found_QMD, vectors_QD[part], out=scores_QM[part])
        return sort_hits(scores_QM, rows_QM, k)


def _built(vectors: Vectors | NDArray[np.float32], kind: str) -> Any:
    import faiss

    size, dimension = vectors.shape
    # FAISS's guidelines: 4 sqrt(N) lists with at least 39 training vectors each; one byte per 8 components, or per 4 or 2 for odd
    # dimensions.
    lists = int(max(1, min(4 * np.sqrt(size), size / 39)))
    codes = next(n for n in (dimension // 8, dimension // 4, dimension // 2, 1) if n and not dimension % n)
    factory = {"flat": "Flat", "hnsw": "HNSW32", "ivfpq": f"IVF{lists},PQ{codes}"}[kind]
    index: Any = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    if kind == "ivfpq":
        for part in (index, index.pq):  # of a small text, each codebook would print a warning
            part.cp.min_points_per_centroid = 1
        index.train(_sample(vectors, max(TRAINING_SIZE, 40 * lists)))
    for start in range(0, size, 65_536):
        index.add(vectors[start : start + 65_536])
    return index


def _sample(vectors: Vectors | NDArray[np.float32], number: int) -> NDArray[np.float32]:
    """Return up to this many vectors, drawn with a fixed seed."""
    rows = np.random.default_rng(0).choice(len(vectors), min(len(vectors), number), replace=False)
    return vectors[np.sort(rows)]


def open_index(
    vectors: Vectors, options: IndexOptions | None = None, *, folder: Path | None = None, device: Any = "cpu"
) -> VectorIndex:
    """Open the index over vectors, building it first if it is not in the folder yet; default: exact search on the device."""
    options = options or IndexOptions()
    if options.type == "exact":
        return ExactIndex(vectors, device)
    if options.type == "milvus":
        from revela_hub.retrieval.milvus import MilvusIndex

        return MilvusIndex(vectors, milvus_uri(options, folder), vectors.key)
    path = None if folder is None else folder / f"{options.type}-{vectors.key[:16]}.faiss"
    return FaissIndex(vectors, options.type, path)


def milvus_uri(options: IndexOptions, folder: Path | None) -> str:
    """Return the server of an index in Milvus, or the local file in its folder."""
    uri = options.milvus_uri or (folder and str(folder / "milvus.db"))
    if not uri:
        raise UserError("a Milvus index needs the URI of a server, or a folder for its local file")
    return uri
