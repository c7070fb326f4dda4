"""Texts with contextual spans: what is neighbour and query of what."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import BertTokenizerFast

from revela_hub.data import build_contexts
from revela_hub.data.text.pseudo_queries import ExtractiveQueries


@pytest.fixture
def documents(tmp_path: Path, texts: list[str]) -> str:
    """A document of six sentences, and one of a single sentence."""
    file = tmp_path / "documents.jsonl"
    rows = [{"text": " ".join([*texts[:4], "Layer upon layer the fox learns.", "Japan jumps over France."])}]
    rows.append({"text": texts[2]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


class Echo:
    """The first two words of a passage are its query."""

    description, queries = "the first two words", 1

    def __call__(self, passages: Sequence[str]) -> list[list[str]]:
        return [[" ".join(passage.split()[:2])] for passage in passages]


def text(tokenizer: BertTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


def test_neighbours_are_of_one_document(tmp_path: Path, documents: str, wordpiece_tokenizer: BertTokenizerFast) -> None:
    settings = {"max_length": 26, "min_tokens": 4, "cache_dir": tmp_path / "cache"}
    rows = build_contexts([documents], wordpiece_tokenizer, contexts=["neighbour"], **settings)
    spans = [row["input_ids"] for row in rows]
    assert len(rows) > 3 and set(rows["expert"]) == {1}
    assert [row["context_ids"] for row in rows] == [*spans[1:], spans[-2]], "the next, and before the last"
    assert all(len(row["input_ids"]) == len(row["word_starts"]) <= 24 for row in rows)


def test_a_query_stands_for_its_span_and_the_span_for_the_query(
    tmp_path: Path, documents: str, wordpiece_tokenizer: BertTokenizerFast
) -> None:
    rows = build_contexts(
        [documents],
        wordpiece_tokenizer,
        contexts=["query"],
        queries=Echo(),
        max_length=26,
        cache_dir=tmp_path / "cache",
    )
    passages, queries = rows.filter(lambda row: row["expert"] == 1), rows.filter(lambda row: row["expert"] == 0)
    assert passages["input_ids"] == queries["context_ids"] and passages["context_ids"] == queries["input_ids"]
    for row in queries:
        passage = text(wordpiece_tokenizer, row["context_ids"])
        assert passage.startswith(text(wordpiece_tokenizer, row["input_ids"]))
    assert rows["row"] == list(range(len(rows)))
    both = build_contexts([documents], wordpiece_tokenizer, queries=Echo(), max_length=26, cache_dir=tmp_path / "cache")
    assert len(both) > 2 * len(passages)


def test_extracted_queries_are_what_tells_a_passage_from_the_others() -> None:
    passages = [
        "The patient has a fever. Malaria parasites invade the liver.",
        "The patient has a fever. Rest in bed helps.",
        "The patient has a fever, and then, the patient rests.",
        "",
    ]
    queries = ExtractiveQueries(queries=2, words=4)(passages)
    assert queries[0][0] == "malaria parasites invade the" and queries[1][0] == "rest in bed helps"
    assert all(len(query.split()) <= 4 for found in queries for query in found)
    assert queries[3] == [] and len(queries[0]) == 2
    assert queries[0][1].split()[:2] != queries[0][0].split()[:2]
    assert ExtractiveQueries(queries=2, words=4)(passages) == queries
