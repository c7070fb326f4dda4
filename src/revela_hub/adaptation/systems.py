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

Scores = Mapping[str, float]
"""nDCG@10 by query."""


@dataclass(frozen=True)
class System:
    """A retriever (a folder or a Hub id) and BM25; their hybrid's best results may be reranked by the retriever's token vectors.

    `dense` and `bm25` are the hits for the queries of both halves, `tokens` the scores of late interaction. The weights are fitted on
    the dev half: that of the retriever is 1 - `bm25_weight`, and `token_weight` is 0 without late interaction. `seconds` is the
    duration of the training; None for the base retriever.
    """

    name: str
    folder: str
    dense: Rankings
    bm25: Rankings
    bm25_weight: float
    bm25_settings: BM25Settings = field(default_factory=BM25Settings)
    tokens: Rankings = field(default_factory=dict)
    token_weight: float = 0.0
    seconds: float | None = None
    _scored: dict[tuple[int, float | None], tuple[RetrievalTask, Scores]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def trained(self) -> bool:
        """Whether this is not the base retriever."""
        return self.seconds is not None

    def scores(self, task: RetrievalTask, bm25_weight: float | None = None) -> Scores:
        """Return nDCG@10 by query: as fitted, or with this weight of BM25 and without late interaction."""
        key = id(task), bm25_weight
        if key not in self._scored:
            run = fuse_runs(self.dense, self.bm25, task, self.bm25_weight if bm25_weight is None else bm25_weight)
            if bm25_weight is None and self.token_weight:
                run = fuse_runs(best_of(run), self.tokens, task, self.token_weight)
            # With the task, whose id stays its own.
            self._scored[key] = (task, score_run(run, task).per_query["ndcg_at_10"])
        return self._scored[key][1]

    def mean(self, task: RetrievalTask, bm25_weight: float | None = None) -> float:
        """Return the mean of `scores`."""
        return float(np.mean(list(self.scores(task, bm25_weight).values())))


def best_of(run: Rankings) -> Rankings:
    """Return the hits of each query that late interaction reranks."""
    return {query: dict(list(hits.items())[:OWN_DEPTH]) for query, hits in run.items()}


def compare(base: System, other: System, task: RetrievalTask) -> PairedDifference:
    """Compare two systems on the queries of a task, with a paired bootstrap over their documents."""
    return compare_queries(base.scores(task), other.scores(task), task.groups)


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


def _gain(before: System, after: System, dev: RetrievalTask, bm25_weight: float | None) -> tuple[float, float]:
    """Return the mean gain and its standard error, rounded: if only one query changes, they are equal."""
    a, b = before.scores(dev, bm25_weight), after.scores(dev, bm25_weight)
    gain = np.array([b[query] - a[query] for query in sorted(a)])
    return round(float(gain.mean()), 9), round(float(gain.std(ddof=1)) / len(gain) ** 0.5, 9)


def split_by_document(probe: Probe, log: Callable[[str], None]) -> tuple[RetrievalTask, RetrievalTask]:
    """Split a probe's queries into a dev and a test task of about equal size.

    Queries that are connected by common documents are in the same half. If most queries are, only those with the same first document
    are; if these are most queries, they are split one by one. `log` is called with the reason.
    """
    task = probe.task
    documents = {
        query: [probe.documents_of.get(passage, passage) for passage in sorted(task.qrels[query])]
        for query in task.queries
    }
    first = {query: names[0] for query, names in documents.items()}
    for groups in (connected(documents), first, {query: query for query in documents}):
        halves = _balanced(groups)
        if min(map(len, halves)) >= len(documents) // 3:
            break
    if groups != connected(documents):
        log("most queries share documents: some documents have queries in both the dev and the test half")
    task = replace(task, groups=groups)
    dev, test = (task.subset([query for query in task.queries if query in half]) for half in halves)
    return dev, test


def _balanced(group_of: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """Split queries into halves of about equal size, with each group in one half."""
    members: dict[str, list[str]] = {}
    for query, group in group_of.items():
        members.setdefault(group, []).append(query)
    halves: tuple[set[str], set[str]] = (set(), set())
    # The largest group first: this balances the halves.
    for group in sorted(members, key=lambda group: (-len(members[group]), hashlib.sha256(group.encode()).digest())):
        min(halves, key=len).update(members[group])
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
