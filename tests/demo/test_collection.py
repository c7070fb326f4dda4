"""The results of the demo as plain data, against the rankers that `search` uses."""

import json
from pathlib import Path

import pytest
from adapt_report import adapt_report
from sentence_transformers import SentenceTransformer
from word_encoder import WORDS, Encoder

from revela_hub.data.sources.source import Document
from revela_hub.demo.collection import Collection, LoadedRetriever, Report
from revela_hub.errors import UserError
from revela_hub.retrieval import RankerSettings, build_ranker
from revela_hub.retrieval.hybrid import Hybrid

TEXTS = [" ".join(WORDS[place : place + 3]) for place in range(len(WORDS) - 2)]


class Backwards(Encoder):
    """Finds the opposite of what `Encoder` finds."""

    def encode_query(self, inputs: list[str], /, **options: object) -> object:
        return -super().encode_query(inputs, batch_size=1, show_progress_bar=False)


def documents() -> list[Document]:
    return [Document(f"/home/me/secret/{place}.txt", text, None, "text") for place, text in enumerate(TEXTS)]


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    retrievers = [LoadedRetriever("base", Backwards(), "backwards"), LoadedRetriever("adapted", Encoder(), "words")]
    return Collection(documents(), retrievers, tmp_path, cache=tmp_path, name="rivers")


def test_columns_and_their_order(collection: Collection) -> None:
    columns = collection.search("river sea", 0.3, top_k=4)
    assert [column.title for column in columns] == ["hybrid, BM25 weight 0.3", "adapted", "base", "BM25"]
    _, adapted, base, bm25 = columns
    assert [row.rank for row in adapted.rows] == [1, 2, 3, 4]
    assert adapted.rows[0].text == "river sea stone"
    assert base.rows[0].text != adapted.rows[0].text
    assert {"river", "sea"} & set(bm25.rows[0].text.split())
    assert all(column.milliseconds > 0 for column in columns)


def test_ranks_are_compared_with_the_base_retriever(collection: Collection) -> None:
    hybrid, adapted, base, bm25 = collection.search("river sea", 0.3, top_k=len(TEXTS))
    assert {row.change for row in base.rows} == {""}
    places = {row.text: row.rank for row in base.rows}
    for column in (hybrid, adapted, bm25):
        for row in column.rows:
            gain = places[row.text] - row.rank
            assert row.change == ("=" if not gain else f"▲{gain}" if gain > 0 else f"▼{-gain}")
    _, adapted, *_ = collection.search("river sea", 0.3, top_k=1)
    assert adapted.rows[0].change == "new"


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
def test_the_hybrid_is_that_of_search(collection: Collection, weight: float) -> None:
    parts = [collection.rankers["adapted"], collection.bm25]
    ranker = Hybrid(parts, "minmax", [1 - weight, weight])
    [expected] = collection.passages.found(ranker.search(ranker.encode(["sea moon"]), 5))
    shown = collection.search("sea moon", weight, 5)[0]
    assert [(row.text, row.score) for row in shown.rows] == [(hit.text, hit.score) for hit in expected]


def test_late_interaction_is_that_of_search(retriever_folder: Path, tmp_path: Path) -> None:
    encoder, query, weight = SentenceTransformer(str(retriever_folder), device="cpu"), "river sea", 0.4
    retrievers = [LoadedRetriever("base", Encoder(), "words"), LoadedRetriever("adapted", encoder, "bert")]
    collection = Collection(documents(), retrievers, tmp_path, cache=tmp_path, name="rivers", token_weight=weight)
    column = collection.search(query, 0.3, top_k=30)[0]
    assert column.title == "hybrid, BM25 weight 0.3, late interaction"
    found = {}
    for name, reranker in (("reranked", "self"), ("plain", None)):
        settings = RankerSettings(mode="hybrid", identity="bert", rerank_depth=20, rerank_weight=weight)
        ranker = build_ranker(collection.passages.texts, settings, tmp_path, dense=encoder, reranker=reranker)
        [hits] = collection.passages.found(ranker.search(ranker.encode([query]), 30))
        found[name] = [(hit.text, hit.score) for hit in hits]
    assert [row.text for row in column.rows] == [text for text, _ in found["reranked"]]
    assert [row.score for row in column.rows] == pytest.approx([score for _, score in found["reranked"]], abs=1e-5)
    assert found["reranked"] != found["plain"]


def test_weights_0_and_1_are_the_parts_alone(collection: Collection) -> None:
    for weight, title in ((0, "adapted"), (1, "BM25")):
        columns = {column.title: column for column in collection.search("river sea", weight, 3)}
        alone, both = columns[title], columns[f"hybrid, BM25 weight {weight:.1f}"]
        assert [row.text for row in both.rows] == [row.text for row in alone.rows]


def test_folders_of_this_machine_are_not_shown(collection: Collection) -> None:
    for column in collection.search("river", 0.3, 5):
        assert all("/" not in row.source and row.source.endswith(".txt") for row in column.rows)


def test_words_of_the_query_are_matched_by_their_stems(collection: Collection) -> None:
    row = collection.search("the rivers", 0.3, 1)[0].rows[0]
    assert [row.text[start:end] for start, end in row.matches] == ["river"]


def test_a_query_without_a_known_word_has_no_bm25_results(collection: Collection) -> None:
    both, adapted, _, bm25 = collection.search("zebra", 0.3, 3)
    assert bm25.rows == () and "no text contains a word of the query" in bm25.nothing
    assert [row.text for row in both.rows] == [row.text for row in adapted.rows]


def test_one_retriever(tmp_path: Path) -> None:
    retrievers = [LoadedRetriever("retriever", Encoder(), "words")]
    columns = Collection(documents(), retrievers, tmp_path, cache=tmp_path, name="rivers").search("river", 0.3)
    assert [column.title for column in columns] == ["hybrid, BM25 weight 0.3", "retriever", "BM25"]
    assert len(columns[1].rows) == 5 and {row.change for row in columns[1].rows} == {""}


def test_an_empty_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="empty"):
        Collection([Document("x", "  ", None, "text")], [], tmp_path, cache=tmp_path, name="x")


def test_the_report_of_adapt(tmp_path: Path) -> None:
    file = tmp_path / "adapt.json"
    file.write_text(json.dumps(adapt_report() | {"token_weight": 0.4, "bm25": {"split_identifiers": True}}))
    report = Report.read(file)
    assert (report.bm25_weight, report.token_weight, report.is_base) == (0.2, 0.4, False)
    assert report.bm25.split_identifiers and report.verdict.startswith("Better: +0.050 [+0.030, +0.070]")
    for broken in ("{", "[]", '{"verdict": "BETTER"}'):
        file.write_text(broken)
        with pytest.raises(UserError, match=r"adapt\.json"):
            Report.read(file)
