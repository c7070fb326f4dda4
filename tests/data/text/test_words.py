"""Words in all scripts."""

import unicodedata

import pytest

from revela_hub.data.sources.source import Document
from revela_hub.data.synthesis.questions import QuestionFilter
from revela_hub.data.text.chunks import chunk_document
from revela_hub.data.text.ngram_overlap import NearDuplicates
from revela_hub.data.text.pseudo_queries import ExtractiveQueries
from revela_hub.data.text.words import count_words, join_words, word_places, words
from revela_hub.evaluation.question_answering import exact_match, f1, holds_answer

TRANSLATIONS = {
    "English": "The river carries sand and stones from the mountains to the sea.",
    "Chinese": "河流把沙子和石头从山上带到海里。",
    "Japanese": "川は砂と石を山から海へ運びます。",
    "Thai": "แม่น้ำพาทรายและก้อนหินจากภูเขาไปสู่ทะเล",
    "Lao": "ແມ່ນ້ຳພາດິນຊາຍແລະກ້ອນຫີນຈາກພູເຂົາໄປສູ່ທະເລ",
    "Khmer": "ទន្លេនាំខ្សាច់និងថ្មពីភ្នំទៅសមុទ្រ",
    "Burmese": "မြစ်သည်တောင်များမှသဲနှင့်ကျောက်တုံးများကိုပင်လယ်သို့သယ်ဆောင်သည်",
    "Korean": "강은 모래와 돌을 산에서 바다로 쉬지 않고 실어 나른다.",
    "Hindi": "नदी रेत और पत्थरों को पहाड़ों से समुद्र तक ले जाती है।",
}


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_translations_have_about_as_many_words(language: str) -> None:
    text = TRANSLATIONS[language]
    assert 8 <= count_words(text) <= 21
    places = word_places(text)
    assert abs(len(places) - count_words(text)) <= 2
    assert "".join(join_words(text, places).split()) == "".join(text.split())
    for start, _ in places:
        assert unicodedata.category(text[start])[0] != "M"
    for chunk in chunk_document(Document("d", text.strip(".。।") * 20, None, "text"), 6):
        assert count_words(chunk.text) <= 6
        assert unicodedata.category(chunk.text[0])[0] != "M"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("हिन्दी में लिखा", ["हिन्दी", "में", "लिखा"]),
        ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),
        ("كِتَابٌ جديد", ["كِتَابٌ", "جديد"]),
        ("Cafe\u0301 a\u030a x\u0302y", ["café", "å", "x\u0302y"]),
        ("Energie\u00adver\u200bsorgung \ufeffund", ["energieversorgung", "und"]),
        ("क्\u200dष می\u200cروم", ["क्ष", "میروم"]),
        (unicodedata.normalize("NFD", "서울은 수도"), ["서울은", "수도"]),
        ("東京都へ行く。AI", ["東京", "京都", "都へ", "へ行", "行く", "ai"]),
        ("本。山", ["本", "山"]),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert words(text) == found


def test_copies_are_found_and_other_texts_are_not_in_every_script() -> None:
    """In characters, texts with other numbers were copies of each other in Japanese and Thai, but not in English."""
    for text in TRANSLATIONS.values():
        changed = [text[: len(text) // 2] + f" {number} {number + 1} {number + 2} " for number in range(2)]
        seen = NearDuplicates()
        seen.add(changed[0])
        assert changed[1] not in seen and changed[0] in seen


def test_extracted_queries_are_parts_of_the_text() -> None:
    passages = [f"{text} {text[:10]}" for text in TRANSLATIONS.values()]
    for passage, [query] in zip(passages, ExtractiveQueries()(passages), strict=True):
        assert query in passage.lower()
        assert count_words(query) <= 10


def test_answers_in_scripts_without_spaces_are_compared_by_characters() -> None:
    """They were one word, so that passages never held them."""
    assert holds_answer(["中国的首都是北京。"], ["北京"]) and not holds_answer(["中国的首都是北京。"], ["南京"])
    assert f1("北京市", ["北京"]) == pytest.approx(0.8) and exact_match("北京。", ["北京"]) == 1


def test_questions_in_korean_share_words_with_their_passage() -> None:
    keep = QuestionFilter(["강은 모래를 나른다.", "달은 밤에 뜬다."])
    assert keep("강물이 모래가 무엇을 하나요", "강은 모래를 나른다.")
    assert not keep("하늘이 왜 파란가요", "강은 모래를 나른다.")
