"""Drift between two texts: does new text need a new index, or a retriever trained again?

Three measurements, each of which compares the new text with the old one:

    quality   nDCG@10 of the retriever and of BM25 on a probe of each text, with the same number of passages and the same mix of queries
    words     fraction of words that one half of the old text does not contain: in its other half, and in the new text
    vectors   energy distance of the passages' vectors (Szekely and Rizzo 2013), with its distribution if documents are exchanged at random
              (of long documents: sections)

RE-TRAIN: the retriever is worse on the new text, and lost more than BM25, so the text is not merely harder.
RE-INDEX: words or vectors changed, but quality did not. Statistics of BM25 and the cells of an approximate index are those of the old text.
NO DRIFT: neither.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import SourceLike
from revela_hub.data.text.words import words
from revela_hub.errors import UserError
from revela_hub.evaluation.probe import MIN_QUERIES, NoProbe, Probe, ProbeSettings, build_probe, kind_of
from revela_hub.evaluation.retrieval import bm25_run, score_run
from revela_hub.retrieval.encoder import Encoder, as_vectors, similarity_of
from revela_hub.retrieval.encoding import encode_texts

SAMPLES, PERMUTATIONS = 10_000, 999
MIN_DISTANCE_EXCESS = 0.02
"""Smallest excess of the energy distance over the largest by chance (97.5%) that counts as a change."""
MIN_UNSEEN_INCREASE = 0.02
"""Smallest increase in the fraction of unseen words that counts as a change."""
SECTIONS = 8
"""A document that has more than an eighth of its text's passages is exchanged in sections of that size."""


@dataclass(frozen=True)
class Change:
    """A difference of means, with a 95% interval (bootstrap over the queries of both probes)."""

    old: float
    new: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """New minus old."""
        return self.new - self.old

    def __str__(self) -> str:
        """`0.812  0.780   -0.032 [-0.071, +0.008]`."""
        return f"{self.old:6.3f}  {self.new:6.3f}   {self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True)
class Drift:
    """Comparison of two texts.

    Attributes:
        passages: passages of each text that were compared.
        queries: queries of each probe.
        retriever: nDCG@10 of the retriever.
        bm25: nDCG@10 of BM25.
        beyond_bm25: the retriever's difference minus that of BM25.
        unseen: fraction of words that one half of the old text does not contain: in its other half, and in the new text.
        distance: energy distance of the vectors, as a fraction of the mean distance between old and new passages.
        by_chance: 95% interval of that distance if documents (long ones: their sections) are exchanged at random.
        p_value: of the permutation test.
        remarks: what was skipped or replaced in each text.
    """

    passages: int
    queries: int
    retriever: Change
    bm25: Change
    beyond_bm25: Change
    unseen: tuple[float, float]
    distance: float
    by_chance: tuple[float, float]
    p_value: float
    remarks: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """`RE-TRAIN`, `RE-INDEX` or `NO DRIFT`, with the reason."""
        worse = self.retriever.high < 0
        if worse and self.beyond_bm25.high < 0:
            return (
                f"RE-TRAIN: nDCG@10 is {-self.retriever.difference:.3f} lower on the new text, "
                f"{-self.beyond_bm25.difference:.3f} more than for BM25"
            )
        before, now = self.unseen
        reasons = []
        if now - before >= MIN_UNSEEN_INCREASE:
            reasons.append(f"{now:.1%} of its words are unseen ({before:.1%} between halves of the old text)")
        if self.distance - self.by_chance[1] >= MIN_DISTANCE_EXCESS:
            most = self.by_chance[1]
            reasons.append(f"its vectors moved (energy distance {self.distance:.3f}, by chance at most {most:.3f})")
        harder = "quality fell, but as much for BM25" if worse else "quality did not fall significantly"
        if reasons:
            return f"RE-INDEX: {' and '.join(reasons)}; {harder}"
        return f"NO DRIFT: words and vectors are as similar as parts of the old text; {harder}"

    def __str__(self) -> str:
        """The table, and the answer in the last line."""
        rows = [
            f"{self.queries} queries and {self.passages:,} passages of each text",
            f"{'':<24}   old     new   difference",
            f"{'nDCG@10, retriever':<24}{self.retriever}",
            f"{'nDCG@10, BM25':<24}{self.bm25}",
            f"{'unseen words':<24}{self.unseen[0]:6.1%}  {self.unseen[1]:6.1%}   not in the first half of the old text",
            f"{'energy distance':<24}{self.distance:14.3f}   by chance {self.by_chance[0]:.3f} to {self.by_chance[1]:.3f}, p = {self.p_value:.3f}",
        ]
        return "\n".join([*rows, self.answer])


