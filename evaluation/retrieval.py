"""Evaluating any ranker with nDCG@k, MRR@k and Recall@k, computed by trec_eval (pytrec_eval), for any cut-offs k.

    nDCG@k    DCG@k / DCG@k of the best order, where DCG@k = sum over ranks r <= k of grade / log2(1 + r)
    MRR@k     1 / the rank of the first relevant document; 0 if it is above k
    Recall@k  relevant documents among the first k / all relevant documents

Documents with a grade above 0 are relevant. The search is exact, and the vectors of the corpus are on disk, so memory does not grow with
the corpus.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.errors import UserError
from revela_hub.files import local_path, write_text
from revela_hub.retrieval.bm25 import BM25Settings
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.hits import Ranker
from revela_hub.retrieval.ranking import Own, RankerSettings, build_ranker, ranking_folder
from revela_hub.retrieval.rerank import PAIRS, RerankedRanker, Reranker
from revela_hub.retrieval.texts import TextList

logger = logging.getLogger(__name__)

METRICS = ("ndcg_at_10", "mrr_at_10", "recall_at_100")
"""The metrics by default; `ndcg@10` is another spelling."""
TREC_NAMES = {"ndcg": "ndcg_cut", "mrr": "recip_rank", "recall": "recall"}
TOP_K = 100
"""Hits per query that these metrics need."""

Rankings = dict[str, dict[str, float]]
"""Query id -> document id -> score, which trec_eval calls a run."""


@dataclass(frozen=True)
class RetrievalScores:
    """Mean scores over the queries of a task, between 0 and 1.

    Attributes:
        metrics: Metric ("ndcg_at_10", ...) to its mean; each is also an attribute (`scores.ndcg_at_10`).
        unanswered: Queries without any hit, which score 0: no document contains any of their terms.
        per_query: Metric to query id to score, for a paired test (`evaluation.significance`); not written to files.
    """

    name: str
    metrics: Mapping[str, float]
    queries: int
    documents: int
    unanswered: int = 0
    per_query: Mapping[str, Mapping[str, float]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, name: str, per_query: Mapping[str, Mapping[str, float]], documents: int, unanswered: int = 0
    ) -> "RetrievalScores":
        """Return the means of scores by query."""
        means = {metric: sum(scores.values()) / len(scores) for metric, scores in per_query.items()}
        return cls(name, means, len(next(iter(per_query.values()))), documents, unanswered, per_query)

    def __getattr__(self, name: str) -> float:
        if name not in self.__dict__.get("metrics", ()):
            raise AttributeError(f"there is no score {name}")
        return self.metrics[name]

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary of the means, for JSON; `unanswered` is omitted if it is 0."""
        values = {"name": self.name, **self.metrics, "queries": self.queries, "documents": self.documents}
        return values | ({"unanswered": self.unanswered} if self.unanswered else {})


def cutoff(metric: str) -> tuple[str, int]:
    """Return the kind and the cut-off of a metric.

    >>> cutoff("ndcg@10"), cutoff("answer_recall_at_20")
    (('ndcg', 10), ('answer_recall', 20))
    """
    found = re.fullmatch(r"(ndcg|mrr|recall|answer_recall)(?:@|_at_)([1-9]\d*)", metric)
    if not found:
        raise UserError(f"the metric {metric!r} is not ndcg@K, mrr@K, recall@K or answer_recall@K")
    return found[1], int(found[2])


def depth_of(metrics: Sequence[str]) -> int:
    """Return the hits per query that metrics need."""
    return max(cutoff(metric)[1] for metric in metrics)


def evaluate_retrieval(
    encoder: Encoder,
    task: RetrievalTask,
    batch_size: int = 32,
    *,
    metrics: Sequence[str] = METRICS,
    show_progress_bar: bool = False,
) -> RetrievalScores:
    """Encode the task's queries and documents, search exactly, and score the hits.

    Args:
        encoder: A SentenceTransformer, or any other `Encoder`; its `similarity_fn_name` is used.
        task: Corpus, queries and judgements.
        batch_size: Texts per forward pass.
        metrics: Any of "ndcg@K", "mrr@K" and "recall@K"; the deepest one sets the number of hits per query.
        show_progress_bar: Whether to show progress bars on standard error.

    Raises:
        UserError: The vectors contain NaN or infinity, or the encoder compares them by a distance.
    """
    settings = RankerSettings(batch_size=batch_size, show_progress_bar=show_progress_bar)
    return evaluate_ranking(task, settings, dense=encoder, metrics=metrics)


