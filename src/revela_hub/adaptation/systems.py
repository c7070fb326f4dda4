"""Systems that `adapt` compares: a retriever combined with BM25 and late interaction, scored on the two halves of a probe.

The dev half fits the weights and selects a system. The test half is scored once, at the end. Queries with a common document
are in the same half.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from revela_hub.adaptation.labels import connected
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.hybrid_weight import fuse_runs
from revela_hub.evaluation.probe import MIN_QUERIES, Probe
from revela_hub.evaluation.retrieval import Rankings, score_run
from revela_hub.evaluation.significance import PairedDifference, compare_queries
from revela_hub.retrieval.bm25 import BM25Settings
from revela_hub.retrieval.rerank import OWN_DEPTH

METRIC = "ndcg_at_10"
Scores = Mapping[str, float]
"""nDCG@10 by query."""


@dataclass(frozen=True)
class System:
    """A retriever, BM25, and the weight of BM25 in their hybrid; the best results may be reranked by the retriever's token vectors.

    Attributes:
        name: name in tables.
        folder: sentence-transformers folder or Hub id.
        dense: hits of the retriever for the queries of both halves.
        bm25: hits of BM25 for the same queries.
        weight: weight of BM25, fitted on the dev half.
        seconds: duration of the training.
        settings: settings of BM25.
        tokens: scores of the hybrid's best results by the retriever's token vectors (late interaction).
        token_weight: weight of these scores, fitted on the dev half; 0 without late interaction.
    """

    name: str
    folder: str
    dense: Rankings
    bm25: Rankings
    weight: float
    seconds: float = 0.0
    settings: BM25Settings = field(default_factory=BM25Settings)
    tokens: Rankings = field(default_factory=dict)
    token_weight: float = 0.0
    _scored: list[tuple[RetrievalTask, float | None, Scores]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def scores(self, task: RetrievalTask, weight: float | None = None) -> Scores:
        """Return nDCG@10 by query: as fitted, or with this weight of BM25 and without late interaction."""
        for scored, with_weight, scores in self._scored:
            if scored is task and with_weight == weight:
                return scores
        scores = self._score(task, weight)
        self._scored.append((task, weight, scores))
        return scores

    def _score(self, task: RetrievalTask, weight: float | None) -> Scores:
        run = hybrid_run(self.dense, self.bm25, task, self.weight if weight is None else weight)
        if weight is None and self.token_weight:
            run = fuse_runs(best_of(run), self.tokens, task, self.token_weight)
        return score_run(run, task).per_query[METRIC]

    def mean(self, task: RetrievalTask, weight: float | None = None) -> float:
        """Return the mean of `scores`."""
        return float(np.mean(list(self.scores(task, weight).values())))


def hybrid_run(dense: Rankings, bm25: Rankings, task: RetrievalTask, weight: float) -> Rankings:
    """Return the hits of (1 - weight) * dense + weight * bm25, best first."""
    if weight in (0, 1):
        one = bm25 if weight else dense
        return {query: one.get(query, {}) for query in task.queries}
    return fuse_runs(dense, bm25, task, weight)


def best_of(run: Rankings) -> Rankings:
    """Return the hits of each query that late interaction reranks."""
    return {query: dict(list(hits.items())[:OWN_DEPTH]) for query, hits in run.items()}


def compare(base: System, other: System, task: RetrievalTask) -> PairedDifference:
    """Compare two systems on the queries of a task, with a paired bootstrap."""
    return compare_queries(base.scores(task), other.scores(task))


def select(untrained: System, trained: Sequence[System], dev: RetrievalTask) -> System:
    """Return the system with the best mean on the dev half.

    A trained retriever must beat the untrained system by more than one standard error; or be as good combined, and better by more than
    one standard error alone.
    """
    best = best_on(dev, trained or [untrained])
    (combined, error), (alone, error_alone) = (_gain(untrained, best, dev, weight) for weight in (None, 0.0))
    return best if combined > error or (combined >= 0 and alone > error_alone) else untrained


def best_on(dev: RetrievalTask, systems: Sequence[System]) -> System:
    """Return the system with the best mean on the dev half, the first of equal ones."""
    return max(systems, key=lambda system: round(system.mean(dev), 9))


def _gain(before: System, after: System, dev: RetrievalTask, weight: float | None) -> tuple[float, float]:
    """Return the mean gain and its standard error, rounded: if only one query changes, they are equal."""
    a, b = before.scores(dev, weight), after.scores(dev, weight)
    gain = np.array([b[query] - a[query] for query in sorted(a)])
    return round(float(gain.mean()), 9), round(float(gain.std(ddof=1)) / len(gain) ** 0.5, 9)


def split_by_document(
    probe: Probe, log: Callable[[str], None] = lambda line: None
) -> tuple[RetrievalTask, RetrievalTask]:
    """Split a probe's queries into a dev and a test task of about equal size.

    Queries that are connected by common documents are in the same half. If most queries are, only those with the same first document
    are; if these are most queries, they are split one by one. `log` is called with the reason.
    """
    documents = {
        query: [probe.documents_of.get(passage, passage) for passage in sorted(probe.task.qrels[query])]
        for query in probe.task.queries
    }
    same_first = {query: names[0] for query, names in documents.items()}
    separate = halves = _balanced(connected(documents))
    for groups in (same_first, {query: query for query in documents}):
        if min(map(len, halves)) < len(documents) // 3:
            halves = _balanced(groups)
    if halves is not separate:
        log("most queries share documents: some documents have queries in both the dev and the test half")
    task, of_dev = probe.task, set(halves[0])
    return task.subset(q for q in task.queries if q in of_dev), task.subset(q for q in task.queries if q not in of_dev)


def _balanced(group_of: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Split queries into halves of about equal size, with each group in one half."""
    members: dict[str, list[str]] = {}
    for query, group in group_of.items():
        members.setdefault(group, []).append(query)
    halves: tuple[list[str], list[str]] = ([], [])

    def order(group: str) -> tuple[int, bytes]:
        return -len(members[group]), hashlib.sha256(group.encode()).digest()

    for group in sorted(members, key=order):  # the largest first: this balances the halves
        min(halves, key=len).extend(members[group])
    return halves


def measured_in_training(dev: RetrievalTask) -> RetrievalTask:
    """Return half of the dev queries (few: all) with a quarter of the passages, or the relevant ones if they are more.

    Runs measure on it often.
    """
    some = dev.subset(list(dev.queries)[:: 2 if len(dev.queries) >= 2 * MIN_QUERIES else 1])
    kept = {passage for gold in some.qrels.values() for passage in gold}
    others = [passage for passage in dev.corpus if passage not in kept]
    kept |= set(others[: max(0, len(dev.corpus) // 4 - len(kept))])
    return replace(some, corpus={passage: text for passage, text in dev.corpus.items() if passage in kept})
