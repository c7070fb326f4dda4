"""Evaluating any ranker with nDCG@10, MRR@10 and Recall@100, computed by trec_eval (pytrec_eval).

The search is exact, and the vectors of the corpus are on disk, so memory does not grow with the corpus.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Any

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.retrieval.bm25 import BM25Settings
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.hits import Ranker
from revela_hub.retrieval.ranking import Own, RankerSettings, build_ranker, ranking_folder
from revela_hub.retrieval.rerank import PAIRS, RerankedRanker, Reranker
from revela_hub.retrieval.texts import TextList

TOP_K = 100
"""Hits per query that are scored, as needed for Recall@100."""

METRICS = ("ndcg_at_10", "mrr_at_10", "recall_at_100")

Rankings = dict[str, dict[str, float]]
"""Query id -> document id -> score, which trec_eval calls a run."""


@dataclass(frozen=True)
class RetrievalScores:
    """Mean scores over the queries of a task, between 0 and 1.

    Attributes:
        unanswered: Queries without any hit, which score 0: no document contains any of their terms.
        per_query: Metric ("ndcg_at_10", ...) to query id to score, for a paired test (`evaluation.significance`); not
            written to files.
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
        """Return a plain dictionary of the means, for JSON; `unanswered` is omitted if it is 0."""
        left_out = {"per_query"} | (set() if self.unanswered else {"unanswered"})
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}


def evaluate_retrieval(
    encoder: Encoder, task: RetrievalTask, batch_size: int = 32, *, show_progress_bar: bool = False
) -> RetrievalScores:
    """Encode the task's queries and documents, search exactly, and score the hits.

    Args:
        encoder: A SentenceTransformer, or any other `Encoder`; its `similarity_fn_name` is used.
        task: Corpus, queries and judgements.
        batch_size: Texts per forward pass.
        show_progress_bar: Whether to show progress bars on standard error.

    Raises:
        UserError: The vectors contain NaN or infinity, or the encoder compares them by a distance.
    """
    return score_run(retrieval_run(encoder, task, batch_size, show_progress_bar=show_progress_bar), task)


def retrieval_run(
    encoder: Encoder, task: RetrievalTask, batch_size: int = 32, *, show_progress_bar: bool = False
) -> Rankings:
    """Return the hits that `evaluate_retrieval` scores; same arguments."""
    return ranking_run(task, RankerSettings(batch_size=batch_size, show_progress_bar=show_progress_bar), dense=encoder)


def evaluate_bm25(
    task: RetrievalTask, settings: BM25Settings | None = None, *, show_progress_bar: bool = False
) -> RetrievalScores:
    """Score BM25 on a task."""
    return score_run(bm25_run(task, settings, show_progress_bar=show_progress_bar), task)


def bm25_run(task: RetrievalTask, settings: BM25Settings | None = None, *, show_progress_bar: bool = False) -> Rankings:
    """Return the hits that `evaluate_bm25` scores; same arguments."""
    bm25 = settings or BM25Settings()
    return ranking_run(task, RankerSettings(mode="bm25", bm25=bm25, show_progress_bar=show_progress_bar))


def evaluate_ranking(
    task: RetrievalTask,
    settings: RankerSettings,
    *,
    dense: Encoder | None = None,
    sparse: Any = None,
    cache_dir: str | Path | None = None,
) -> RetrievalScores:
    """Score any kind of ranker on a task.

    Args:
        task: Corpus, queries and judgements.
        settings: The kind of ranker.
        dense: The encoder, if the settings need one.
        sparse: The `SparseEncoder`, if the settings need one.
        cache_dir: A folder to keep vectors in, which requires the identities in the settings; None keeps nothing.

    Raises:
        UserError: A package is not installed, or the vectors contain NaN or infinity.
    """
    return score_run(ranking_run(task, settings, dense=dense, sparse=sparse, cache_dir=cache_dir), task)


def evaluate_reranking(
    task: RetrievalTask, settings: RankerSettings, reranker: Reranker | Own, **options: Any
) -> tuple[RetrievalScores, RetrievalScores]:
    """Return the scores of a ranker without and with a reranker of its best `settings.rerank_depth` results.

    The options are the other arguments of `evaluate_ranking`.
    """
    with _built(task, settings, reranker=reranker, **options) as ranker:
        assert isinstance(ranker, RerankedRanker)
        return score_run(run_of(ranker.ranker, task), task), score_run(run_of(ranker, task), task)


