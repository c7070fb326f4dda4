"""Measure how much quality shorter and quantised vectors cost, by exact search. Texts and queries are encoded once.

Vectors are cut to their first components, and normalised again if the model compares by cosine. Those of the documents are stored as
int8 (256 steps between the smallest and the largest value of a component) or binary (the sign of a component) by sentence-transformers'
`quantize_embeddings`; those of the queries stay float32. An index that rescores with whole vectors loses less.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.evaluation.retrieval import METRICS, RetrievalScores, depth_of, documents_of, rankings_of, score_run
from revela_hub.retrieval.encoder import Encoder, as_vectors, similarity_of
from revela_hub.retrieval.encoding import encode_texts


class SizeScores(NamedTuple):
    """Scores of vectors with `dims` components of a precision, and the bytes of one vector."""

    dims: int
    precision: str
    bytes_per_passage: int
    scores: RetrievalScores


def evaluate_sizes(
    encoder: Encoder,
    task: RetrievalTask,
    dims: Sequence[int],
    precisions: Sequence[str],
    metrics: Sequence[str] = METRICS,
    **options: Any,
) -> Iterator[SizeScores]:
    """Score all combinations of numbers of components (default: all) and "float32", "int8", "binary" (default: float32).

    The other options are those of `encode_texts`.
    """
    from sentence_transformers.util import dot_score, semantic_search

    depth = depth_of(metrics)
    documents, cosine = documents_of(task), similarity_of(encoder) == "cosine"
    documents_ND = encode_texts(encoder, [task.corpus[id_] for id_ in documents], "document", **options)
    queries_QD = encode_texts(encoder, list(task.queries.values()), "query", **options)
    whole = documents_ND.shape[1]
    if max(dims, default=0) > whole:
        raise UserError(f"the model's vectors have {whole} dimensions, fewer than {max(dims)}: lower the number")
    for size, precision in product(dims or [whole], precisions or ["float32"]):
        asked_QD = as_vectors(queries_QD[:, :size], len(queries_QD), normalize=cosine)
        cut_ND = as_vectors(documents_ND[:, :size], len(documents), normalize=cosine)
        number_of_bytes, stored_ND = quantised(cut_ND, precision)
        found: Any = semantic_search(asked_QD, stored_ND, top_k=depth + 1, score_function=dot_score)  # type: ignore[arg-type]
        rows, scores = ([[hit[key] for hit in hits] for hits in found] for key in ("corpus_id", "score"))
        yield SizeScores(
            size, precision, number_of_bytes, score_run(rankings_of(rows, scores, task, depth), task, metrics)
        )


def quantised(vectors_ND: NDArray[np.float32], precision: str) -> tuple[int, NDArray[np.float32]]:
    """Return the bytes of a quantised vector, and the values (N, D) that the quantised vectors stand for."""
    from sentence_transformers.util import quantize_embeddings

    stored: Any = quantize_embeddings(vectors_ND, precision.replace("binary", "ubinary"))  # type: ignore[arg-type]
    values_ND = vectors_ND
    if precision == "int8":
        starts_D = vectors_ND.min(axis=0)
        values_ND = (stored + np.float32(128.5)) * ((vectors_ND.max(axis=0) - starts_D) / 255) + starts_D
    elif precision == "binary":
        values_ND = np.unpackbits(stored, axis=1, count=vectors_ND.shape[1]) * np.float32(2) - 1
    return stored.nbytes // len(stored), values_ND
