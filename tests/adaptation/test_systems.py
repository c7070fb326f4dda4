"""How `adapt` splits a probe, fits the weight of BM25 and selects a system."""

import math
import random
from dataclasses import replace

import pytest

from revela_hub.adaptation import UNTRAINED
from revela_hub.adaptation.adapt import Adaptation
from revela_hub.adaptation.systems import (
    System,
    best_of,
    compare,
    hybrid_run,
    measured_in_training,
    select,
    split_by_document,
)
from revela_hub.adaptation.verdict import Verdict
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.hybrid_weight import fit_weight
from revela_hub.evaluation.probe import Probe
from revela_hub.evaluation.retrieval import Rankings
from revela_hub.retrieval.bm25 import BM25Settings
from revela_hub.retrieval.hybrid import BM25_WEIGHT

QUERIES = 60


def task(queries: int = QUERIES) -> RetrievalTask:
    corpus = {f"p{n}": f"text {n}" for n in range(queries)}
    return RetrievalTask(
        corpus, {f"q{n}": f"query {n}" for n in range(queries)}, {f"q{n}": {f"p{n}": 1} for n in range(queries)}, "t"
    )


def ranking(found: float, seed: int, queries: int = QUERIES) -> Rankings:
    """Rankings of ten passages in which the right one is first for a fraction of the queries, and missing for the others."""
    chance = random.Random(seed)
    rankings: Rankings = {}
    for n in range(queries):
        others = [m for m in chance.sample(range(queries), 10) if m != n][:9]
        places = [n, *others] if chance.random() < found else others
        rankings[f"q{n}"] = {f"p{m}": 1 - place / 10 for place, m in enumerate(places)}
    return rankings


def test_the_queries_of_a_document_are_in_one_half() -> None:
    whole = task()
    documents = {f"p{n}": f"d{n // 3}" for n in range(QUERIES)}
    dev, test = split_by_document(Probe(whole, {}, documents_of=documents))
    assert dev.queries.keys() | test.queries.keys() == whole.queries.keys()
    assert not dev.queries.keys() & test.queries.keys()
    assert abs(len(dev.queries) - len(test.queries)) <= 3
    of_dev, of_test = ({documents[next(iter(half.qrels[q]))] for q in half.queries} for half in (dev, test))
    assert not of_dev & of_test
    assert dev.corpus == test.corpus == whole.corpus


def test_the_queries_of_a_single_document_are_split_one_by_one() -> None:
    said: list[str] = []
    dev, test = split_by_document(Probe(task(), {}, documents_of=dict.fromkeys(task().corpus, "book")), said.append)
    assert len(dev.queries) == len(test.queries) == QUERIES // 2
    assert said == ["most queries share documents: some documents have queries in both the dev and the test half"]