def rerank_run(run: Rankings, task: RetrievalTask, reranker: Reranker) -> Rankings:
    """Return a reranker's scores of all hits of a run."""
    # By document, not by query: a document has more tokens, and is encoded once.
    pairs = sorted((document, query) for query, hits in run.items() for document in hits)
    found: Rankings = {query: {} for query in run}
    for start in range(0, len(pairs), PAIRS):
        part = pairs[start : start + PAIRS]
        scores = reranker.scores([(task.queries[query], task.corpus[document]) for document, query in part])
        for (document, query), score in zip(part, scores.tolist(), strict=True):
            found[query][document] = score
    return found


def ranking_run(task: RetrievalTask, settings: RankerSettings, **options: Any) -> Rankings:
    """Return the hits that `evaluate_ranking` scores; the options are its other arguments."""
    with _built(task, settings, **options) as ranker:
        return run_of(ranker, task)


@contextlib.contextmanager
def _built(
    task: RetrievalTask, settings: RankerSettings, cache_dir: str | Path | None = None, **models: Any
) -> Iterator[Ranker]:
    """Yield a ranker of the documents; without a cache folder, its vectors are deleted afterwards."""
    _check_judgements(task)
    texts = TextList([task.corpus[id_] for id_ in documents_of(task)])
    with ranking_folder(cache_dir, settings) as (folder, settings):
        yield build_ranker(texts, settings, folder, **models)


def run_of(ranker: Ranker, task: RetrievalTask, depth: int = TOP_K) -> Rankings:
    """Return the best hits of each query.

    Args:
        ranker: A ranker of the documents in the order of `sorted(task.corpus, reverse=True)`, because trec_eval breaks ties
            by descending id, and rankers break them by ascending number.
        task: The queries.
        depth: Hits to keep per query.
    """
    hits = ranker.search(list(task.queries.values()), depth + 1)
    return rankings_of(hits.rows_QK.tolist(), hits.scores_QK.tolist(), task, depth)


def rankings_of(rows_QK: list[list[int]], scores_QK: list[list[float]], task: RetrievalTask, depth: int) -> Rankings:
    """Return the best hits of each query by id, of `depth + 1` hits by the numbers of their documents (-1: no hit).

    A document with the id of the query is removed unless it is judged relevant, as in BEIR: in some data sets (ArguAna,
    Quora) the queries are in the corpus and would retrieve themselves.
    """
    documents = documents_of(task)
    run: Rankings = {}
    for query, rows, scores in zip(task.queries, rows_QK, scores_QK, strict=True):
        own = query if task.qrels[query].get(query, 0) <= 0 else None
        found = [(documents[row], score) for row, score in zip(rows, scores, strict=True) if row >= 0]
        run[query] = dict([pair for pair in found if pair[0] != own][:depth])
    return run


def score_run(run: Rankings, task: RetrievalTask) -> RetrievalScores:
    """Score hits with trec_eval; a query without hits scores 0.

    Args:
        run: Query id to hits, document id to score (higher is better; ties rank by descending id), with the best 100 hits
            of each query.
        task: The queries and judgements.
    """
    import pytrec_eval

    _check_judgements(task)
    # Grades of numpy and pandas are no `int`, which pytrec_eval requires.
    qrels = {query: {id_: int(grade) for id_, grade in task.qrels[query].items()} for query in task.queries}
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "recip_rank", "recall.100"})
    found = evaluator.evaluate(
        {query: {document: float(score) for document, score in hits.items()} for query, hits in run.items() if hits}
    )
    per_query: dict[str, dict[str, float]] = {metric: {} for metric in METRICS}
    for query in task.queries:
        # trec_eval ignores queries without hits, which would raise the mean; its reciprocal rank has no cut-off.
        scores = found.get(query, {"ndcg_cut_10": 0.0, "recip_rank": 0.0, "recall_100": 0.0})
        mrr = scores["recip_rank"] if scores["recip_rank"] > 1 / 10.5 else 0.0
        for metric, score in zip(METRICS, (scores["ndcg_cut_10"], mrr, scores["recall_100"]), strict=True):
            per_query[metric][query] = score
    return RetrievalScores(
        name=task.name,
        **{metric: sum(scores.values()) / len(scores) for metric, scores in per_query.items()},
        queries=len(task.queries),
        documents=len(task.corpus),
        unanswered=sum(not run.get(query) for query in task.queries),
        per_query=per_query,
    )


def _check_judgements(task: RetrievalTask) -> None:
    """Reject a task without queries, a query without judgements, and grades that would be rounded."""
    if not task.queries:
        raise UserError(f"{task.name} has no queries")
    for query in task.queries:
        if query not in task.qrels or not all(isinstance(grade, Integral) for grade in task.qrels[query].values()):
            raise UserError(f"{task.name}: the query {query!r} needs judgements with whole numbers as grades")


def documents_of(task: RetrievalTask) -> list[str]:
    """Return the ids of the documents in the order of their numbers."""
    return sorted(task.corpus, reverse=True)
