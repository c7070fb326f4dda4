"""Measure what shorter and quantized vectors cost: quality, bytes per passage and time per query.

Texts and queries are encoded once. For each size, both are cut to their first components (and normalized again if the model compares
by cosine), then searched in memory with FAISS (`retrieval.dense`). As binary vectors are rescored for ten times as many candidates
as requested, nDCG@10 and MRR@10 come from searches for 10 passages, Recall@100 from searches for 100.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.evaluation.retrieval import TOP_K, RetrievalScores, documents_of, rankings_of, score_run
from revela_hub.retrieval.encoder import Encoder, as_vectors, similarity_of
from revela_hub.retrieval.ranking import RankerSettings, build_ranker, ranking_folder
from revela_hub.retrieval.texts import TextList
from revela_hub.retrieval.vectors import truncated_dimension

TIMED_QUERIES = 100
"""Queries that are searched one by one to measure the time."""


@dataclass(frozen=True)
class VectorSize:
    """The number of leading components (None: all), and "float32", "int8" or "binary"."""

    dims: int | None = None
    precision: str = "float32"


@dataclass(frozen=True)
class SizeScores:
    """The scores of one size of vectors, the bytes of one vector in memory, and the time of a search.

    The time is the median for one query and 10 passages, without encoding the query.
    """

    dims: int
    precision: str
    scores: RetrievalScores
    bytes_per_passage: int
    milliseconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields other than the scores, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "scores"}


def evaluate_sizes(
    encoder: Encoder,
    task: RetrievalTask,
    settings: RankerSettings,
    sizes: Sequence[VectorSize],
    *,
    cache_dir: str | Path | None = None,
) -> Iterator[SizeScores]:
    """Score a dense retriever with vectors of several sizes; the other arguments are those of `evaluate_ranking`."""
    largest = getattr(encoder, "get_embedding_dimension", int)() or 0
    for size in sizes:  # before the texts are encoded
        truncated_dimension(largest, size.dims)
    with ranking_folder(cache_dir, settings) as (folder, settings):
        texts = TextList([task.corpus[id_] for id_ in documents_of(task)])
        whole = build_ranker(texts, settings, folder, dense=encoder)
        queries_QD = np.asarray(whole.encode(list(task.queries.values())))
        cosine = similarity_of(encoder) == "cosine"
        for size in sizes:
            options = replace(settings.index, type="flat", truncate_dim=size.dims, precision=size.precision)
            ranker: Any = build_ranker(texts, replace(settings, index=options), folder, dense=encoder)
            cut_QD = as_vectors(queries_QD[:, : size.dims], len(queries_QD), normalize=cosine)
            dims = int(cut_QD.shape[1])
            number_of_bytes, scores = options.bytes_per_vector(dims), _scores(ranker, cut_QD, task)
            yield SizeScores(dims, size.precision, scores, number_of_bytes, _milliseconds(ranker, cut_QD))


def _scores(ranker: Any, queries_QD: np.ndarray, task: RetrievalTask) -> RetrievalScores:
    """Return each metric from a search with its own depth."""
    ten, hundred = (
        score_run(rankings_of(ranker.search(queries_QD, depth + 1), task, depth), task) for depth in (10, TOP_K)
    )
    per_query = {**ten.per_query, "recall_at_100": hundred.per_query["recall_at_100"]}
    return replace(ten, recall_at_100=hundred.recall_at_100, per_query=per_query)


def _milliseconds(ranker: Any, queries_QD: np.ndarray) -> float:
    taken = []
    for query_D in queries_QD[:TIMED_QUERIES]:
        began = time.perf_counter()
        ranker.search(query_D[None], 10)
        taken.append(1000 * (time.perf_counter() - began))
    return float(np.median(taken))


def sizes_of(dims: Sequence[int], precisions: Sequence[str]) -> list[VectorSize]:
    """Return every combination, the largest first; without values all components and float32."""
    for name, values in (("dims", dims), ("precision", precisions)):
        if repeated := [value for place, value in enumerate(values) if value in values[:place]]:
            raise UserError(f"--{name} contains {repeated[0]} twice")
    if unknown := [name for name in precisions if name not in ("float32", "int8", "binary")]:
        raise UserError(f"--precision must be float32, int8 or binary, not {unknown[0]!r}")
    numbers: list[int | None] = [*dims] or [None]
    return [VectorSize(size, kind) for size in numbers for kind in list(precisions) or ["float32"]]
