import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from revela_hub.data import ReadReport, build_contexts
from revela_hub.data.text import spans as spans_module
from revela_hub.data.text.pseudo_queries import ExtractiveQueries
from revela_hub.data.text.spans import build_spans
from revela_hub.errors import UserError

SPECIAL = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}


def around(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Adds `<s> ... </s>`, as RoBERTa and XLM-R have them."""
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


@pytest.fixture
def byte_bpe(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=list(SPECIAL.values()), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return around(tokenizer)


@pytest.fixture
def sentencepiece(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=list(SPECIAL.values()), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return around(tokenizer)


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"_id": str(n), "text": text}) + "\n" for n, text in enumerate(texts)))
    return path


def build(path: Any, tokenizer: Any, report: ReadReport | None = None, **settings: Any) -> Dataset:
    cache = Path(path).parent / "cache"
    return build_spans(path, tokenizer, **({"min_tokens": 1, "cache_dir": cache} | settings), report=report)


def words(spans: Dataset, tokenizer: Any) -> list[list[str]]:
    """The words of each span, as the marks have them."""
    found: list[list[str]] = []
    for row in spans:
        assert len(row["input_ids"]) == len(row["word_starts"])
        starts = [*np.flatnonzero(row["word_starts"]).tolist(), len(row["word_starts"])]
        assert starts[0] == 0
        found.append(
            [tokenizer.decode(row["input_ids"][start:end]) for start, end in zip(starts, starts[1:], strict=False)]
        )
    return found


TEXT = "A retriever's text: naïve chunks,  documents!\n\tdef area(width): <mask> </s>"


def test_words_of_wordpiece(tmp_path: Path, wordpiece_tokenizer: Any) -> None:
    text = "A retriever's unhappy text: [MASK] perimeters."
    spans = build(write(tmp_path / "d.jsonl", text), wordpiece_tokenizer)
    expected = ["a", "retriever", "'", "s", "unhappy", "text", ":", "[", "mask", "]", "perimeters", "."]
    # Unknown characters apart: the tiny vocabulary has no apostrophe and no brackets.
    found = [word if word != "[UNK]" else expected[n] for n, word in enumerate(words(spans, wordpiece_tokenizer)[0])]
    assert found == expected
    assert wordpiece_tokenizer.mask_token_id not in spans[0]["input_ids"]  # text is never a special token


def test_words_of_byte_bpe(tmp_path: Path, byte_bpe: Any) -> None:
    spans = build(write(tmp_path / "d.jsonl", TEXT), byte_bpe)
    expected = ["A", " retriever", "'s", " text", ":", " naïve", " chunks", ",", " ", " documents", "!", "\n", "\tdef"]
    found = words(spans, byte_bpe)[0]
    assert found[:11] == expected[:11]
    assert "".join(found) == TEXT  # not a byte is lost, and `<mask>` is text
    assert not set(spans[0]["input_ids"]) & set(byte_bpe.all_special_ids)
    assert spans[0]["word_starts"][:2] == [1, 1] and 0 in spans[0]["word_starts"]


def test_scripts_without_spaces(tmp_path: Path, byte_bpe: Any) -> None:
    source = write(tmp_path / "d.jsonl", "日本語のfox。")
    spans = build(source, byte_bpe)
    # Three bytes and tokens for each character; the pre-tokenizer alone would make one word of all before the full stop.
    assert words(spans, byte_bpe) == [["日", "本", "語", "の", "fox", "。"]]
    assert spans[0]["word_starts"][:9] == [1, 0, 0] * 3
    # The pseudo-queries of contexts, too.
    rows = build_contexts(
        source, byte_bpe, contexts=["query"], queries=ExtractiveQueries(), cache_dir=tmp_path / "cache"
    )
    assert [row["word_starts"][:9] for row in rows] == [[1, 0, 0] * 3] * 2


def test_whole_sentences_of_one_document(tmp_path: Path, wordpiece_tokenizer: Any) -> None:
    # Sentences of four tokens each.
    path = write(tmp_path / "d.jsonl", "The fox jumps. The dog jumps. The sea jumps. The text jumps.", "The raw fox.")
    report = ReadReport()
    spans = build(path, wordpiece_tokenizer, report, max_length=11)

    assert [" ".join(span) for span in words(spans, wordpiece_tokenizer)] == [
        "the fox jumps . the dog jumps .",
        "the sea jumps . the text jumps .",
        "the raw fox .",
    ]
    shorter = words(build(path, wordpiece_tokenizer, max_length=9), wordpiece_tokenizer)
    assert [span[1] for span in shorter] == ["fox", "dog", "sea", "text", "raw"]  # a sentence each
    assert str(report) == "2 documents, 3 spans"


def test_sentences_that_are_too_long(tmp_path: Path, byte_bpe: Any) -> None:
    text = "The fox jumps over the lazy dog and over the river and the mountains. It settles."
    report = ReadReport()
    long = build(write(tmp_path / "w.jsonl", word := "fox " + "zqxjkvbw" * 10), byte_bpe, max_length=22)
    assert byte_bpe.decode([token for row in long for token in row["input_ids"]]) == word
    assert max(len(row["input_ids"]) for row in long) == 20 and all(row["word_starts"][0] == 1 for row in long)
    spans = build(write(tmp_path / "d.jsonl", text), byte_bpe, report, max_length=12)

    found = words(spans, byte_bpe)
    assert "".join(word for span in found for word in span) == text
    assert all(len(row["input_ids"]) <= 10 for row in spans)
    assert [word for span in found for word in span] == [
        text[start:end] for _, (start, end) in byte_bpe.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    ]  # cut between words
    assert report.cut >= 1
    assert "longer than a span (split)" in str(report)


@pytest.mark.parametrize("name", ["wordpiece_tokenizer", "byte_bpe", "sentencepiece"])
def test_tokens_are_those_of_running_text(
    tmp_path: Path, name: str, texts: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = request.getfixturevalue(name)
    documents = [" ".join(texts * 3), "\n\n".join(texts[::-1]), "One. Two! (Three?) 'Four.' U.S. five..."]
    path = write(tmp_path / "d.jsonl", *documents)
    whole = tokenizer(documents, add_special_tokens=False)["input_ids"]

    spans = build(path, tokenizer, max_length=32)
    assert [token for row in spans for token in row["input_ids"]] == [token for tokens in whole for token in tokens]

    # In shorter runs and batches, words begin at the same tokens but for the first of a run.
    monkeypatch.setattr(spans_module, "RUN_CHARACTERS", 100)
    monkeypatch.setattr(spans_module, "BATCH_CHARACTERS", 300)
    again = build(path, tokenizer, max_length=32, cache_dir=tmp_path / "other-cache")
    assert sum(len(row["input_ids"]) for row in again) == pytest.approx(sum(map(len, whole)), rel=0.03)
    assert max(len(row["input_ids"]) for row in again) <= 30


def test_the_cache_depends_on_the_tokenizer_but_not_on_its_state(
    tmp_path: Path, wordpiece_tokenizer: Any, byte_bpe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "d.jsonl", "The fox jumps. The dog jumps.")
    first = build(path, wordpiece_tokenizer)
    wordpiece_tokenizer("called otherwise", truncation=True, max_length=4, padding="max_length")  # changes nothing
    assert build(path, byte_bpe)[:] != first[:] != build(path, wordpiece_tokenizer, max_length=9)[:]
    monkeypatch.setattr(spans_module, "_rows", pytest.fail)
    assert build(path, wordpiece_tokenizer)[:] == first[:]


def test_tokenizers_that_do_not_suit(tmp_path: Path, bpe_tokenizer: Any) -> None:
    path = write(tmp_path / "d.jsonl", "The fox.")
    with pytest.raises(UserError, match="has no mask token"):
        build(path, bpe_tokenizer)
    with pytest.raises((UserError, AttributeError)):
        build(path, ByT5Tokenizer())  # does not report the words of its tokens
