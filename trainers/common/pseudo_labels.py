"""Rank passages with an existing retriever, as labels for training another one."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError
from revela_hub.retrieval.bm25 import BM25
from revela_hub.retrieval.dense import open_index
from revela_hub.retrieval.encoder import as_vectors, load_encoder, similarity_of
from revela_hub.retrieval.stored_vectors import VectorsInMemory


def rank_passages(
    retriever: str,
    queries: Sequence[str],
    passages: Sequence[str],
    depth: int = 50,
    *,
    batch_size: int = 32,
    show_progress_bar: bool = False,
) -> NDArray[np.int32]:
    """Return the best passages of each query according to an existing retriever.

    Args:
        retriever: sentence-transformers folder, Hub id, or "bm25".
        queries: Q texts.
        passages: M texts.
        depth: number of passages per query.
        batch_size: texts per forward pass.
        show_progress_bar: whether to show progress bars on standard error.

    Returns:
        (Q, depth) indices of passages, best first; -1 if there are fewer results.

    Raises:
        UserError: the collection is empty, or the retriever cannot be loaded.
    """
    if not len(passages):
        raise UserError("there are no passages to rank")
    ranked = np.full((len(queries), depth), -1, np.int32)
    if retriever == "bm25":
        rows_QK = BM25(passages).search(queries, depth).rows_QK
        ranked[:, : rows_QK.shape[1]] = rows_QK
        return ranked
    encoder = load_encoder(retriever)
    normalize = similarity_of(encoder, retriever) == "cosine"
    queries_Qd, passages_Md = (
        as_vectors(
            encode(list(texts), batch_size=batch_size, show_progress_bar=show_progress_bar),
            len(texts),
            normalize=normalize,
        )
        for encode, texts in ((encoder.encode_query, queries), (encoder.encode_document, passages))
    )
    found = top_rows(queries_Qd, passages_Md, min(depth, len(passages)))
    ranked[:, : found.shape[1]] = found
    return ranked


def top_rows(queries_Qd: NDArray[np.float32], passages_Md: NDArray[np.float32], k: int) -> NDArray[np.int32]:
    """Return (Q, k) indices of the passages with the largest dot products, best first; ties by lower index."""
    return open_index(VectorsInMemory(passages_Md)).search(queries_Qd, k).rows_QK.astype(np.int32)
