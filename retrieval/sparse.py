"""Inverted indexes, of the words of BM25 and of the weighted terms of a `SparseEncoder`.

    score(q, d) = sum over terms t of  q_t * d_t

A search touches only the texts that share a term with the query. The index is a sparse matrix with 8 bytes for each term of each
text. The terms of a `SparseEncoder` are stored on disk like vectors, as rows (2 M) of M term ids and their M weights, so encoding
can be resumed.

Letters in names: Q queries, N texts, n texts of a block, V terms of the vocabulary, T terms of a query, M terms stored per
text or candidates, K hits.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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

BLOCK = 1 << 18
"""Texts per block of an index."""

Terms = tuple[Sequence[int], Sequence[float]]
"""The term ids of a query and their weights."""


class InvertedIndex:
    """Ranks texts by the terms that they share with a query (a `Ranker`); several queries at a time, one per core.

    Attributes:
        postings: Blocks of consecutive texts, each a sparse matrix (V, n): for each term, the texts that contain it, in
            ascending order, with its weights in them. The scores of a block of 2^18 texts fit into the cache of a core.
    """

    postings: Sequence[Any]

    def terms(self, queries: Sequence[str]) -> list[Terms]:
        """Return the terms of each query that the index knows."""
        raise NotImplementedError

    def search(self, queries: Sequence[str], k: int) -> Hits:
        """See `Ranker`; texts without a term of the query are not returned."""
        hits = Hits.none(len(queries), min(k, sum(block.shape[1] for block in self.postings)))
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # numpy and scipy release the lock
            for query, best in enumerate(threads.map(partial(self._best, k), self.terms(queries))):
                found = best.rows_QK.shape[1]
                hits.scores_QK[query, :found], hits.rows_QK[query, :found] = best.scores_QK[0], best.rows_QK[0]
        return hits

    def pair_scores(
        self, queries: Sequence[str], queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """See `Ranker`."""
        terms, scores_P = self.terms(queries), np.zeros(len(rows_P), dtype=np.float32)
        ends = np.cumsum([block.shape[1] for block in self.postings])
        keys_P = queries_P * len(ends) + np.searchsorted(ends, rows_P, side="right")
        for key in np.unique(keys_P).tolist():
            query, number = divmod(key, len(ends))
            block, at = self.postings[number], np.flatnonzero(keys_P == key)
            rows = rows_P[at] - ends[number] + block.shape[1]
            for term, weight in zip(*terms[query], strict=True):
                part = slice(int(block.indptr[term]), int(block.indptr[term + 1]))
                texts, weights = block.indices[part], block.data[part]
                if len(texts):
                    places = np.searchsorted(texts, rows).clip(max=len(texts) - 1)
                    scores_P[at] += np.float32(weight) * np.where(texts[places] == rows, weights[places], 0)
        return scores_P

    def _best(self, k: int, terms: Terms) -> Hits:
        """Return the best `k` texts for the terms of one query, (1, K)."""
        best, least, start = Hits.none(1), 0.0, 0
        for block in self.postings:
            scores_n = _scores(block, terms)
            rows_M = np.flatnonzero(scores_n > least)
            if len(rows_M) > k:
                own_M = scores_n[rows_M]
                rows_M = rows_M[own_M >= np.partition(own_M, -k)[-k]]
            scores_1M = np.concatenate([best.scores_QK, scores_n[None, rows_M]], axis=1)
            best = sort_hits(scores_1M, np.concatenate([best.rows_QK, start + rows_M[None]], axis=1), k)
            least = float(best.scores_QK[0, -1]) if best.rows_QK.shape[1] == k else 0.0
            start += block.shape[1]
        return best


def _scores(postings_Vn: Any, terms: Terms) -> NDArray[np.float32]:
    """Return the scores (n,) of the texts of a block."""
    parts = [slice(int(postings_Vn.indptr[term]), int(postings_Vn.indptr[term + 1])) for term in terms[0]]
    if not parts:
        return np.zeros(postings_Vn.shape[1], dtype=np.float32)
    data, texts = (np.concatenate([array[part] for part in parts]) for array in (postings_Vn.data, postings_Vn.indices))
    ends = np.cumsum([0, *(part.stop - part.start for part in parts)])
    found_nT = sparse.csc_array((data, texts, ends), (postings_Vn.shape[1], len(parts)))
    return found_nT @ np.asarray(terms[1], dtype=np.float32)  # type: ignore[no-any-return]


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
        starts = range(0, len(packed), BLOCK)
        self.postings = [unpack_terms(packed[start : start + BLOCK], size).T.tocsr() for start in starts]

    def terms(self, queries: Sequence[str]) -> list[Terms]:
        """See `InvertedIndex`."""
        return self._terms(tuple(queries))  # those of the last queries are kept

    def _encode(self, queries: tuple[str, ...]) -> list[Terms]:
        weights_QV = as_terms(self._encode_queries(queries))
        parts = [slice(*bounds) for bounds in pairwise(weights_QV.indptr.tolist())]
        return [(weights_QV.indices[part], weights_QV.data[part]) for part in parts]


def pack_terms(weights: Any, most: int = MAX_TERMS) -> NDArray[np.float32]:
    """Return the `most` heaviest terms of each text in a sparse tensor (N, V) as rows (N, 2 M), padded with -1 and 0.

    Ties go to the lower term id.
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