def retrieval_run(encoder: Encoder, task: RetrievalTask, show_progress_bar: bool = False) -> Rankings:
    """Return the best 100 hits of each query, which `evaluate_retrieval` scores."""
    return ranking_run(task, RankerSettings(show_progress_bar=show_progress_bar), dense=encoder)


def evaluate_bm25(
    task: RetrievalTask, settings: BM25Settings | None = None, *, metrics: Sequence[str] = METRICS
) -> RetrievalScores:
    """Score BM25 on a task."""
    return evaluate_ranking(task, RankerSettings(mode="bm25", bm25=settings or BM25Settings()), metrics=metrics)


def bm25_run(task: RetrievalTask, settings: BM25Settings | None = None) -> Rankings:
    """Return the best 100 hits of each query, which `evaluate_bm25` scores."""
    return ranking_run(task, RankerSettings(mode="bm25", bm25=settings or BM25Settings()))


def evaluate_ranking(
    task: RetrievalTask, settings: RankerSettings, *, metrics: Sequence[str] = METRICS, **options: Any
) -> RetrievalScores:
    """Score any kind of ranker on a task with the metrics of `evaluate_retrieval`.

    Args:
        task: Corpus, queries and judgements.
        settings: The kind of ranker.
        metrics: As for `evaluate_retrieval`.
        **options: The models `dense` and `sparse` if the settings need them, and other options of `ranking_runs`.
    """
    return score_run(ranking_run(task, settings, depth_of(metrics), **options), task, metrics)


def rerank_run(run: Rankings, task: RetrievalTask, reranker: Reranker, show_progress_bar: bool = False) -> Rankings:
    """Return a reranker's scores of all hits of a run."""
    # By document, not by query: a document has more tokens, and is encoded once.
    pairs = sorted((document, query) for query, hits in run.items() for document in hits)
    found: Rankings = {query: {} for query in run}
    for start in range(0, len(pairs), PAIRS):
        part = pairs[start : start + PAIRS]
        texts = [(task.queries[query], task.corpus[document]) for document, query in part]
        for (document, query), score in zip(part, reranker.scores(texts, show_progress_bar).tolist(), strict=True):
            found[query][document] = score
    return found


def ranking_run(task: RetrievalTask, settings: RankerSettings, depth: int = TOP_K, **options: Any) -> Rankings:
    """Return the best `depth` hits of each query, after reranking if there is a reranker."""
    return ranking_runs(task, settings, depth, **options)[-1]


def ranking_runs(
    task: RetrievalTask,
    settings: RankerSettings,
    depth: int = TOP_K,
    *,
    cache_dir: str | Path | None = None,
    reranker: Reranker | Own | None = None,
    **models: Any,
) -> list[Rankings]:
    """Return the hits of a ranker, and with a reranker also those after reranking the best `settings.rerank_depth`.

    The models are `dense` and `sparse`. Without a cache folder, the vectors are deleted afterwards.
    """
    _check_judgements(task)
    texts = TextList([task.corpus[id_] for id_ in documents_of(task)])
    with ranking_folder(cache_dir, settings) as (folder, settings):
        ranker = build_ranker(texts, settings, folder, reranker=reranker, **models)
        rankers = [ranker.ranker, ranker] if isinstance(ranker, RerankedRanker) else [ranker]
        return [run_of(each, task, depth) for each in rankers]


