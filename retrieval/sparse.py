"""Inverted indexes, of the words of BM25 and of the weighted terms of a `SparseEncoder`.

    score(q, d) = sum over terms t of  q_t * d_t

A search touches only the texts that share a term with the query. The index is a sparse matrix with 8 bytes for each term of each
text. The terms of a `SparseEncoder` are stored on disk like vectors, as rows (2 M) of M term ids and their M weights, so encoding
can be resumed.

Letters in names: Q queries, N texts, V terms of the vocabulary, M terms stored per text or candidates, K hits.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from revela_hub.errors import UserError
from revela_hub.retrieval.encoding import encoded
from revela_hub.retrieval.hits import Hits, sort_hits
from revela_hub.retrieval.texts import TextSource
from revela_hub.retrieval.vectors import VectorStore

MAX_TERMS = 256
"""Terms stored per text, the heaviest ones."""

Terms = tuple[Sequence[int], Sequence[float]]
"""The term ids of a query and their weights."""


class InvertedIndex:
    """Ranks texts by the terms that they share with a query (a `Ranker`).

    Attributes:
        postings_VN: For each term, the texts that contain it, with its weights in them.
    """

    postings_VN: Any

    def terms(self, queries: Sequence[str]) -> list[Terms]:
        """Return the terms of each query that the index knows."""
        raise NotImplementedError

    def search(self, queries: Sequence[str], k: int) -> Hits:
        """See `Ranker`; texts without a term of the query are not returned."""
        hits = Hits.none(len(queries), min(k, self.postings_VN.shape[1]))
        for query, terms in enumerate(self.terms(queries)):
            scores_N = self._scores(terms)
            rows_M = np.flatnonzero(scores_N > 0)
            if len(rows_M) > k:
                least = np.partition(scores_N[rows_M], -k)[-k]
                rows_M = rows_M[scores_N[rows_M] >= least]
            best = sort_hits(scores_N[None, rows_M], rows_M[None], k)
            found = best.rows_QK.shape[1]
            hits.scores_QK[query, :found], hits.rows_QK[query, :found] = best.scores_QK[0], best.rows_QK[0]
        return hits

    def pair_scores(
        self, queries: Sequence[str], queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """See `Ranker`."""
        terms = self.terms(queries)
        scores_P = np.empty(len(rows_P), dtype=np.float32)
        for query in np.unique(queries_P).tolist():
            of_query_P = queries_P == query
            scores_P[of_query_P] = self._scores(terms[query])[rows_P[of_query_P]]
        return scores_P

    def _scores(self, terms: Terms) -> NDArray[np.float32]:
        """Return the scores (N,) of all texts."""
        postings = self.postings_VN
        scores_N = np.zeros(postings.shape[1], dtype=np.float32)
        for term, weight in zip(*terms, strict=True):
            part = slice(int(postings.indptr[term]), int(postings.indptr[term + 1]))
            scores_N[postings.indices[part]] += np.float32(weight) * postings.data[part]
        return scores_N


class SparseRanker(InvertedIndex):
    """Ranks by the weighted terms of a `SparseEncoder`; encodes the texts that are not in the folder yet."""

    def __init__(
        self,
        encoder: Any,
        texts: TextSource,
        folder: Path,
        identity: str,
        *,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool = False,
    ) -> None:
        def encode(batch: list[str]) -> NDArray[np.float32]:
            return pack_terms(encoded(encoder, batch, "document", batch_size, document_prompt))

        self._encode_queries = partial(encoded, encoder, kind="query", batch_size=batch_size, prompt=query_prompt)
        self._terms = lru_cache(maxsize=1)(self._encode)
        store = VectorStore(folder, f"{identity} terms {MAX_TERMS} {document_prompt!r}")
        store.fill(texts, encode, show_progress_bar=show_progress_bar)
        packed = store.vectors(texts)
        size = int(encoded(encoder, ["how many terms"], "query").shape[1])
        blocks = [unpack_terms(packed[start : start + 65_536], size) for start in range(0, len(packed), 65_536)]
        texts_NV = sparse.vstack(blocks, format="csr") if blocks else sparse.csr_array((0, size))
        self.postings_VN = texts_NV.T.tocsr()

    def terms(self, queries: Sequence[str]) -> list[Terms]:
        """See `InvertedIndex`."""
        return self._terms(tuple(queries))  # those of the last queries are kept

    def _encode(self, queries: tuple[str, ...]) -> list[Terms]:
        weights_QV = as_terms(self._encode_queries(queries))
        parts = [slice(*bounds) for bounds in pairwise(weights_QV.indptr.tolist())]
        return [(weights_QV.indices[part], weights_QV.data[part]) for part in parts]


def pack_terms(weights: Any, most: int = MAX_TERMS) -> NDArray[np.float32]:
    """Return the `most` heaviest terms of each text as rows (N, 2 M), padded with -1 and 0; ties go to the lower term id.

    Args:
        weights: A sparse tensor (N, V), as returned by a SparseEncoder.
        most: M, or V if that is smaller.
    """
    weights_NV = as_terms(weights)
    most = min(most, weights_NV.shape[1])
    packed = np.zeros((weights_NV.shape[0], 2 * most), dtype=np.float32)
    packed[:, :most] = -1
    for row, (begin, end) in enumerate(pairwise(weights_NV.indptr)):
        terms, values = weights_NV.indices[begin:end], weights_NV.data[begin:end]
        best = np.lexsort((terms, -values))[:most]
        packed[row, : len(best)] = terms[best]
        packed[row, most : most + len(best)] = values[best]
    return packed


def unpack_terms(packed: NDArray[np.float32], size: int) -> Any:
    """Convert rows of `pack_terms` to a sparse matrix (N, V)."""
    most = packed.shape[1] // 2
    terms, values = packed[:, :most], packed[:, most:]
    rows, columns = np.nonzero(terms >= 0)
    return sparse.csr_array((values[rows, columns], (rows, terms[rows, columns].astype(int))), (len(packed), size))


def as_terms(weights: Any) -> Any:
    """Convert a sparse tensor (N, V) of a SparseEncoder to a sparse matrix."""
    weights = weights.cpu().coalesce()
    values = weights.values().float().numpy()
    if not np.isfinite(values).all() or (values < 0).any():
        raise UserError("the sparse model's term weights contain NaN, infinity or negative numbers")
    return sparse.coo_array((values, tuple(weights.indices().numpy())), tuple(weights.shape)).tocsr()
