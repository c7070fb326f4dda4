"""Retrieval quality of whatever ranks: nDCG@10, MRR@10 and Recall@100, computed by trec_eval (pytrec_eval).

The search is exact and the corpus' vectors are on disk, so that memory does not grow with the corpus.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError, install_hint
from revela_hub.retrieval.bm25 import BM25Settings
from revela_hub.retrieval.disk import claim_folder
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.ranker import Ranker
from revela_hub.retrieval.ranking import RankerSettings, build_ranker
from revela_hub.retrieval.texts import TextList

TOP_K = 100
"""How many hits per query the scores look at: Recall@100 needs no more."""

METRICS = ("ndcg_at_10", "mrr_at_10", "recall_at_100")

Rankings = dict[str, dict[str, float]]
"""Query id -> document id -> score, which trec_eval calls a run."""


@dataclass(frozen=True)
class RetrievalScores:
    """The means over the queries of a task; each score is between 0 and 1.

    Attributes:
        unanswered: Queries without a single hit, which score 0: none of their terms is in any document.
        per_query: Metric ("ndcg_at_10", ...) to query id to score, for a paired test (`evaluation.significance`); not
            part of the record that is written to files.
    """

    name: str
    ndcg_at_10: float
    mrr_at_10: float
    recall_at_100: float
    queries: int
    documents: int
    unanswered: int = 0
    per_query: Mapping[str, Mapping[str, float]] = field(default_factory=dict, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary of the means, for JSON; `unanswered` only where there are such queries."""
        left_out = {"per_query"} | (set() if self.unanswered else {"unanswered"})
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}


def evaluate_retrieval(
    encoder: Encoder,
    task: RetrievalTask,
    batch_size: int = 32,
    *,
    similarity: Literal["cosine", "dot"] | str | None = None,
    show_progress_bar: bool = False,
) -> RetrievalScores:
    """Encodes the task's queries and documents, searches exactly, and scores the result.

    Args:
        encoder: A SentenceTransformer, or anything like `Encoder`.
        task: What to search, and what should be found.
        batch_size: Texts per forward pass.
        similarity: "cosine" or "dot"; None: the encoder's own (`retrieval.encoder.similarity_of`).
        show_progress_bar: Whether to show progress bars on standard error.

    Raises:
        UserError: The vectors are not numbers, or the encoder compares them by a distance.
    """
    run = retrieval_run(encoder, task, batch_size, similarity=similarity, show_progress_bar=show_progress_bar)
    return score_run(run, task)


def retrieval_run(
    encoder: Encoder,
    task: RetrievalTask,
    batch_size: int = 32,
    *,
    similarity: Literal["cosine", "dot"] | str | None = None,
    show_progress_bar: bool = False,
) -> Rankings:
    """The hits that `evaluate_retrieval` scores; see there."""
    settings = RankerSettings(similarity=similarity, batch_size=batch_size, show_progress_bar=show_progress_bar)
    return ranking_run(task, settings, dense=encoder)


def evaluate_bm25(
    task: RetrievalTask, settings: BM25Settings | None = None, *, show_progress_bar: bool = False
) -> RetrievalScores:
    """The scores of BM25 on a task.

    Raises:
        UserError: bm25s, PyStemmer or pytrec_eval is not installed.
    """
    return score_run(bm25_run(task, settings, show_progress_bar=show_progress_bar), task)


def bm25_run(task: RetrievalTask, settings: BM25Settings | None = None, *, show_progress_bar: bool = False) -> Rankings:
    """The hits that `evaluate_bm25` scores; see there."""
    bm25 = settings or BM25Settings()
    return ranking_run(task, RankerSettings(mode="bm25", bm25=bm25, show_progress_bar=show_progress_bar))


def evaluate_hybrid(
    encoder: Encoder,
    task: RetrievalTask,
    batch_size: int = 32,
    *,
    fusion: str = "minmax",
    weights: tuple[float, float] | None = None,
    similarity: Literal["cosine", "dot"] | str | None = None,
    show_progress_bar: bool = False,
) -> RetrievalScores:
    """The scores of an encoder together with BM25.

    Args:
        encoder: As for `evaluate_retrieval`.
        task: As for `evaluate_retrieval`.
        batch_size: Texts per forward pass.
        fusion: "minmax", "sum" or "rrf" (`revela_hub.retrieval.hybrid`).
        weights: The encoder's and BM25's; None: both the same.
        similarity: As for `evaluate_retrieval`.
        show_progress_bar: Whether to show progress bars on standard error.
    """
    settings = RankerSettings(
        mode="hybrid",
        fusion=fusion,
        weights=weights,
        similarity=similarity,
        batch_size=batch_size,
        show_progress_bar=show_progress_bar,
    )
    return evaluate_ranking(task, settings, dense=encoder)