def run_of(ranker: Ranker, task: RetrievalTask, depth: int = TOP_K) -> Rankings:
    """Return the best hits of each query, without a document with the id of the query unless it is judged relevant.

    Args:
        ranker: A ranker of the documents in the order of `sorted(task.corpus, reverse=True)`, because trec_eval breaks ties
            by descending id, and rankers break them by ascending number.
        task: The queries.
        depth: Hits to keep per query.
    """
    hits, documents = ranker.search(list(task.queries.values()), depth + 1), documents_of(task)
    run: Rankings = {}
    for query, rows, scores in zip(task.queries, hits.rows_QK.tolist(), hits.scores_QK.tolist(), strict=True):
        # As in BEIR: in some data sets (ArguAna, Quora) the queries are in the corpus and would retrieve themselves.
        own = query if task.qrels[query].get(query, 0) <= 0 else None
        found = [(documents[row], score) for row, score in zip(rows, scores, strict=True) if row >= 0]
        run[query] = dict([pair for pair in found if pair[0] != own][:depth])
    return run


def score_run(run: Rankings, task: RetrievalTask, metrics: Sequence[str] = METRICS) -> RetrievalScores:
    """Score hits with trec_eval; a query without hits scores 0.

    Args:
        run: Query id to hits, document id to score (higher is better; ties rank by descending id), with as many hits of each
            query as the metrics need.
        task: The queries and judgements.
        metrics: As for `evaluate_retrieval`.
    """
    import pytrec_eval

    _check_judgements(task)
    # Grades of numpy and pandas are no `int`, which pytrec_eval requires.
    qrels = {query: {id_: int(grade) for id_, grade in task.qrels[query].items()} for query in task.queries}
    wanted = [(kind, k, TREC_NAMES[kind]) for kind, k in map(cutoff, metrics)]
    evaluator = pytrec_eval.RelevanceEvaluator(
        qrels, {name if kind == "mrr" else f"{name}.{k}" for kind, k, name in wanted}
    )
    found = evaluator.evaluate(
        {query: {document: float(score) for document, score in hits.items()} for query, hits in run.items() if hits}
    )
    per_query: dict[str, dict[str, float]] = {}
    for kind, k, name in wanted:
        # trec_eval's reciprocal rank has no cut-off, and it ignores queries without hits, which would raise the mean.
        key, least = (name, 1 / (k + 0.5)) if kind == "mrr" else (f"{name}_{k}", 0.0)
        scores = {query: found.get(query, {}).get(key, 0.0) for query in task.queries}
        per_query[f"{kind}_at_{k}"] = {query: score if score > least else 0.0 for query, score in scores.items()}
    unanswered = sum(not run.get(query) for query in task.queries)
    return RetrievalScores.of(task.name, per_query, len(task.corpus), unanswered)


def write_run(run: Rankings, file: str | Path, tag: str) -> None:
    """Write hits in the format of TREC, `query Q0 document rank score tag`, in the order in which trec_eval ranks them."""
    tag = "_".join(tag.split())
    lines = []
    for query, hits in run.items():
        ranked = sorted(hits.items(), key=lambda hit: (hit[1], hit[0]), reverse=True)
        lines += [f"{query} Q0 {document} {rank} {score!r} {tag}\n" for rank, (document, score) in enumerate(ranked, 1)]
    if spaced := next((line for line in lines if len(line.split()) != 6), None):
        raise UserError(f"the format of TREC has no ids that are empty or contain spaces: {spaced.strip()}")
    write_text(local_path(file), "".join(lines))


def read_run(file: str | Path, task: RetrievalTask, depth: int) -> Rankings:
    """Read the hits of a task's queries that `write_run` or another program wrote, with a warning if they are less deep than `depth`.

    As in `run_of`, a document with the id of the query is left out unless it is judged relevant.
    """
    run: Rankings = {query: {} for query in task.queries}
    with local_path(file).open(encoding="utf-8") as lines:
        for line in lines:
            query, _, document, _, score, _ = line.split()
            if document not in task.corpus:
                raise UserError(f"{file} is not a ranking of {task.name}, which has no document {document}")
            if query in run and (query != document or task.qrels[query].get(query, 0) > 0):
                run[query][document] = float(score)
    if not (deepest := max(map(len, run.values()))):
        raise UserError(f"{file} is not a ranking of {task.name}: it has none of its queries")
    if deepest < min(depth, len(task.corpus)):
        logger.warning("%s has at most %d hits per query, fewer than the metrics' cut-off %d", file, deepest, depth)
    return run


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