def compare_texts(
    old: Sequence[SourceLike] | SourceLike,
    new: Sequence[SourceLike] | SourceLike,
    encoder: Encoder,
    settings: ProbeSettings | None = None,
    *,
    batch_size: int = 32,
    **defaults: Any,
) -> Drift:
    """Compare two texts.

    Args:
        old: Sources of the text that the retriever was trained for, or that is indexed.
        new: Sources of the new text.
        encoder: The retriever.
        settings: Settings of the probes.
        batch_size: Texts per forward pass.
        **defaults: Default values for fields of `Source`.
    """
    settings = settings or ProbeSettings()
    reports: dict[str, ReadReport] = {}
    probes = _probes({"old": old, "new": new}, settings, defaults, reports)
    tasks = _same_mix(probes)
    cosine = similarity_of(encoder) == "cosine"
    vectors = [_encode(encoder, task, batch_size, cosine=cosine) for task in tasks]
    tables = []  # the scores of the retriever and of BM25, (Q, 2)
    for task, (queries, passages) in zip(tasks, vectors, strict=True):
        dense = _ndcg(task, queries @ passages.T)
        bm25 = score_run(bm25_run(task), task).per_query["ndcg_at_10"]
        tables.append(np.array([[dense[query], bm25[query]] for query in task.queries]))
    random = np.random.default_rng(settings.seed)
    distance, chance, p_value = _energy(
        [as_vectors(passages, len(passages), normalize=True) for _, passages in vectors],
        [[probe.documents_of.get(id_, id_) for id_ in task.corpus] for probe, task in zip(probes, tasks, strict=True)],
        random,
    )
    return Drift(
        len(tasks[0].corpus),
        len(tasks[0].queries),
        _change(tables, np.array([1, 0]), random),
        _change(tables, np.array([0, 1]), random),
        _change(tables, np.array([1, -1]), random),
        _unseen(*(list(task.corpus.values()) for task in tasks)),
        distance,
        chance,
        p_value,
        tuple(f"{name} text: {remark}" for name, report in reports.items() for remark in report.remarks()),
    )


def _probes(
    texts: Mapping[str, Any], settings: ProbeSettings, defaults: Mapping[str, Any], reports: dict[str, ReadReport]
) -> list[Probe]:
    """Return a probe of each text, with the same number of passages; `reports` gets a report of each."""

    def build(name: str, settings: ProbeSettings) -> Probe:
        reports[name] = ReadReport()  # not twice if the text is read again
        try:
            return build_probe(texts[name], settings, report=reports[name], **defaults)
        except NoProbe as error:
            raise UserError(f"the {name} text is too short to compare: {error}") from error

    probes = {name: build(name, settings) for name in texts}
    fewest = min(len(probe.task.corpus) for probe in probes.values())
    smaller = replace(settings, passages=max(fewest, 2 * MIN_QUERIES))
    return [build(name, smaller) if len(probe.task.corpus) > fewest else probe for name, probe in probes.items()]


def _same_mix(probes: Sequence[Probe]) -> list[RetrievalTask]:
    """Return the tasks with as many queries of each kind as both probes have."""
    number = probes[0].kinds & probes[1].kinds
    if number.total() < MIN_QUERIES:
        found = " and ".join(", ".join(f"{n} {kind}" for kind, n in probe.kinds.items()) for probe in probes)
        raise UserError(
            f"the texts have too few queries of the same kind to compare them ({found}): compare texts of one type"
        )
    tasks = []
    for probe in probes:
        left, kept = Counter(number), []
        for query in probe.task.queries:
            if left[kind_of(query)]:
                left[kind_of(query)] -= 1
                kept.append(query)
        tasks.append(probe.task.subset(kept))
    return tasks


