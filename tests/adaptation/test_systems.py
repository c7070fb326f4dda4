"""How `adapt` splits a probe, fits the weight of BM25, selects a system and decides."""

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from revela_hub.adaptation.systems import System, best_of, compare, measured_in_training, select, split_by_document
from revela_hub.adaptation.verdict import Verdict, decide
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.hybrid_weight import fit_weight, fuse_runs
from revela_hub.evaluation.probe import Probe
from revela_hub.evaluation.retrieval import Rankings
from revela_hub.retrieval.bm25 import BM25Settings
from revela_hub.retrieval.hybrid import BM25_WEIGHT

QUERIES = 120
SPLIT = BM25Settings(split_identifiers=True)


def task(queries: int = QUERIES) -> RetrievalTask:
    corpus = {f"p{n}": f"text {n}" for n in range(queries)}
    return RetrievalTask(
        corpus, {f"q{n}": f"query {n}" for n in range(queries)}, {f"q{n}": {f"p{n}": 1} for n in range(queries)}, "t"
    )


WHOLE = task()


def ranking(found: float, seed: int) -> Rankings:
    """Rankings of ten passages in which the right one is first for a fraction of the queries, and missing for the others."""
    chance = random.Random(seed)
    rankings: Rankings = {}
    for n in range(QUERIES):
        others = [m for m in chance.sample(range(QUERIES), 10) if m != n][:9]
        places = [n, *others] if chance.random() < found else others
        rankings[f"q{n}"] = {f"p{m}": 1 - place / 10 for place, m in enumerate(places)}
    return rankings


def system(name: str, found: float, seed: int = 6, bm25_weight: float = 0.3, **others: object) -> System:
    return System(name, name, ranking(found, seed), ranking(0.3, 5), bm25_weight, **others)  # type: ignore[arg-type]


def documents_of(half: RetrievalTask, documents: Mapping[str, str]) -> set[str]:
    return {documents.get(passage, passage) for gold in half.qrels.values() for passage in gold}


def test_the_queries_of_a_document_are_in_one_half() -> None:
    documents = {f"p{n}": f"d{n // 3}" for n in range(QUERIES)}
    dev, test = split_by_document(Probe(WHOLE, {}, documents_of=documents), print)
    assert dev.queries.keys() | test.queries.keys() == WHOLE.queries.keys()
    assert not dev.queries.keys() & test.queries.keys()
    assert abs(len(dev.queries) - len(test.queries)) <= 3
    assert not documents_of(dev, documents) & documents_of(test, documents)
    assert dev.corpus == test.corpus == WHOLE.corpus


