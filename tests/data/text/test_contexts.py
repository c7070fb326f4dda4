"""Texts with contextual spans: what is neighbour, overlap and query of what, and who writes the queries."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import BertTokenizerFast, T5Config, T5ForConditionalGeneration

from revela_hub.data import build_contexts
from revela_hub.data.text.pseudo_queries import ExtractiveQueries, Seq2SeqQueries
from revela_hub.errors import UserError


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

    description = identity = "the first two words"

    def __call__(self, passages: Sequence[str]) -> list[list[str]]:
        return [[" ".join(passage.split()[:2])] for passage in passages]


def text(tokenizer: BertTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


def test_neighbours_and_overlaps_are_of_one_document(
    tmp_path: Path, documents: str, wordpiece_tokenizer: BertTokenizerFast
) -> None:
    settings = {"max_length": 26, "min_tokens": 4, "cache_dir": tmp_path / "cache"}
    rows = build_contexts([documents], wordpiece_tokenizer, contexts=["neighbour"], **settings)
    spans = [row["input_ids"] for row in rows]
    assert len(rows) > 3 and set(rows["expert"]) == {1}
    assert [row["context_ids"] for row in rows] == [*spans[1:], spans[-2]], "the next, and before the last"
    assert all(len(row["input_ids"]) == len(row["word_starts"]) <= 24 for row in rows)
    whole = [token for span in spans for token in span]
    overlaps = build_contexts([documents], wordpiece_tokenizer, contexts=["overlap"], **settings)
    for row in overlaps:
        span, context = row["input_ids"], row["context_ids"]
        place = next(i for i in range(len(whole)) if whole[i : i + len(context)] == context)
        start = next(i for i in range(len(whole)) if whole[i : i + len(span)] == span)
        shared = set(range(place, place + len(context))) & set(range(start, start + len(span)))
        assert 0 < len(shared) < len(span) and row["context_word_starts"][0] == 1
        assert not context == span


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


def test_a_seq2seq_model_writes_the_same_queries_again(tmp_path: Path, wordpiece_tokenizer: BertTokenizerFast) -> None:
    config = T5Config(
        vocab_size=len(wordpiece_tokenizer), d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=3,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    wordpiece_tokenizer.save_pretrained(tmp_path)
    passages = ["The capital of France is Paris.", "Rivers carry sediment.", "The quick brown fox"]
    generator = Seq2SeqQueries(str(tmp_path), 2, batch_size=2, max_new_tokens=6)
    queries = generator(passages)
    assert [len(found) <= 2 for found in queries] == [True] * 3 and any(queries)
    assert Seq2SeqQueries(str(tmp_path), 2, batch_size=2, max_new_tokens=6)(passages) == queries
    with pytest.raises(UserError, match="cannot load the query generator"):
        Seq2SeqQueries(str(tmp_path / "nowhere"))(passages)


def test_queries_are_cached_for_their_generator(
    tmp_path: Path, documents: str, wordpiece_tokenizer: BertTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two models in folders of the same name, and of one that was trained further in its folder."""
    monkeypatch.chdir(tmp_path)
    calls: list[str] = []
    monkeypatch.setattr(Seq2SeqQueries, "__call__", lambda self, texts: calls.append(self.name) or Echo()(texts))

    def build(queries: Seq2SeqQueries) -> int:
        calls.clear()
        build_contexts([documents], wordpiece_tokenizer, queries=queries, max_length=26, cache_dir=tmp_path / "cache")
        return len(calls)

    for parent in ("one", "two"):
        (tmp_path / parent / "model").mkdir(parents=True)
        (tmp_path / parent / "model" / "model.safetensors").write_text(f"weights {parent}")
    names = [str(tmp_path / parent / "model") for parent in ("one", "two")]
    assert [build(Seq2SeqQueries(name)) for name in (*names, *names, "one/model")] == [1, 1, 0, 0, 0]
    assert [build(Seq2SeqQueries(names[0], seed=seed)) for seed in (0, 1)] == [0, 1]
    (tmp_path / "one" / "model" / "model.safetensors").write_text("trained further")
    assert build(Seq2SeqQueries(names[0])) == 1
    assert " model (" in Seq2SeqQueries(names[0]).description
    assert " org/model (" in Seq2SeqQueries("org/model").description