def _encode(
    encoder: Encoder, task: RetrievalTask, batch_size: int, *, cosine: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    queries = encode_texts(encoder, list(task.queries.values()), "query", batch_size=batch_size)
    passages = encode_texts(encoder, list(task.corpus.values()), "document", batch_size=batch_size)
    return as_vectors(queries, len(queries), normalize=cosine), as_vectors(passages, len(passages), normalize=cosine)


def _ndcg(task: RetrievalTask, scores_QN: NDArray[np.float32]) -> Mapping[str, float]:
    ids = list(task.corpus)
    best_QK = np.argsort(-scores_QN, axis=1, kind="stable")[:, :100]
    run = {
        query: {ids[place]: float(row[place]) for place in best}
        for query, row, best in zip(task.queries, scores_QN, best_QK, strict=True)
    }
    return score_run(run, task).per_query["ndcg_at_10"]


def _change(tables: Sequence[NDArray[np.float64]], weights: NDArray[np.int_], random: np.random.Generator) -> Change:
    """Compare the means of two samples of queries."""
    old, new = (table @ weights for table in tables)
    drawn = [sample[random.integers(len(sample), size=(SAMPLES, len(sample)))].mean(1) for sample in (old, new)]
    low, high = np.percentile(drawn[1] - drawn[0], [2.5, 97.5])
    return Change(float(old.mean()), float(new.mean()), float(low), float(high))


def _unseen(old: Sequence[str], new: Sequence[str]) -> tuple[float, float]:
    """Return the fraction of words that one half of the old text does not contain: in the other half, and in the new text."""
    half = len(old) // 2
    known = {word for text in old[:half] for word in words(text)}

    def fraction(texts: Sequence[str]) -> float:
        found = [word for text in texts for word in words(text)]
        return sum(word not in known for word in found) / max(1, len(found))

    return fraction(old[half:]), fraction(new)


def _energy(
    vectors: Sequence[NDArray[np.float32]], documents: Sequence[Sequence[str]], random: np.random.Generator
) -> tuple[float, tuple[float, float], float]:
    """Return the energy distance of two samples of unit vectors, its interval under exchange of documents, and the p-value.

    Passages of a document stay together, because they resemble each other; of a long one, those of a section (`_sections`).
    """
    both = np.concatenate(vectors)
    distance_NN = np.sqrt(np.maximum(0, 2 - 2 * both @ both.T))
    names = [(part, name) for part, of_text in enumerate(documents) for name in _sections(of_text)]
    number = {name: place for place, name in enumerate(dict.fromkeys(names))}
    document_N = np.array([number[name] for name in names])
    sizes = np.bincount(document_N)
    groups_NP = np.zeros((len(both), PERMUTATIONS + 1), np.float32)
    groups_NP[: len(vectors[0]), 0] = 1
    for column in range(1, PERMUTATIONS + 1):
        order = random.permutation(len(sizes))
        filled = np.cumsum(sizes[order]) <= max(len(vectors[0]), sizes[order[0]])
        groups_NP[:, column] = np.isin(document_N, order[filled])
    found = _energies(distance_NN, groups_NP)
    between = float(distance_NN[: len(vectors[0]), len(vectors[0]) :].mean()) or 1.0
    observed, drawn = found[0] / between, found[1:] / between
    p_value = (1 + (drawn >= observed - 1e-9).sum()) / (PERMUTATIONS + 1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(observed), (float(low), float(high)), float(p_value)


def _sections(documents: Sequence[str]) -> list[tuple[str, int]]:
    """Return the document and section of each passage, so that a text has eight sections or more to exchange.

    >>> _sections([*"aaaaaaaaaabbcccc"])[8:]
    [('a', 4), ('a', 4), ('b', 0), ('b', 0), ('c', 0), ('c', 0), ('c', 1), ('c', 1)]
    """
    size, before, names = max(1, len(documents) // SECTIONS), Counter[str](), []
    for document in documents:
        names.append((document, before[document] // size))
        before[document] += 1
    return names


def _energies(distance_NN: NDArray[np.float32], groups_NP: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return 2 E|x - y| - E|x - x'| - E|y - y'| for each of P divisions into two groups."""
    sums_NP = distance_NN @ groups_NP
    ones, size = groups_NP.sum(0), len(distance_NN)
    inside = (groups_NP * sums_NP).sum(0, dtype=np.float64)
    across = ((1 - groups_NP) * sums_NP).sum(0, dtype=np.float64)
    outside = distance_NN.sum(dtype=np.float64) - inside - 2 * across
    others = np.maximum(2, size - ones)
    ones = np.maximum(2, ones)
    # Divided by the pairs of different passages, so that the mean of equal distributions is 0.
    result: NDArray[np.float64] = (
        2 * across / (ones * others) - inside / (ones * (ones - 1)) - outside / (others * (others - 1))
    )
    return result