def test_queries_with_a_common_passage_are_in_one_half_if_that_is_possible() -> None:
    said: list[str] = []
    shared = {f"z{n}": f"shared {n}" for n in range(QUERIES // 3)}
    qrels = {f"q{n}": {f"p{n}": 1, f"z{n % (QUERIES // 3)}": 1} for n in range(QUERIES)}  # of three queries each
    halves = split_by_document(Probe(replace(WHOLE, corpus=WHOLE.corpus | shared, qrels=qrels), {}), said.append)
    assert not documents_of(halves[0], {}) & documents_of(halves[1], {}) and not said
    assert abs(len(halves[0].queries) - len(halves[1].queries)) <= 3
    # A chain of documents connects all queries: then those of the same first document.
    chain = {f"q{n}": {f"p{n // 3 * 3:02}": 1, f"p{n // 3 * 3 + 3:02}": 1} for n in range(QUERIES)}
    halves = split_by_document(Probe(replace(WHOLE, qrels=chain), {}), said.append)
    dev, test = ({min(half.qrels[query]) for query in half.queries} for half in halves)
    assert not dev & test and len(said) == 1
    # Those of a single document are split one by one.
    dev_task, test_task = split_by_document(
        Probe(WHOLE, {}, documents_of=dict.fromkeys(WHOLE.corpus, "book")), said.append
    )
    assert len(dev_task.queries) == len(test_task.queries) == QUERIES // 2 and len(said) == 2


@pytest.mark.parametrize(
    ("dense", "bm25", "prior", "errors", "low", "high"),
    [
        (0.95, 0.02, BM25_WEIGHT, 1.0, 0.0, 0.2),
        (0.02, 0.95, BM25_WEIGHT, 1.0, 0.4, 1.0),
        # The weight of late interaction changes only with strong evidence.
        (0.75, 0.85, 0.4, 1.0, 0.5, 1.0),
        (0.75, 0.85, 0.4, 2.0, 0.4, 0.4),
        (0.1, 0.95, 0.4, 2.0, 0.5, 1.0),
        (0.95, 0.02, 0.4, 2.0, 0.0, 0.3),
    ],
)
def test_evidence_moves_the_weight(
    dense: float, bm25: float, prior: float, errors: float, low: float, high: float
) -> None:
    assert low <= fit_weight(ranking(dense, 1), ranking(bm25, 2), WHOLE, prior, errors) <= high
    assert fit_weight(ranking(dense, 1), ranking(dense, 1), WHOLE, prior, errors) == prior


def test_late_interaction_reorders_the_best_results_with_its_weight() -> None:
    """Equal to the combination of both scaled scores in plain loops."""
    dense, bm25 = ranking(0.7, 3), ranking(0.4, 4)
    plain = System("", "", dense, bm25, 0.3)
    best = best_of(fuse_runs(dense, bm25, WHOLE, 0.3))
    again = {q: {passage: random.Random(f"{q} {passage}").random() for passage in hits} for q, hits in best.items()}
    reranked = replace(plain, tokens=again, token_weight=0.4)

    def scaled(scores: dict[str, float]) -> dict[str, float]:
        low, high = min(scores.values()), max(scores.values())
        return {name: (score - low) / (high - low) for name, score in scores.items()}

    for query, hits in best.items():
        one, other = scaled(hits), scaled(again[query])
        ties_by_id = sorted(hits, reverse=True)  # as in trec_eval
        order = sorted(ties_by_id, key=lambda passage: -round(0.6 * one[passage] + 0.4 * other[passage], 6))
        right = f"p{query[1:]}"
        expected = 1 / math.log2(order.index(right) + 2) if right in order[:10] else 0.0
        assert reranked.scores(WHOLE)[query] == pytest.approx(expected, abs=1e-6)
    assert reranked.scores(WHOLE, 0.3) == plain.scores(WHOLE)
    assert reranked.scores(WHOLE) != plain.scores(WHOLE)


def test_the_best_candidate_is_selected_and_the_base_if_none_is_better() -> None:
    base, worse, better = (system(name, found) for name, found in (("base", 0.6), ("worse", 0.3), ("better", 0.9)))
    assert select(base, [worse, better], WHOLE) is better
    assert select(base, [worse], WHOLE) is select(base, [replace(base, name="equal")], WHOLE) is base
    assert compare(base, better, WHOLE).verdict == "better"


def test_a_trained_retriever_must_beat_the_best_untrained_system_by_one_standard_error() -> None:
    """Otherwise a training without an effect is exported for the gain of another setting of BM25."""
    whole = replace(WHOLE, corpus=WHOLE.corpus | {"none": "no answer"})
    names = sorted(whole.queries)
    found = {name: place < QUERIES // 2 for place, name in enumerate(names)}

    def ranked(right: dict[str, bool]) -> Rankings:
        return {name: {f"p{name[1:]}" if hit else "none": 1.0} for name, hit in right.items()}

    base = System("base retriever", "base", ranked(dict.fromkeys(names, False)), {}, 0.0)
    split = replace(base, name="base + BM25 + split identifiers", dense=ranked(found))
    two_more_one_less = ranked(found | {names[0]: False, names[-1]: True, names[-2]: True})
    pairs = replace(split, name="natural pairs", folder="pairs", dense=two_more_one_less)
    assert compare(base, pairs, whole).verdict == "better" and pairs.mean(whole) > split.mean(whole)
    assert select(split, [pairs], whole) is split
    for right in names[QUERIES // 2 :]:  # one query more: the gain is its standard error, up to rounding
        rank = {"none": 1.0, f"p{right[1:]}": 0.5}
        assert select(split, [replace(pairs, dense=split.dense | {right: rank})], whole) is split
    many_more = replace(pairs, dense=ranked(found | dict.fromkeys(names[-5:], True)))
    assert select(split, [many_more], whole) is many_more
    # With BM25, which has all the weight, as good as the base; alone better.
    alone = replace(many_more, bm25=split.dense, bm25_weight=1.0)
    assert select(replace(split, bm25_weight=0.0), [alone], whole) is alone


def test_everything_is_compared_with_the_base_retriever_alone() -> None:
    """The parts add up to the verdict's difference: BM25, then split identifiers, then training."""
    alone = system("base retriever", 0.4, bm25_weight=0.0)
    hybrid = replace(alone, name="base + BM25", bm25_weight=0.2)
    parts = system("base + BM25 + split identifiers", 0.7, bm25_settings=SPLIT)
    trained = system("natural pairs", 0.9, bm25_settings=SPLIT, seconds=60.0)
    verdict = Verdict([alone, hybrid, parts, trained], trained, WHOLE, WHOLE)
    found = verdict.parts()
    assert list(found) == ["BM25", "split identifiers", "training", "together"]
    assert found["split identifiers"] == compare(hybrid, parts, WHOLE)
    assert found["training"] == compare(parts, trained, WHOLE)
    *each, together = (d.difference for d in found.values())
    assert together == pytest.approx(sum(each)) == pytest.approx(trained.mean(WHOLE) - alone.mean(WHOLE))
    assert found["together"] == verdict.difference  # was: that of the whole, and the verdict without BM25
    for text in (verdict.line(Path("out")), verdict.sentence(), verdict.table(), verdict.summary(99)):
        assert f"{together:+.3f}" in text
    for systems, not_kept in (([alone, hybrid, parts], False), ([alone, hybrid, trained], True)):
        kept = Verdict(systems, hybrid, WHOLE, WHOLE)
        assert list(kept.parts()) == ["BM25", "together"]
        assert ("not kept" in kept.summary(99)) == not_kept  # or nothing was trained


def test_too_few_queries_are_reported_with_how_many_would_suffice() -> None:
    alone, same = system("base retriever", 0.5, bm25_weight=0.0), system("base + BM25", 0.5, seed=8)
    said = Verdict([alone, same], same, WHOLE, WHOLE).summary(999).splitlines()[-1]
    d = compare(alone, same, WHOLE)
    expected = QUERIES * ((d.high - d.low) / 2 / 0.02) ** 2
    assert int(said.split("about ")[1].split()[0].replace(",", "")) == pytest.approx(expected, rel=0.01)
    assert "at most 999" in said
    better = system("base + BM25", 1.0)
    assert "too few" not in Verdict([alone, better], better, WHOLE, WHOLE).summary(99)


def test_runs_measure_on_half_of_the_dev_queries_and_their_passages() -> None:
    whole = task(100)
    queries, qrels = dict(list(whole.queries.items())[:40]), dict(list(whole.qrels.items())[:40])
    part = measured_in_training(RetrievalTask(whole.corpus, queries, qrels, "probe"))
    assert list(part.queries) == list(queries)[::2]
    assert {passage for gold in part.qrels.values() for passage in gold} <= part.corpus.keys() <= whole.corpus.keys()
    assert len(part.corpus) == 25 and part.name == "probe"


def test_the_verdict_is_on_the_exported_system() -> None:
    alone, tokens, trained, worse = (
        system(name, found, seed, 0.0)
        for name, found, seed in (
            ("base retriever", 0.4, 1),
            ("tokens", 0.7, 2),
            ("trained", 0.9, 4),
            ("worse", 0.1, 5),
        )
    )
    hybrid = replace(alone, name="base + BM25")
    tokens, worse_tokens = (replace(each, tokens={"q0": {}}) for each in (tokens, worse))
    dev, test = (WHOLE.subset([q for q in WHOLE.queries if int(q[1:]) % 2 == half]) for half in (0, 1))

    def verdict(untrained: System, on_test: System) -> Verdict:
        """Of a candidate that is better on the dev half, and like another system on the test half."""
        seen = {query: (trained if query in dev.queries else on_test).dense[query] for query in WHOLE.queries}
        candidate = replace(trained, dense=seen, seconds=1.0)
        return decide([alone, hybrid, untrained, candidate], untrained, dev, test)

    found = verdict(tokens, trained)
    assert found.chosen.name == "trained" and found.word == "BETTER"
    for on_test in (alone, tokens):  # was: the training was exported for the gain of late interaction
        found = verdict(tokens, on_test)
        assert found.chosen is tokens and found.word == "BETTER"
    for untrained, on_test in ((hybrid, worse), (worse_tokens, alone)):
        found = verdict(untrained, on_test)
        assert found.chosen is hybrid and found.word == "NO DIFFERENCE"


def test_parts_that_harm_are_left_out_even_if_the_whole_is_better() -> None:
    """Split identifiers may gain more than late interaction loses; and BM25 may lose."""
    alone = system("base retriever", 0.1, 1, 0.0)
    hybrid = replace(alone, name="base + BM25")
    split = system("base + BM25 + split identifiers", 0.9, 2, 0.0, bm25_settings=SPLIT)
    tokens = system("base + BM25 + late interaction", 0.5, 4, 0.0, bm25_settings=SPLIT, tokens={"q0": {}})
    assert compare(alone, tokens, WHOLE).verdict == "better"
    found = decide([alone, hybrid, split, tokens], tokens, WHOLE, WHOLE)
    assert found.chosen is split and found.word == "BETTER"
    harm = replace(split, dense=ranking(0.0, 2))
    found = decide([alone, hybrid, harm, tokens], tokens, WHOLE, WHOLE)
    assert (
        found.chosen.bm25_settings == hybrid.bm25_settings and found.chosen.tokens == tokens.tokens
    )  # was: hidden behind a gain
    assert list(found.parts()) == ["BM25", "late interaction", "together"] and found.chosen.name in found.table()
    lower = replace(hybrid, dense=ranking(0.0, 2))
    assert decide([alone, lower], lower, WHOLE, WHOLE).chosen is alone
