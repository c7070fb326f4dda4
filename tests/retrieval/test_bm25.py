"""BM25: the equation in a plain loop, its settings, and what it finds on a real collection."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from revela_hub.data.sources.beir import read_beir
from revela_hub.data.text.words import normal
from revela_hub.evaluation import evaluate_bm25
from revela_hub.retrieval.bm25 import ANSERINI, BM25, BM25Settings

WORDS = "river sea stone moon iron salt wind leaf bird fish hill road lamp door rope seed".split()


def texts(number: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, 12))) for _ in range(number)]


@pytest.mark.parametrize("settings", [BM25Settings(), ANSERINI, BM25Settings(k1=0.0, b=0.0, stemmer="none")])
def test_equals_a_plain_loop(settings: BM25Settings) -> None:
    documents, queries = [*texts(60, 0), "", "the of and"], [*texts(12, 1), "unheard", "the"]
    index = BM25(documents, settings)
    hits = index.search(queries, len(documents))
    lengths = [len([w for w in text.split() if w in WORDS]) for text in documents]
    mean = sum(lengths) / len(documents)
    for number, query in enumerate(queries):
        scores = []
        for text, length in zip(documents, lengths, strict=True):
            score = 0.0
            for word in query.split():
                frequency = sum(word in other.split() for other in documents)
                tf = Counter(text.split())[word]
                if word in WORDS and tf:
                    idf = math.log(1 + (len(documents) - frequency + 0.5) / (frequency + 0.5))
                    score += idf * tf / (tf + settings.k1 * (1 - settings.b + settings.b * length / mean))
            scores.append(score)
        best = [row for row in sorted(range(len(documents)), key=lambda r: (-np.float32(scores[r]), r)) if scores[row]]
        found = hits.rows_QK[number][hits.rows_QK[number] >= 0]
        assert sorted(found.tolist()) == sorted(best)
        by_row = dict(zip(found.tolist(), hits.scores_QK[number].tolist(), strict=False))
        assert [by_row[row] for row in best] == pytest.approx([scores[row] for row in best], rel=1e-5)
        pairs = index.pair_scores(queries, np.full(len(documents), number), np.arange(len(documents)))
        assert pairs == pytest.approx(scores, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("हिन्दी", "यह हिन्दी भाषा में लिखा है"),
        ("ภาษาไทย", "นี่คือภาษาไทย"),
        ("größe", "die gro\u0308\u00dfe der Datei"),  # decomposed, as in many PDF files
        ("كِتَابٌ", "هذا كِتَابٌ"),
        ("서울", "서울은 대한민국의 수도이다."),
        ("Energieversorgung", "die Energie\u00adver\u00adsorgung der Stadt"),
        ("می‌روم", "من میروم"),
        ("R", "functions in R are values"),
    ],
)
def test_finds_words_with_combining_marks(query: str, text: str) -> None:
    index = BM25(["other text", text], BM25Settings(stemmer="none"))
    assert index.search([query], 2).rows_QK.tolist() == [[1, -1]]
    assert normal(query) in normal("".join(text[start:end] for start, end in index.matches(query, text)))


def test_a_query_of_one_character_finds_the_words_with_it() -> None:
    texts = ["富士山は日本で一番高い山です。", "三体 in Python", "3月 and the rest", "ปลา กิน", "高山 plants"]
    index = BM25(texts)
    hits = index.search(["山", "三", "月", "ก", "体 Python", "龍", "Python"], 2)
    assert [sorted(row for row in rows if row >= 0) for rows in hits.rows_QK.tolist()] == [
        [0, 4],
        [1],
        [2],
        [3],
        [1],
        [],
        [1],
    ]
    assert index.matches("山", texts[0]) == [(2, 3), (11, 12)]
    assert index.matches("月", texts[2]) == [(1, 2)]


def test_an_index_is_mapped_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = texts(60, 0)
    first = BM25(documents, folder=tmp_path)
    monkeypatch.setattr("bm25s.BM25.index", None)
    second = BM25(documents, folder=tmp_path)
    for k in (1, 60):
        np.testing.assert_array_equal(first.search(texts(5, 1), k).rows_QK, second.search(texts(5, 1), k).rows_QK)


def test_the_default_is_the_stronger_on_scifact(shared_data: Path) -> None:
    task = read_beir(shared_data / "beir" / "scifact")
    strong, anserini = evaluate_bm25(task), evaluate_bm25(task, ANSERINI)
    assert (strong.queries, strong.documents) == (300, 5183)
    assert anserini.ndcg_at_10 == pytest.approx(0.6769, abs=0.0005)  # published: 0.665 (BEIR) to 0.679 (Anserini)
    assert strong.ndcg_at_10 > anserini.ndcg_at_10, (strong, anserini)


def test_identifiers_are_also_indexed_by_their_parts(tmp_path: Path) -> None:
    names = ["parse_header", "HTTPHeaderReader", "__init__", "größeWert", "utf8", "header"]
    by_hand = [
        "parse_header parse header",
        "HTTPHeaderReader HTTP Header Reader",
        "__init__ init",
        "größeWert größe Wert",
        "utf8",
        "header",
    ]
    split = BM25Settings(split_identifiers=True)
    index, expected = BM25(names, split, folder=tmp_path), BM25(by_hand)
    for query in ("header", "init", "a wert", "parse", "utf8"):
        hits, there = index.search([query], 6), expected.search([query], 6)
        assert hits.rows_QK.tolist() == there.rows_QK.tolist()
        assert hits.scores_QK.tolist() == there.scores_QK.tolist()
    found = index.search(["parse_header"], 6).rows_QK[0].tolist()
    assert found[0] == 0 and sorted(found[:3]) == [0, 1, 5]  # the whole identifier counts, too
    for folder in (None, tmp_path):  # another index on disk
        assert BM25(names, folder=folder).search(["header"], 6).rows_QK.tolist() == [[5] + [-1] * 5]
    assert [(s, e) for s, e in index.matches("headers", "def parse_header(x):")] == [(4, 16)]
    assert BM25(names).matches("headers", "def parse_header(x):") == []
