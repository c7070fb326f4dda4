"""Rank passages with an existing retriever, as labels for training another one."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError
from revela_hub.retrieval.dense import open_index
from revela_hub.retrieval.encoder import load_encoder, similarity_of
from revela_hub.retrieval.ranking import RankerSettings, build_ranker, ranking_folder
from revela_hub.retrieval.texts import TextList
from revela_hub.retrieval.vectors import VectorsInMemory


def rank_passages(
    retriever: str | NDArray[np.int32],
    queries: Sequence[str],
    passages: Sequence[str],
    depth: int = 50,
    *,
    trust_remote_code: bool = False,
    show_progress_bar: bool = False,
) -> NDArray[np.int32]:
    """Return the best passages of each query according to an existing retriever: a folder, a Hub id, or "bm25".

    A ranking of the passages for these queries is returned as it is.

    Returns:
        (Q, depth) indices of passages, best first; -1 if there are fewer results.

    Raises:
        UserError: the collection is empty, the retriever cannot be loaded, or the ranking is of other queries or passages.
    """
    if not len(passages):
        raise UserError("there are no passages to rank")
    if not isinstance(retriever, str):
        _check_ranking(retriever, len(queries), len(passages))
        return retriever
    encoder = None if retriever == "bm25" else load_encoder(retriever, trust_remote_code=trust_remote_code)
    if encoder is not None:
        similarity_of(encoder, retriever)  # raises an error that names the model
    settings = RankerSettings(mode="dense" if encoder else "bm25", show_progress_bar=show_progress_bar)
    with ranking_folder(None, settings) as (folder, settings):
        ranker = build_ranker(TextList(passages), settings, folder, dense=encoder)
        rows_QK = ranker.search(ranker.encode(list(queries)), depth).rows_QK
    ranked = np.full((len(queries), depth), -1, np.int32)
    ranked[:, : rows_QK.shape[1]] = rows_QK
    return ranked


def _check_ranking(ranking: NDArray[np.int32], rows: int, passages: int) -> None:
    if ranking.ndim != 2 or len(ranking) != rows:
        raise UserError(
            f"pseudo_labels has the shape {ranking.shape}, but train_dataset has {rows} rows: pass an array (rows, passages)"
        )
    if ranking.size and ranking.max() >= passages:
        raise UserError(f"pseudo_labels has the passage {ranking.max()}, but the collection ends at {passages - 1}")


def top_rows(queries_Qd: NDArray[np.float32], passages_Md: NDArray[np.float32], k: int) -> NDArray[np.int32]:
    """Return (Q, k) indices of the passages with the largest dot products, best first; ties by lower index."""
    return open_index(VectorsInMemory(passages_Md)).search(queries_Qd, k).rows_QK.astype(np.int32)
