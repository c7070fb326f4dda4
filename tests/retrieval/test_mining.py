"""Hard negatives: which texts may be negatives, that nothing is computed twice, and that the corpus is not in memory."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from word_encoder import WORDS, Encoder

from revela_hub.data.text.same_text import text_key
from revela_hub.errors import UserError
from revela_hub.retrieval import (
    MiningReport,
    MiningSettings,
    RankerSettings,
    dense,
    mine_negatives,
    mining,
    vectors,
)
from revela_hub.retrieval.mining_input import read_corpus

CACHED = RankerSettings(identity="model@1")


def on_circle(score: float) -> str:
    """A text whose cosine with the text "1 0" is `score`."""
    return f"{score} {np.sqrt(1 - score**2)}"


def negatives(row: dict[str, Any]) -> list[str]:
    return [text for name, text in row.items() if name.startswith("negative_")]


def random_texts(number: int, seed: int, length: int = 6) -> list[str]:
    random = np.random.default_rng(seed)
    return [f"{' '.join(random.choice(WORDS, length))} {seed}x{index}" for index in range(number)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small data have several blocks of everything, and last blocks that are not full."""
    monkeypatch.setattr(vectors, "FIRST_SHARD", 7)
    monkeypatch.setattr(vectors, "SHARD_SIZE", 7)
    monkeypatch.setattr(dense, "MIN_BLOCK", 3)
    monkeypatch.setattr(dense, "BLOCK_NUMBERS", 1)
    monkeypatch.setattr(mining, "ANCHOR_BLOCK", 5)


# --- the same as sentence-transformers


VOCABULARY = (
    "fox dog river sea text paris tokyo width height chunk layer capital retriever mountains jumps lazy".split()
)


