"""One notion of the same text, and all places that hold out, deduplicate or exclude texts by it."""

import unicodedata
from collections import Counter
from typing import Any

import pytest
from datasets import Dataset

from revela_hub.data.mixture.held_out import hold_out, without_queries
from revela_hub.data.mixture.pairs import KnownPairs, Pair, distinct_pairs, fill_negatives
from revela_hub.data.text.same_text import letters, text_hash, text_key, without_part

SAME = [
    ["What is X?", "what is x", "What is X ?", "¿What is X?", "What is X！", "“What is X”", "What is\u200b X\ufeff…"],
    [
        "What is X?",
        "What\xa0is\u3000X",
        "*What is X?*",
        "- What is X?",
        "＂What is Ｘ？＂",
        "(What is X?)",
        "`What is X`",
    ],
    ["don't stop", "don’t stop", "dont stop", "don´t stop"],
    ["e-mail me", "email me", "e‑mail me", "e\u00admail me"],
    ["foo,bar", "foo, bar", "foo bar"],
    ["你好，世界。", "你好世界", "你好 世界"],
    ["用 Python 编程", "用Python编程"],
    ["Straße", "STRASSE"],
    ["café", "cafe\u0301", "CAFÉ"],
    ["U.S. law", "US law"],
    ["50 %", "50%", "50％"],
    ["a b—c", "a b — c", "a b c"],
    ["Energie\u00adversorgung", "Energieversorgung"],
    ["❤", "❤\ufe0f"],
    ["서울은 수도이다.", unicodedata.normalize("NFD", "서울은 수도이다")],
    ["2020–21", "2020-21", "2020 – 21"],
    ["f(x, y)", "f(x,y)"],
    ["हिन्दी क्या है?", "हिन्दी क्या है।"],
    ["ﬁnd", "find"],
]
DIFFERENT = [
    ["C", "C++", "C#"],
    ["1.5", "15", "1 5", "1,5", "-1.5", ".15", "1/5"],
    ["-5", "5", "+5", "5%", "$5", "€5"],
    ["a+b", "a-b", "a*b", "a/b", "a%b", "a=b", "a<b", "a>b", "a^b", "a|b"],
    ["x[1:]", "x[:1]", "x[1]"],
    ["(a + b) * c", "a + (b * c)"],
    ["?", "!", "...", "()", "[]", ";)", ":(", "+", "-", "😀", "😡", ""],
    ["I like 👍", "I like 👎"],
    ["x != y", "x == y", "x = y", "x >= y"],
    ["!x", "x"],
    [".NET", "NET"],
    ["i++", "i--"],
    ["café", "cafe"],
    ["10:30", "1030"],
    ["foo_bar", "foobar"],
    ["therapist", "the rapist"],
]


@pytest.mark.parametrize("texts", SAME, ids=str)
def test_same_texts_have_one_key(texts: Any) -> None:
    assert len(set(map(text_key, texts))) == 1 and len(set(map(text_hash, texts))) == 1


@pytest.mark.parametrize("texts", DIFFERENT, ids=str)
def test_different_texts_have_different_keys(texts: Any) -> None:
    assert len(set(map(text_key, texts))) == len(texts)


def test_the_hash_fits_into_int64_and_takes_lone_surrogates() -> None:
    assert 0 <= text_hash("a\ud800b") < 2**63


def test_a_part_is_found_in_any_form() -> None:
    part = "Énergie: la ville coûte-t-elle cher?"
    decomposed = unicodedata.normalize("NFD", "Avant. énergie\u00ad : la ville  coûte-t-elle cher ? Après.")
    assert letters(part) in letters(decomposed)
    left, number = without_part(decomposed, part)
    assert number == 1 and left.split() == ["Avant.", "?", unicodedata.normalize("NFD", "Après.")]
    assert without_part("nothing of it", part) == ("nothing of it", 0)


def variants(text: Any) -> Any:
    return [text + "?", text.upper(), unicodedata.normalize("NFD", f"«{text}»"), text.replace(" ", "\u200b \xa0")]


def test_a_held_out_question_is_not_trained_on_in_another_form_nor_as_the_passage_of_a_reversed_pair() -> None:
    """Paraphrases are often paired in both directions."""
    questions = [f"où est la rivière {number} née" for number in range(300)]
    pairs = [
        pair
        for number, question in enumerate(questions)
        for form in [variants(question)[number % 4]]
        for pair in [(question, f"paraphrase {number}"), (f"PARAPHRASE {number}!", form)]
    ]
    rows = Dataset.from_list([{"anchor": anchor, "positive": positive} for anchor, positive in pairs])
    left, task = hold_out(rows)
    assert task is not None
    held = set(map(text_key, task.queries.values()))
    assert len(held) == 60 and not held & set(map(text_key, [*left["anchor"], *left["positive"]]))
    assert len(set(map(text_key, task.corpus.values()))) == len(task.corpus)  # each passage once
    assert len(without_queries(rows, [variants(questions[7])[2]])) == 598


def test_known_pairs_negatives_and_repeated_pairs() -> None:
    question, passage = "Où est né Émile?", "Émile est né à Paris."
    known = KnownPairs()
    assert known.add(question, passage)
    for form in variants(question[:-1]):
        assert (form, passage.upper()) in known
    decomposed = unicodedata.normalize("NFD", passage)
    pairs = [Pair(question, passage), Pair(question.lower(), decomposed), Pair(passage, decomposed)]
    assert len(list(distinct_pairs(pairs, dropped=Counter()))) == 1
    pool = [decomposed, passage.upper(), "autre", "Autre!", question.lower()]
    [filled] = fill_negatives([Pair(question, passage, [decomposed])], pool, known, num_negatives=2)
    assert {text_key(text) for text in filled.negatives} == {"autre"}
