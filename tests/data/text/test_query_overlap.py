"""Which queries does training text contain?"""

import pytest

from revela_hub.data.sources.source import Document
from revela_hub.data.text.query_overlap import query_overlap
from revela_hub.errors import UserError


def document(name: str, text: str) -> Document:
    return Document(name, text, None, "text")


LONG = "the committee agreed that all rivers in the northern valley must be measured twice a year by two independent groups"


def test_exact_matches_ignore_case_and_punctuation() -> None:
    text = [document("d", f"Minutes. {LONG.title()}! That was all.")]
    found = query_overlap({"whole": LONG, "other": "rivers in the southern valley were measured"}, text)
    assert [(match.query, match.exact, match.document) for match in found.matches] == [("whole", True, "d")]


def test_thirteen_words_in_a_row_overlap_and_twelve_do_not() -> None:
    parts = LONG.split()
    for shared, expected in ((13, 1), (12, 0)):
        found = query_overlap({"q": LONG}, [document("d", " ".join(["so", *parts[2 : 2 + shared], "they", "said"]))])
        assert len(found.matches) == expected
        assert found.exact == 0
    assert query_overlap({"q": LONG}, [document("d", " ".join(parts[:5]))], n=5).matches[0].shared == " ".join(
        parts[:5]
    )


def test_short_queries_must_be_a_whole_document() -> None:
    text = [document("a", "Vitamin C is in fruit."), document("b", "vitamin c")]
    found = query_overlap({"q": "Vitamin C", "empty": "?"}, text)
    assert [(match.query, match.document) for match in found.matches] == [("q", "b")]


def test_a_later_exact_match_replaces_an_ngram() -> None:
    parts = LONG.split()
    found = query_overlap({"q": LONG}, [document("part", " ".join(parts[:14])), document("whole", LONG)])
    assert [(match.document, match.exact) for match in found.matches] == [("whole", True)]


def test_the_report_counts_and_quotes() -> None:
    found = query_overlap({"q": LONG, "r": "are rivers long or short today"}, [document("d", LONG)])
    lines = str(found).splitlines()
    assert lines[0] == "2 queries, 1 document of training text"
    assert lines[1].split()[-2:] == ["1", "50.0%"]
    assert "exactly in d" in lines[-1]
    assert found.to_dict()["exact"] == 1


def test_an_ngram_needs_two_words() -> None:
    with pytest.raises(UserError, match="--ngram 1: an overlap needs at least 2 words"):
        query_overlap({"q": LONG}, [], 1)