def test_queries_with_a_common_passage_are_in_one_half() -> None:
    whole = task()
    shared = {f"z{n}": f"shared {n}" for n in range(QUERIES // 3)}
    qrels = {f"q{n}": {f"p{n}": 1, f"z{n % (QUERIES // 3)}": 1} for n in range(QUERIES)}  # of three queries each
    said: list[str] = []
    halves = split_by_document(Probe(replace(whole, corpus=whole.corpus | shared, qrels=qrels), {}), said.append)
    dev, test = ({passage for gold in half.qrels.values() for passage in gold} for half in halves)
    assert not dev & test and not said
    assert abs(len(halves[0].queries) - len(halves[1].queries)) <= 3
    # A chain of documents connects all queries: then those of the same first document.
    chain = {f"q{n}": {f"p{n // 3 * 3:02}": 1, f"p{n // 3 * 3 + 3:02}": 1} for n in range(QUERIES)}
    halves = split_by_document(Probe(replace(whole, qrels=chain), {}), said.append)
    dev, test = ({min(half.qrels[query]) for query in half.queries} for half in halves)
    assert not dev & test and len(said) == 1


def test_the_weight_is_the_prior_without_evidence() -> None:
    same = ranking(0.6, 0)
    assert fit_weight(same, same, task()) == BM25_WEIGHT
    assert fit_weight(same, same, task(), 0.6) == 0.6


@pytest.mark.parametrize(("dense", "bm25", "low", "high"), [(0.95, 0.02, 0.0, 0.2), (0.02, 0.95, 0.4, 1.0)])
def test_strong_evidence_moves_the_weight(dense: float, bm25: float, low: float, high: float) -> None:
    weight = fit_weight(ranking(dense, 1), ranking(bm25, 2), task())
    assert low <= weight <= high
    assert weight != BM25_WEIGHT


def test_a_weight_of_zero_is_the_retriever_alone_and_one_is_bm25() -> None:
    dense, bm25 = ranking(0.7, 3), ranking(0.4, 4)
    system = System("", "", dense, bm25, 0.3)
    alone = system.scores(task(), 0.0)
    assert sum(alone.values()) / QUERIES == pytest.approx(
        sum("q" in q and f"p{q[1:]}" in dense[q] for q in dense) / QUERIES
    )
    assert system.scores(task(), 1.0) == pytest.approx(replace(system, dense=bm25).scores(task(), 0.0))


def test_the_best_candidate_is_selected_and_the_base_if_none_is_better() -> None:
    bm25, whole = ranking(0.3, 5), task()
    base, worse, better = (
        System(name, name, ranking(found, 6), bm25, 0.3)
        for name, found in (("base", 0.6), ("worse", 0.3), ("better", 0.9))
    )
    assert select(base, [worse, better], whole) is better
    assert select(base, [worse], whole) is base
    assert select(base, [replace(base, name="equal")], whole) is base
    assert compare(base, better, whole).verdict == "better"


def test_a_trained_retriever_must_beat_the_best_untrained_system_by_one_standard_error() -> None:
    """Otherwise a training without an effect is exported for the gain of another setting of BM25."""
    whole = task()
    names = sorted(whole.queries)
    found = {name: place < QUERIES // 2 for place, name in enumerate(names)}

    def ranked(right: dict[str, bool]) -> Rankings:
        return {name: {f"p{name[1:]}" if hit else "none": 1.0} for name, hit in right.items()}

    base = System("base retriever", "base", ranked(dict.fromkeys(names, False)), {}, 0.0)
    split = replace(base, name="base retriever, identifiers split", dense=ranked(found))
    two_more_one_less = replace(
        split,
        name="natural pairs",
        folder="pairs",
        dense=ranked(found | {names[0]: False, names[-1]: True, names[-2]: True}),
    )
    many_more = replace(two_more_one_less, dense=ranked(found | dict.fromkeys(names[-5:], True)))
    assert compare(base, two_more_one_less, whole).verdict == "better" and two_more_one_less.mean(whole) > split.mean(
        whole
    )
    assert select(split, [two_more_one_less], whole) is split
    for right in names[QUERIES // 2 :]:  # one query more: the gain is its standard error, up to rounding
        rank = {"none": 1.0, f"p{right[1:]}": 0.5}
        assert select(split, [replace(many_more, dense=split.dense | {right: rank})], whole) is split
    assert select(split, [many_more], whole) is many_more
    # With BM25, which has all the weight, as good as the base; alone better.
    alone = replace(many_more, bm25=split.dense, weight=1.0)
    assert select(replace(split, weight=0.0), [alone], whole) is alone


def test_a_candidate_that_kept_the_base_retriever_says_so() -> None:
    bm25, whole = ranking(0.3, 5), task()
    base, kept, better = (
        System(name, name, ranking(found, 6), bm25, 0.3)
        for name, found in (("base", 0.6), ("kept", 0.6), ("better", 0.9))
    )
    difference = compare(base, better, whole)
    verdict = Verdict(base, better, better, difference, [base, kept, better], whole, whole)
    rows = verdict.table().splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["BM25", "base", "kept", "better"]
    assert rows[3].endswith("  none: base retriever kept") and rows[4].endswith("]  <- exported")


def test_the_summary_gives_each_part_of_the_gain_an_interval() -> None:
    """BM25 compared with the base retriever alone, then split identifiers, then training."""
    bm25, whole = ranking(0.3, 5), task()
    split = BM25Settings(split_identifiers=True)
    base, parts, trained = (
        System(name, name, ranking(found, 6), bm25, weight, settings=settings)
        for name, found, weight, settings in (
            ("base retriever", 0.4, 0.2, BM25Settings()),
            ("base, identifiers split", 0.7, 0.3, split),
            ("natural pairs", 0.9, 0.3, split),
        )
    )
    verdict = Verdict(base, trained, trained, compare(base, trained, whole), [base, parts, trained], whole, whole)
    found = verdict.parts()
    assert list(found) == ["BM25, weight 0.2", "identifiers split", "natural pairs", "together"]
    assert found["identifiers split"] == compare(base, parts, whole)
    assert found["natural pairs"] == compare(parts, trained, whole)
    *each, together = (d.difference for d in found.values())
    assert together == pytest.approx(sum(each)) == pytest.approx(trained.mean(whole) - base.mean(whole, 0.0))
    first, *lines = verdict.summary().splitlines()
    before, after = base.mean(whole, 0.0), trained.mean(whole)
    assert first.endswith(f"{before:.3f} (base retriever) -> {after:.3f} (natural pairs, BM25)")
    d = found["natural pairs"]
    assert lines[2].split("  ", 2)[1:] == ["natural pairs", f"    {d.difference:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"]
    kept = Verdict(base, base, base, compare(base, base, whole), [base, parts], whole, whole)
    assert list(kept.parts()) == ["BM25, weight 0.2", "together"]
    assert "not kept" not in kept.summary()  # nothing was trained
    kept = Verdict(base, base, base, compare(base, base, whole), [base, trained], whole, whole)
    first, *lines = kept.summary().splitlines()
    assert first.endswith("(base retriever, BM25)") and lines[1].split() == ["training", "not", "kept"]


def test_runs_measure_on_half_of_the_dev_queries_and_their_passages() -> None:
    whole = task(100)
    queries, qrels = dict(list(whole.queries.items())[:40]), dict(list(whole.qrels.items())[:40])
    dev = RetrievalTask(whole.corpus, queries, qrels, "probe")
    part = measured_in_training(dev)
    assert list(part.queries) == list(dev.queries)[::2]
    assert {passage for gold in part.qrels.values() for passage in gold} <= part.corpus.keys() <= whole.corpus.keys()
    assert len(part.corpus) == 25
    assert part.name == "probe"


def test_late_interaction_reorders_the_best_results_with_its_weight() -> None:
    """Equal to the combination of both scaled scores in plain loops."""
    whole = task()
    dense, bm25 = ranking(0.7, 3), ranking(0.4, 4)
    system = System("", "", dense, bm25, 0.3)
    best = best_of(hybrid_run(dense, bm25, whole, 0.3))
    again = {q: {passage: random.Random(f"{q} {passage}").random() for passage in hits} for q, hits in best.items()}
    reranked = replace(system, tokens=again, token_weight=0.4)

    def scaled(scores: dict[str, float]) -> dict[str, float]:
        low, high = min(scores.values()), max(scores.values())
        return {name: (score - low) / (high - low) for name, score in scores.items()}

    for query, hits in best.items():
        one, other = scaled(hits), scaled(again[query])
        ties_by_id = sorted(hits, reverse=True)  # as in trec_eval
        order = sorted(ties_by_id, key=lambda passage: -round(0.6 * one[passage] + 0.4 * other[passage], 6))
        right = f"p{query[1:]}"
        expected = 1 / math.log2(order.index(right) + 2) if right in order[:10] else 0.0
        assert reranked.scores(whole)[query] == pytest.approx(expected, abs=1e-6)
    assert reranked.scores(whole, 0.3) == system.scores(whole)
    assert reranked.scores(whole) != system.scores(whole)


def test_the_verdict_is_on_the_exported_system() -> None:
    whole, bm25 = task(), ranking(0.3, 3)
    base, tokens, trained, worse = (
        System(name, name, ranking(found, seed), bm25, 0.0)
        for name, found, seed in (
            (UNTRAINED[0], 0.4, 1),
            (UNTRAINED[2], 0.6, 2),
            ("trained", 0.9, 4),
            ("worse", 0.1, 5),
        )
    )

    def verdict(untrained: System, trained: System, *, on_test: System) -> Verdict:
        """Of a candidate that is better on the dev half, and like another system on the test half."""
        dev, test = (whole.subset([q for q in whole.queries if int(q[1:]) % 2 == half]) for half in (0, 1))
        seen = {query: (trained if query in dev.queries else on_test).dense[query] for query in whole.queries}
        adaptation = Adaptation(None, 60, print)  # type: ignore[arg-type]
        adaptation.systems, adaptation.baseline = [base, untrained, replace(trained, dense=seen)], untrained
        adaptation.dev, adaptation.test = dev, test
        return adaptation.verdict()

    found = verdict(tokens, trained, on_test=trained)
    assert found.chosen.name == found.best.name == "trained" and found.word == "BETTER"
    found = verdict(tokens, trained, on_test=base)  # was: NO DIFFERENCE, that of the candidate
    assert found.chosen is found.best is tokens and found.word == "BETTER"
    assert found.sentence().startswith("The selected system (base retriever, with BM25")
    found = verdict(tokens, trained, on_test=tokens)  # was: the training was exported for the gain of late interaction
    assert found.chosen is tokens and found.word == "BETTER"
    found = verdict(base, trained, on_test=worse)
    assert found.chosen is base and found.best.name == "trained" and found.word == "WORSE"
    found = verdict(replace(worse, name=UNTRAINED[2]), trained, on_test=base)
    assert found.chosen is base and found.word == "NO DIFFERENCE"


def test_late_interaction_that_harms_is_left_out_even_if_the_whole_is_better() -> None:
    """Split identifiers may gain more than it loses."""
    whole, bm25 = task(), ranking(0.3, 3)
    split_settings = BM25Settings(split_identifiers=True)
    base = System(UNTRAINED[0], "base", ranking(0.1, 1), bm25, 0.0)
    split = System(UNTRAINED[1], "base", ranking(0.9, 2), bm25, 0.0, settings=split_settings)
    tokens = System(UNTRAINED[2], "base", ranking(0.5, 4), bm25, 0.0, settings=split_settings)
    adaptation = Adaptation(None, 60, print)  # type: ignore[arg-type]
    adaptation.systems, adaptation.baseline = [base, split, tokens], tokens
    adaptation.dev = adaptation.test = whole
    assert compare(base, tokens, whole).verdict == "better"
    found = adaptation.verdict()
    assert found.chosen is found.best is split and found.word == "BETTER"
    adaptation.systems, adaptation.baseline = [base, replace(split, dense=ranking(0.0, 2)), tokens], tokens
    assert adaptation.verdict().chosen is tokens


def test_the_weight_of_late_interaction_changes_only_with_strong_evidence() -> None:
    one, other = ranking(0.75, 1), ranking(0.85, 2)
    assert fit_weight(one, other, task(), 0.4) > 0.4
    assert fit_weight(one, other, task(), 0.4, 2.0) == 0.4
    assert fit_weight(ranking(0.1, 1), ranking(0.95, 2), task(), 0.4, 2.0) > 0.4
    assert fit_weight(ranking(0.95, 1), ranking(0.02, 2), task(), 0.4, 2.0) < 0.4
