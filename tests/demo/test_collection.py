"""The results of the demo as plain data, against the rankers that `search` uses."""

from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from word_encoder import WORDS, Encoder

from revela_hub.data.sources.source import Document
from revela_hub.demo.collection import Collection, Column, LoadedRetriever, source_of
from revela_hub.retrieval import RankerSettings, build_ranker

TEXTS = [" ".join(WORDS[place : place + 3]) for place in range(len(WORDS) - 2)]


class Backwards(Encoder):
    """Finds the opposite of what `Encoder` finds."""

    def encode_query(self, inputs: list[str], /, **options: object) -> object:
        return -super().encode_query(inputs, batch_size=1, show_progress_bar=False)


def documents() -> list[Document]:
    return [Document(f"/home/me/secret/{place}.txt", text, None, "text") for place, text in enumerate(TEXTS)]


def texts(column: Column) -> list[str]:
    return [result.hit.text for result in column.results]


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    retrievers = [LoadedRetriever("base", Backwards(), "backwards"), LoadedRetriever("adapted", Encoder(), "words")]
    return Collection(documents(), retrievers, tmp_path, cache=tmp_path, name="rivers")


def test_columns_and_their_rows(collection: Collection) -> None:
    columns = collection.search("river sea", 0.3, top_k=4)
    assert [column.title for column in columns] == ["hybrid, BM25 weight 0.3", "adapted", "base", "BM25"]
    _, adapted, base, bm25 = columns
    assert texts(adapted)[0] == "river sea stone" != texts(base)[0] and len(adapted.results) == 4
    assert {"river", "sea"} & set(texts(bm25)[0].split())
    for column in columns:  # folders of this machine are not shown
        sources = [source_of(result.hit) for result in column.results]
        assert all("/" not in source and source.endswith(".txt") for source in sources)
    [result] = collection.search("the rivers", 0.3, 1)[0].results
    assert [result.hit.text[start:end] for start, end in result.matches] == ["river"]  # by its stem


def test_ranks_are_compared_with_the_base_retriever(collection: Collection) -> None:
    hybrid, adapted, base, bm25 = collection.search("river sea", 0.3, top_k=len(TEXTS))
    assert {result.change for result in base.results} == {""}
    places = {text: rank for rank, text in enumerate(texts(base))}
    for column in (hybrid, adapted, bm25):
        for rank, result in enumerate(column.results):
            gain = places[result.hit.text] - rank
            assert result.change == ("=" if not gain else f"▲{gain}" if gain > 0 else f"▼{-gain}")
    assert collection.search("river sea", 0.3, top_k=1)[1].results[0].change == "new"


@pytest.mark.parametrize(("weight", "token_weight"), [(0.3, 0.4), (0.3, 0.0), (0.0, 0.0), (1.0, 0.0)])
def test_the_hybrid_is_that_of_search(
    retriever_folder: Path, tmp_path: Path, weight: float, token_weight: float
) -> None:
    encoder, query = SentenceTransformer(str(retriever_folder), device="cpu"), "river sea"
    retrievers = [LoadedRetriever("base", Encoder(), "words"), LoadedRetriever("adapted", encoder, "bert")]
    collection = Collection(documents(), retrievers, tmp_path, cache=tmp_path, name="rivers", token_weight=token_weight)
    column = collection.search(query, weight, top_k=30)[0]
    assert column.title == f"hybrid, BM25 weight {weight:.1f}{', late interaction' if token_weight else ''}"
    settings = RankerSettings(
        mode="hybrid", identity="bert", weights=[1 - weight, weight], rerank_depth=20, rerank_weight=token_weight
    )
    reranker = "self" if token_weight else None
    ranker = build_ranker(collection.passages, settings, tmp_path, dense=encoder, reranker=reranker)
    [expected] = collection.passages.found(ranker.search([query], 30))
    assert texts(column) == [hit.text for hit in expected]
    scores = [result.hit.score for result in column.results]
    assert scores == pytest.approx([hit.score for hit in expected], abs=1e-5)


def test_one_retriever_and_a_query_without_a_known_word(tmp_path: Path) -> None:
    retrievers = [LoadedRetriever("retriever", Encoder(), "words")]
    collection = Collection(documents(), retrievers, tmp_path, cache=tmp_path, name="rivers")
    both, dense, bm25 = collection.search("zebra", 0.3)
    assert (both.title, dense.title, bm25.title) == ("hybrid, BM25 weight 0.3", "retriever", "BM25")
    assert len(dense.results) == 5 and {result.change for result in dense.results} == {""}
    assert texts(both) == texts(dense)
    assert not bm25.results