@pytest.fixture
def static_model() -> Any:
    """Random word vectors, the same in every run, so that cosines are anywhere from -1 to 1; a prompt for queries."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate([*VOCABULARY, "the", "[UNK]"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    weights = np.random.default_rng(0).normal(size=(len(words), 6)).astype(np.float32)
    module = StaticEmbedding(tokenizer, embedding_weights=weights)
    return SentenceTransformer(modules=[module], device="cpu", prompts={"query": "the ", "document": ""})


LIMITS: list[dict[str, Any]] = [
    {"relative_margin": 0.3, "num_negatives": 4},
    {"relative_margin": None},
    {"relative_margin": None, "range_min": 3, "range_max": 12, "num_negatives": 3},
    {"relative_margin": 0.1, "range_min": 2, "range_max": 16},
]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("own_corpus", [False, True])
def test_equals_sentence_transformers(
    static_model: Any, limits: dict[str, Any], own_corpus: bool, small_blocks: None
) -> None:
    from sentence_transformers.util import mine_hard_negatives

    random = np.random.default_rng(0)
    documents = list(dict.fromkeys(" ".join(random.choice(VOCABULARY, 4)) for _ in range(60)))
    rows = [(" ".join(documents[-1 - index].split()[:2]), documents[-1 - index]) for index in range(14)]
    rows += [(rows[index][0], documents[index]) for index in range(5)]  # unlike its anchor, and may score below 0
    corpus = documents[:45] + documents[:5] if own_corpus else None  # with copies, and positives that are not in it
    settings = {"num_negatives": 2, **limits}
    theirs = mine_hard_negatives(
        Dataset.from_dict({"anchor": [a for a, _ in rows], "positive": [p for _, p in rows]}),
        static_model,
        corpus=corpus,
        output_format="n-tuple",
        output_scores=True,
        verbose=False,
        **settings,
    )
    ours = mine_negatives(
        [a for a, _ in rows],
        [p for _, p in rows],
        corpus,
        static_model,
        MiningSettings(**settings, scores=True),
    )

    def by_pair(dataset: Dataset) -> dict[tuple[str, str], tuple[list[str], list[float]]]:
        return {(row["anchor"], row["positive"]): (negatives(row), row["scores"]) for row in dataset}

    expected, found = by_pair(theirs), by_pair(ours.dataset)
    assert len(expected) >= 3  # or the limits are so narrow that nothing is compared
    assert {pair: texts for pair, (texts, _) in found.items()} == {pair: texts for pair, (texts, _) in expected.items()}
    for pair, (_, values) in expected.items():
        assert found[pair][1] == pytest.approx(values, abs=1e-5)
    assert ours.report.mined == len(expected)
    assert ours.report.mined + ours.report.fewer == len(rows)


# --- the limits


def test_a_negative_scores_at_most_95_percent_of_the_positive() -> None:
    corpus = [on_circle(score) for score in (0.9, 0.79, 0.77, 0.75, 0.5)]
    mined = mine_negatives(["1 0"], [on_circle(0.8)], corpus, Encoder(), MiningSettings(num_negatives=2, scores=True))
    [row] = mined.dataset
    assert negatives(row) == [on_circle(0.75), on_circle(0.5)]
    assert row["scores"] == pytest.approx([0.8, 0.75, 0.5], abs=1e-6)
    removed = {"being a positive": 1, "being the anchor": 0, "relative margin": 3}
    assert dict(mined.report.removed) == removed
    assert (mined.report.candidates, mined.report.mined) == (6, 1)
    # Of a negative score, the margin is below it.
    corpus = [on_circle(score) for score in (0.1, -0.2, -0.205, -0.22)]
    assert negatives(mine_negatives(["1 0"], [on_circle(-0.2)], corpus, Encoder()).dataset[0]) == [on_circle(-0.22)]


def test_the_positive_that_scores_lowest_sets_the_margin() -> None:
    positives = [on_circle(0.9), on_circle(0.5)]
    corpus = [*positives, on_circle(0.6), on_circle(0.4)]
    mined = mine_negatives(["1 0", "1 0"], positives, corpus, Encoder())
    expected = [(positive, [on_circle(0.4)]) for positive in positives]
    assert [(row["positive"], negatives(row)) for row in mined.dataset] == expected
    assert mined.report.removed["being a positive"] == 2


def test_random_negatives_are_within_the_limits_and_the_same_for_a_seed(small_blocks: None) -> None:
    corpus = random_texts(80, 0)
    positives = corpus[:12]
    anchors = [" ".join(text.split()[1:]) for text in positives]

    def mined(seed: int, sampling: str = "random", number: int = 3) -> list[list[str]]:
        settings = MiningSettings(number, range_max=10, sampling=sampling, seed=seed, fewer="keep")
        return [negatives(row) for row in mine_negatives(anchors, positives, corpus, Encoder(), settings).dataset]

    assert mined(0) == mined(0)
    assert mined(0) != mined(1)
    assert mined(0) != mined(0, "top")
    for drawn, possible in zip(mined(0), mined(0, "top", 10), strict=True):
        places = [possible.index(text) for text in drawn if text is not None]
        assert places == sorted(set(places))
        assert len(places) == min(3, sum(text is not None for text in possible))


# --- what is no negative


def test_copies_and_known_positives_are_no_negatives() -> None:
    corpus = [
        "river  sea\nstone",  # the positive with other white space
        "moon iron",  # another positive of the anchor
        "moon iron",
        "River sea lamp",
        "river sea",  # the anchor itself
        "River sea lamp",
        " ",
    ]
    anchors, positives = ["river sea", "river sea", "river sea", "", "hill"], ["river sea stone", "moon iron"]
    mined = mine_negatives(
        anchors, [*positives, positives[1], "road", "\t"], corpus, Encoder(), MiningSettings(relative_margin=None)
    )
    assert [(row["positive"], negatives(row)) for row in mined.dataset] == [
        (positive, ["River sea lamp"]) for positive in corpus[:2]
    ]
    report = mined.report
    assert (report.pairs, report.anchors, report.documents) == (2, 1, 4)
    skipped = {"empty pairs": 2, "duplicate pairs": 1, "empty documents": 1, "duplicate documents": 2}
    assert dict(report.skipped) == skipped
    assert dict(report.removed) == {"being a positive": 2, "being the anchor": 1}
    assert all(f"{number} {reason}" in str(report) for reason, number in skipped.items())


def test_a_positive_is_the_passage_that_has_its_text_below_a_title(tmp_path: Path) -> None:
    given = [("River", "old sea"), ("Lamp", "old\tsea"), ("", "old sea"), ("Stone", "old moon"), ("Iron", "old hill")]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in given))
    settings = MiningSettings(2, relative_margin=None, fewer="keep")

    def mined(source: Any, *positives: str) -> tuple[list[Any], MiningReport]:
        mined = mine_negatives(["old"] * len(positives), positives, read_corpus(source, "text"), "bm25", settings)
        return [list(row.values())[1:] for row in mined.dataset], mined.report

    rows, report = mined(str(corpus), "old sea", "Stone old moon", "old road")
    assert [row[0] for row in rows] == ["River old sea", "Stone old moon", "old road"]
    assert [row[1:] for row in rows] == [["Iron old hill", None]] * 3
    assert (report.documents, report.skipped["duplicate documents"]) == (4, 2)
    rows, report = mined(str(corpus), "STONE, old moon")  # also in another spelling
    assert "Stone old moon" not in rows[0][1:]
    rows, _ = mined({"path": str(corpus), "title_column": ""}, "old sea")
    assert {*rows[0][1:]} == {"old moon", "old hill"}
    with pytest.raises(UserError, match="no column 'heading'"):
        mined({"path": str(corpus), "title_column": "heading"}, "old sea")


@pytest.mark.parametrize("corpus", [False, True])
def test_a_negative_is_no_other_form_of_the_positive_or_the_anchor(corpus: bool) -> None:
    """Passages and questions also occur decomposed, in capitals or without punctuation; the questions are documents, too."""
    questions = [f"Où est née la rivière {number} ?" for number in range(18)]
    passages = [f"La rivière {number} est née à l'été, près de la forêt." for number in range(18)]
    forms = [lambda text: unicodedata.normalize("NFD", text), str.upper, lambda text: f"\u200b«{text[:-1].strip()}»"]
    anchors = [*questions, *(form(text) for form in forms for text in questions)]
    positives = passages + [form(text) for form in (*forms[1:], forms[0]) for text in passages]
    documents = [*positives, *anchors, *(f"Un autre texte {number} de la forêt." for number in range(40))]
    settings = MiningSettings(3, relative_margin=None)
    mined = mine_negatives(anchors, positives, documents if corpus else None, "bm25", settings)
    assert len(mined.dataset) == 18  # each pair once
    for row in mined.dataset:
        own = {text_key(row["anchor"]), text_key(row["positive"])}
        assert not own & {text_key(text) for text in negatives(row)}


def test_pairs_with_fewer_negatives_are_dropped_or_kept() -> None:
    corpus = [on_circle(0.9), on_circle(0.1)]
    pairs = (["1 0", "0 1"], [on_circle(0.5), on_circle(0.1)])
    dropped = mine_negatives(*pairs, corpus, Encoder(), MiningSettings(num_negatives=2))
    assert [row["anchor"] for row in dropped.dataset] == ["0 1"]
    assert (dropped.report.mined, dropped.report.fewer) == (1, 1)
    kept = mine_negatives(*pairs, corpus, Encoder(), MiningSettings(num_negatives=2, fewer="keep", scores=True))
    assert negatives(kept.dataset[0]) == [on_circle(0.1), None]
    assert kept.dataset[0]["scores"] == pytest.approx([0.5, 0.1], abs=1e-6)
    assert None not in negatives(kept.dataset[1])


def test_what_leaves_nothing_is_an_error_that_says_why() -> None:
    pair = (["1 0"], [on_circle(0.5)])
    with pytest.raises(UserError, match="of 2 candidates .*1 by relative margin.*relax the limits"):
        mine_negatives(*pair, [on_circle(0.9)], Encoder())
    with pytest.raises(UserError, match="no pair has 2 negatives"):
        mine_negatives(*pair, [on_circle(0.1), on_circle(0.9)], Encoder(), MiningSettings(num_negatives=2))
    with pytest.raises(UserError, match="no pair has text"):
        mine_negatives(["", " "], ["x", "y"], ["z"], Encoder())
    with pytest.raises(UserError, match="no document with text"):
        mine_negatives(["a"], ["x"], ["", "\n"], Encoder())
    with pytest.raises(UserError, match="of 0 candidates"):
        mine_negatives(["river"], ["sea"], ["stone"], "bm25")
    for settings in ({"num_negatives": 3}, {"num_negatives": 100_000, "fewer": "keep"}, {"range_min": 2}):
        never = Encoder(limit=0)
        with pytest.raises(UserError, match="3 different documents.*is too small for"):
            mine_negatives(*pair, [on_circle(0.1), on_circle(0.9)], never, MiningSettings(**settings))


# --- the rankers


def test_prompts_go_to_the_model(tmp_path: Path) -> None:
    class Prompted(Encoder):
        def encode_query(self, inputs: list[str], /, *, prompt: str = "own ", **options: Any) -> np.ndarray:
            return super().encode_query([prompt + text for text in inputs], **options)

        def encode_document(self, inputs: list[str], /, *, prompt: str = "", **options: Any) -> np.ndarray:
            return super().encode_document([prompt + text for text in inputs], **options)

    def encoded(**prompts: str) -> tuple[list[str], list[str]]:
        ranker = Prompted()
        ranking = RankerSettings(identity="model@1", **prompts)  # type: ignore[arg-type]
        settings = MiningSettings(relative_margin=None)
        mine_negatives(["river"], ["sea"], ["stone"], ranker, settings, ranking, cache_dir=tmp_path)
        return ranker.queries, ranker.documents

    assert encoded() == (["own river"], ["stone", "sea"])
    assert encoded(query_prompt="Find: ") == (["Find: river"], [])  # the documents' vectors are those of before
    # Hits belong to both prompts.
    assert encoded(query_prompt="Find: ", document_prompt="Text: ") == (["Find: river"], ["Text: stone", "Text: sea"])


# --- on disk

DOCUMENTS = random_texts(40, 2)
ANCHORS = random_texts(11, 3)


def mined_rows(
    ranker: Any, folder: Path | None, positives: list[str] = DOCUMENTS[:11], **values: Any
) -> list[dict[str, Any]]:
    settings = MiningSettings(num_negatives=2, relative_margin=None, scores=True, **values)
    return list(mine_negatives(ANCHORS, positives, DOCUMENTS, ranker, settings, CACHED, cache_dir=folder).dataset)


@pytest.mark.parametrize("ranker", [Encoder(), "bm25"])
def test_blocks_change_nothing(ranker: Any, request: pytest.FixtureRequest) -> None:
    whole = mined_rows(ranker, None)
    request.getfixturevalue("small_blocks")
    for one, other in zip(whole, mined_rows(ranker, None), strict=True):
        assert one.pop("scores") == pytest.approx(other.pop("scores"), rel=1e-5)
        assert one == other
    assert len(whole) == 11


def test_an_interrupted_run_is_resumed_where_it_stopped(tmp_path: Path, small_blocks: None) -> None:
    first = Encoder(limit=2)  # blocks of 7 texts
    with pytest.raises(KeyboardInterrupt):
        mined_rows(first, tmp_path)
    assert first.documents == DOCUMENTS[:14]
    assert list(tmp_path.rglob("*.tmp")) == []
    second = Encoder()
    resumed = mined_rows(second, tmp_path)
    assert second.documents == DOCUMENTS[14:]
    assert second.queries == ANCHORS  # when their block is searched for, once
    assert resumed == mined_rows(Encoder(), None)
    third = Encoder(limit=0)
    assert mined_rows(third, tmp_path) == resumed
    assert third.queries == third.documents == []
