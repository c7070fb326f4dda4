"""Learned sparse retrieval: texts and queries as weighted terms, searched with an inverted index.

    score(q, d) = sum over terms t of  q_t * d_t

The terms of a text are stored on disk in the vector store, as rows (2 M) of M term ids and their M weights, so encoding can
be resumed like that of vectors. The inverted index is a sparse matrix (terms, texts) in memory, with 8 bytes for each term of
each text. A search touches only the texts that share a term with the query.

Letters in names: Q queries, N texts, V terms of the vocabulary, M terms stored per text, K hits.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from revela_hub.errors import UserError
from revela_hub.retrieval.top_k import Hits, top_hits
from revela_hub.retrieval.vectors import Vectors

QUERY_BLOCK = 64


class SparseIndex:
    """An inverted index of rows of `pack_terms`, for a vocabulary of `size` terms."""

    def __init__(self, terms: Vectors, size: int) -> None:
        blocks = [unpack_terms(terms.read(start, start + 65_536), size) for start in range(0, len(terms), 65_536)]
        self._texts_NV: Any = sparse.vstack(blocks, format="csr") if blocks else sparse.csr_array((0, size))
        self._inverted_VN = self._texts_NV.T.tocsr()

    def search(self, queries: Any, k: int) -> Hits:
        """Return the best texts for each query (Q, V); texts without a common term are not returned."""
        return Hits.concatenate(self._hits(queries, k))

    def pair_scores(self, queries: Any, queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the scores (P,) of pairs, each a position in the queries (Q, V) and the number of a text."""
        products = queries[queries_P].multiply(self._texts_NV[rows_P])
        return np.asarray(products.sum(axis=1), dtype=np.float32).reshape(-1)

    def _hits(self, queries_QV: Any, k: int) -> Iterator[Hits]:
        for start in range(0, queries_QV.shape[0], QUERY_BLOCK):
            scores_QN = (queries_QV[start : start + QUERY_BLOCK] @ self._inverted_VN).tocsr()
            for query in range(scores_QN.shape[0]):
                begin, end = scores_QN.indptr[query : query + 2]
                found = scores_QN.data[begin:end] > 0
                yield top_hits(scores_QN.data[begin:end][found], scores_QN.indices[begin:end][found], k)


def pack_terms(weights: Any, most: int) -> NDArray[np.float32]:
    """Return the `most` heaviest terms of each text as rows (N, 2 M), padded with -1 and 0; ties go to the lower term id.

    Args:
        weights: A sparse or dense tensor (N, V), as returned by a SparseEncoder.
        most: M, or V if that is smaller.
    """
    weights_NV = as_terms(weights)
    most = min(most, weights_NV.shape[1])
    packed = np.zeros((weights_NV.shape[0], 2 * most), dtype=np.float32)
    packed[:, :most] = -1
    for row in range(weights_NV.shape[0]):
        begin, end = weights_NV.indptr[row : row + 2]
        terms, values = weights_NV.indices[begin:end], weights_NV.data[begin:end]
        best = np.lexsort((terms, -values))[:most]
        packed[row, : len(best)] = terms[best]
        packed[row, most : most + len(best)] = values[best]
    return packed


def unpack_terms(packed: NDArray[np.float32], size: int) -> Any:
    """Convert rows of `pack_terms` to a sparse matrix (N, V)."""
    most = packed.shape[1] // 2
    terms, values = packed[:, :most], packed[:, most:]
    used = terms >= 0
    starts = np.concatenate([[0], used.sum(axis=1).cumsum()])
    matrix = sparse.csr_array((values[used], terms[used].astype(np.int64), starts), shape=(len(packed), size))
    matrix.sort_indices()
    return matrix


def as_terms(weights: Any) -> Any:
    """Convert a tensor (N, V) of a SparseEncoder to a sparse matrix."""
    if weights.is_sparse:
        coalesced = weights.cpu().coalesce()
        matrix = sparse.coo_array(
            (coalesced.values().float().numpy(), tuple(coalesced.indices().numpy())), shape=tuple(weights.shape)
        ).tocsr()
    else:
        matrix = sparse.csr_array(weights.cpu().float().numpy())
    if not np.isfinite(matrix.data).all() or (matrix.data < 0).any():
        raise UserError("the sparse model's term weights contain NaN, infinity or negative numbers")
    matrix.eliminate_zeros()
    return matrix
