"""Retrieval quality of an encoder, or of BM25: nDCG@10, MRR@10 and Recall@100, computed by trec_eval (pytrec_eval).

The search is exact. The corpus is encoded block by block and only the best hits of each query are kept, so that memory
does not grow with the corpus.

Letters in names: Q queries, N documents of a block, K hits kept, D the vectors' dimension.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.retrieval.bm25 import BM25
from revela_hub.retrieval.encoder import Encoder, as_vectors
from revela_hub.retrieval.top_k import Hits, best_hits

if TYPE_CHECKING:
    from torch import Tensor

TOP_K = 100
"""How many hits per query the scores look at: Recall@100 needs no more."""

CORPUS_BLOCK = 16_384
"""Documents encoded at a time: 16,384 vectors of 4,096 float32 numbers are 256 MiB."""

METRICS = ("ndcg_at_10", "mrr_at_10", "recall_at_100")

Run = dict[str, dict[str, float]]
"""Query id to its hits, document id to score: what trec_eval calls a run."""


@dataclass(frozen=True)
class RetrievalScores:
    """The means over the queries of a task; each score is between 0 and 1.

    Attributes:
        per_query: Metric ("ndcg_at_10", ...) to query id to score, for a paired test (`evaluation.significance`); not
            part of the record that is written to files.
    """

    name: str
    ndcg_at_10: float
    mrr_at_10: float
    recall_at_100: float
    queries: int
    documents: int
    per_query: Mapping[str, Mapping[str, float]] = field(default_factory=dict, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary of the means, for JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "per_query"}


def evaluate_retrieval(
    encoder: Encoder,
    task: RetrievalTask,
    batch_size: int = 32,
    *,
    similarity: Literal["cosine", "dot"] | str = "cosine",
    show_progress_bar: bool = False,
    corpus_block: int = CORPUS_BLOCK,
) -> RetrievalScores:
    """Encodes the task's queries and documents, searches exactly, and scores the result.

    Args:
        encoder: A SentenceTransformer, or anything like `Encoder`.
        task: What to search, and what should be found.
        batch_size: Texts per forward pass.
        similarity: "cosine" (what sentence-transformers assumes of a model that does not say) or "dot".
        show_progress_bar: Whether to show progress bars on standard error.
        corpus_block: Documents encoded, scored and forgotten at a time.

    Raises:
        UserError: pytrec_eval is not installed, or the vectors are not numbers.
    """
    run = retrieval_run(
        encoder,
        task,
        batch_size,
        similarity=similarity,
        show_progress_bar=show_progress_bar,
        corpus_block=corpus_block,
    )
    return score_run(run, task)


def retrieval_run(
    encoder: Encoder,
    task: RetrievalTask,
    batch_size: int = 32,
    *,
    similarity: Literal["cosine", "dot"] | str = "cosine",
    show_progress_bar: bool = False,
    corpus_block: int = CORPUS_BLOCK,
) -> Run:
    """The hits that `evaluate_retrieval` scores; see there."""
    if similarity not in ("cosine", "dot"):
        raise ValueError(f'similarity must be "cosine" or "dot", not {similarity!r}')
    _require_pytrec_eval()  # before the long work, not after it
    normalize = similarity == "cosine"
    # In trec_eval equal scores rank by descending document id. In this order a lower position wins instead.
    documents = sorted(task.corpus, reverse=True)
    queries = list(task.queries.values())
    encoded = encoder.encode_query(queries, batch_size=batch_size, show_progress_bar=show_progress_bar)
    queries_QD = torch.from_numpy(as_vectors(encoded, len(queries), normalize=normalize))

    def blocks() -> "Iterator[Tensor]":
        for start in tqdm(
            range(0, len(documents), corpus_block),
            desc=f"{task.name}: corpus blocks",
            disable=not show_progress_bar or len(documents) <= corpus_block,
        ):
            texts = [task.corpus[id_] for id_ in documents[start : start + corpus_block]]
            encoded = encoder.encode_document(texts, batch_size=batch_size, show_progress_bar=show_progress_bar)
            yield torch.from_numpy(as_vectors(encoded, len(texts), normalize=normalize))

    starts = range(0, len(documents), corpus_block)
    hits = best_hits(
        ((start, queries_QD @ block_ND.T) for start, block_ND in zip(starts, blocks(), strict=True)), TOP_K
    )
    return _to_run(task, documents, hits)


def evaluate_bm25(task: RetrievalTask, *, show_progress_bar: bool = False) -> RetrievalScores:
    """The scores of BM25 (settings in `revela_hub.retrieval.bm25`) on a task.

    Raises:
        UserError: bm25s, PyStemmer or pytrec_eval is not installed.
    """
    return score_run(bm25_run(task, show_progress_bar=show_progress_bar), task)


def bm25_run(task: RetrievalTask, *, show_progress_bar: bool = False) -> Run:
    """The hits that `evaluate_bm25` scores; see there."""
    _require_pytrec_eval()
    documents = sorted(task.corpus, reverse=True)
    index = BM25([task.corpus[id_] for id_ in documents], show_progress_bar=show_progress_bar)
    rankings = index.search(list(task.queries.values()), TOP_K)
    return {
        query: {documents[row]: float(score) for row, score in zip(*ranking, strict=True)}
        for query, ranking in zip(task.queries, rankings, strict=True)
    }


def score_run(run: Run, task: RetrievalTask) -> RetrievalScores:
    """Scores hits against a task's judgements with trec_eval, a query without hits as 0.

    Args:
        run: Query id to its hits, document id to score (higher is better; equal scores rank by descending id). To
            score Recall@100 exactly it needs the best 100 hits of each query.
        task: Whose queries and judgements to use.
    """
    pytrec_eval = _require_pytrec_eval()
    evaluator = pytrec_eval.RelevanceEvaluator(task.qrels, {"ndcg_cut.10", "recip_rank", "recall.100"})
    found = evaluator.evaluate({query: hits for query, hits in run.items() if hits})

    def scores_of(query: str) -> dict[str, float]:
        if query not in found:  # trec_eval leaves out a query without hits, which would raise the mean
            return {"ndcg_at_10": 0.0, "mrr_at_10": 0.0, "recall_at_100": 0.0}
        scores = found[query]
        # trec_eval's reciprocal rank has no cut-off: below rank 10 it is 0 to us.
        mrr = scores["recip_rank"] if scores["recip_rank"] > 1 / 10.5 else 0.0
        return {"ndcg_at_10": scores["ndcg_cut_10"], "mrr_at_10": mrr, "recall_at_100": scores["recall_100"]}

    by_query = {query: scores_of(query) for query in task.queries}
    per_query = {metric: {query: by_query[query][metric] for query in by_query} for metric in METRICS}
    return RetrievalScores(
        name=task.name,
        **{metric: sum(scores.values()) / len(scores) for metric, scores in per_query.items()},
        queries=len(task.queries),
        documents=len(task.corpus),
        per_query=per_query,
    )


def _to_run(task: RetrievalTask, documents: list[str], hits: Hits) -> Run:
    def hits_of(scores: NDArray[np.float32], rows: NDArray[np.int64]) -> dict[str, float]:
        return {documents[row]: score for score, row in zip(scores.tolist(), rows.tolist(), strict=True)}

    scores_QK, rows_QK = hits
    return {
        query: hits_of(*pair) for query, pair in zip(task.queries, zip(scores_QK, rows_QK, strict=True), strict=True)
    }


def _require_pytrec_eval() -> Any:
    try:
        import pytrec_eval
    except ImportError as error:
        raise UserError("the scores need pytrec_eval: pip install 'revela-hub[eval]'") from error
    return pytrec_eval