def evaluate_ranking(
    task: RetrievalTask,
    settings: RankerSettings,
    *,
    dense: Encoder | None = None,
    sparse: Any = None,
    cache_dir: str | Path | None = None,
) -> RetrievalScores:
    """The scores of any kind of ranker on a task.

    Args:
        task: What to search, and what should be found.
        settings: What ranks.
        dense: The encoder, where the settings need one.
        sparse: The `SparseEncoder`, where the settings need one.
        cache_dir: Where vectors are kept for the next time, which needs the settings' identities; None keeps nothing.

    Raises:
        UserError: A package is not installed, or the vectors are not numbers.
    """
    return score_run(ranking_run(task, settings, dense=dense, sparse=sparse, cache_dir=cache_dir), task)


def ranking_run(
    task: RetrievalTask,
    settings: RankerSettings,
    *,
    dense: Encoder | None = None,
    sparse: Any = None,
    cache_dir: str | Path | None = None,
) -> Rankings:
    """The hits that `evaluate_ranking` scores; see there."""
    _require_pytrec_eval()  # before the long work, not after it
    texts = TextList([task.corpus[id_] for id_ in _documents(task)])
    with contextlib.ExitStack() as stack:
        if cache_dir is None:
            cache_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="revela-hub-evaluation-"))
            only = "the only one in this folder"
            settings = replace(settings, identity=only, sparse_identity=only)
        folder = claim_folder(Path(cache_dir).expanduser())
        ranker = build_ranker(texts, settings, folder, dense=dense, sparse=sparse)
        return run_of(ranker, task)


def run_of(ranker: Ranker, task: RetrievalTask, depth: int = TOP_K) -> Rankings:
    """The best hits of each query.

    Where a query stands in the corpus under its own id, it would find itself first (ArguAna, Quora): as BEIR does it, a
    document with the query's id is left out, unless it is judged to be an answer.

    Args:
        ranker: Ranks the documents in the order of `sorted(task.corpus, reverse=True)`: trec_eval ranks equal scores by
            descending id, and a ranker by ascending number.
        task: The queries.
        depth: How many hits to keep of each.
    """
    documents = _documents(task)
    hits = ranker.search(ranker.encode(list(task.queries.values())), depth + 1)

    def kept() -> Iterator[tuple[str, dict[str, float]]]:
        for query, rows, scores in zip(task.queries, hits.rows_QK.tolist(), hits.scores_QK.tolist(), strict=True):
            own = query if task.qrels[query].get(query, 0) <= 0 else None
            found = [(documents[row], score) for row, score in zip(rows, scores, strict=True) if row >= 0]
            yield query, dict([pair for pair in found if pair[0] != own][:depth])

    return dict(kept())


def score_run(run: Rankings, task: RetrievalTask) -> RetrievalScores:
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
            return dict.fromkeys(METRICS, 0.0)
        scores = found[query]
        # trec_eval's reciprocal rank has no cut-off: below rank 10 it is 0 to us.
        mrr = scores["recip_rank"] if scores["recip_rank"] > 1 / 10.5 else 0.0
        return {"ndcg_at_10": scores["ndcg_cut_10"], "mrr_at_10": mrr, "recall_at_100": scores["recall_100"]}

    by_query = {query: scores_of(query) for query in task.queries}
    per_query = {metric: {query: scores[metric] for query, scores in by_query.items()} for metric in METRICS}
    return RetrievalScores(
        name=task.name,
        **{metric: sum(scores.values()) / len(scores) for metric, scores in per_query.items()},
        queries=len(task.queries),
        documents=len(task.corpus),
        unanswered=sum(not run.get(query) for query in task.queries),
        per_query=per_query,
    )


def _documents(task: RetrievalTask) -> list[str]:
    return sorted(task.corpus, reverse=True)


def _require_pytrec_eval() -> Any:
    try:
        import pytrec_eval
    except ImportError as error:
        raise UserError(install_hint("pytrec_eval")) from error
    return pytrec_eval
