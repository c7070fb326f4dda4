"""Words in all scripts: the one definition for limits in words, n-grams, BM25 and queries.

A word is a run of letters, digits and combining marks (the vowel signs of Hindi and Arabic, decomposed accents). Text is compared in one
Unicode form without invisible characters such as soft hyphens. In scripts without spaces, overlapping pairs of characters take the place
of words, as in Lucene's CJKAnalyzer; for lengths, 1.5 Chinese characters, 2 kana or 3 characters of Thai, Lao, Khmer, Burmese and
Tibetan count as a word, so that the translations of a text have at least as many words as the text, and at most half more.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise


def _class(characters: Iterable[int]) -> str:
    """Return ascending code points as ranges for a character class."""
    ranges: list[list[int]] = []
    for character in characters:
        if ranges and ranges[-1][1] == character - 1:
            ranges[-1][1] = character
        else:
            ranges.append([character, character])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)


def _letters(first: int, last: int) -> str:
    """Return the letters, marks and digits of a block."""
    return _class(c for c in range(first, last + 1) if unicodedata.category(chr(c))[0] in "LMN")


_KANA = "\u3041-\u309a\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f\U0001b000-\U0001b16f"
_HAN = "\u3005-\u3007\u3105-\u312f\u31a0-\u31bf\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_SOUTH_EAST_ASIAN = "".join(
    _letters(first, last)
    for first, last in (
        (0x0E00, 0x109F),  # Thai, Lao, Tibetan, Burmese
        (0x1780, 0x17D3),  # Khmer
        (0x17D7, 0x17FF),
        (0x1950, 0x19DF),  # Tai Le, New Tai Lue
        (0x1A20, 0x1AAF),  # Tai Tham
        (0x1B00, 0x1B7F),  # Balinese
        (0xA980, 0xA9FF),  # Javanese, Burmese
        (0xAA60, 0xAADF),  # Burmese, Tai Viet
    )
)
UNSPACED = _HAN + _KANA + _SOUTH_EAST_ASIAN
"""Letters, marks and digits of scripts without spaces, for a character class."""
HANGUL = "\u1100-\u11ff\u3131-\u318e\ua960-\ua97c\uac00-\ud7fb"
_BLOCKS = (*range(0xAD, 0x3400), *range(0xA600, 0xAC00), *range(0xFB00, 0x1F000))  # without Han and Hangul
MARKS = _class(c for c in _BLOCKS if unicodedata.category(chr(c))[0] == "M" and not re.match(f"[{UNSPACED}]", chr(c)))
"""Combining marks of scripts with spaces."""
INVISIBLE = (
    _class(c for c in _BLOCKS if unicodedata.category(chr(c)) == "Cf")
    + "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff"
)
"""Soft hyphens, zero-width spaces and joiners, marks of direction, variation selectors and fillers."""
LETTER = rf"[\w{MARKS}{INVISIBLE}]"
"""A character of a word in unchanged text."""

_INVISIBLE = re.compile(f"[{INVISIBLE}]")
_ASCII_WORD = re.compile(r"[^\W_]+")
_WORD = re.compile(rf"[{UNSPACED}]+|[^\W_{UNSPACED}](?:[^\W_{UNSPACED}]+|[{MARKS}])*")
UNSPACED_CHARACTER = re.compile(f"[{UNSPACED}]")
_WORD_LENGTH = 42
"""The sum of `_weight` of the characters of a word."""
_RUNS = [(re.compile(f"[{_HAN}]+"), 28), (re.compile(f"[{_KANA}]+"), 21), (re.compile(f"[{_SOUTH_EAST_ASIAN}]+"), 14)]
_SPACED = rf"[^\W{UNSPACED}][^\s{UNSPACED}]*"
_SPACED_WORD = re.compile(_SPACED)
# A run without spaces and the punctuation after it, or text between white space from its first letter.
_RUN = re.compile(rf"([{UNSPACED}]+)[^\w\s(\[\u00ab\u2018\u201c\u3008\u300a\u300c\u300e\u3010\uff08]*|{_SPACED}")
# Where a South-East Asian word is not divided: before a mark or vowel of the last letter, and after one of the next letter.
_WITH_NEXT, _WITH_LAST = (
    re.compile("[\u0e40-\u0e44\u0ec0-\u0ec4\u1039\u17d2]"),
    re.compile("[\u0e30-\u0e33\u0eb0-\u0eb3]"),
)


def normal(text: str) -> str:
    r"""Return a text in one Unicode form (NFKC) and without invisible characters.

    The Turkish capital becomes a plain i, because its lower case would have a combining mark.

    >>> normal("Energie\u00advers\u200borgung in \uff29\uff33\uff2f"), normal("gro\u0308\u00df")
    ('Energieversorgung in ISO', 'größ')
    """
    return text if text.isascii() else unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)).replace("İ", "i")


def visible(text: str) -> str:
    """Return a text with composed accents (NFC) and without invisible characters."""
    return text if text.isascii() else unicodedata.normalize("NFC", _INVISIBLE.sub("", text))


def words(text: str) -> list[str]:
    """Return the words of a text in normal form and without case; in scripts without spaces, overlapping pairs of characters.

    >>> words("Don't ﬁnd FAULT -- find a_remedy: 東京都!")
    ['don', 't', 'find', 'fault', 'find', 'a', 'remedy', '東京', '京都']
    """
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    found: list[str] = []
    for run in _WORD.findall(normal(text).casefold()):
        found.extend(pairs(run) if UNSPACED_CHARACTER.match(run) else (run,))
    return found


def pairs(run: str) -> list[str]:
    """Return the overlapping pairs of characters of a run; a single character is itself.

    >>> pairs("東京都"), pairs("山")
    (['東京', '京都'], ['山'])
    """
    return list(map("".join, pairwise(run))) or [run]


def count_words(text: str) -> int:
    """Return the number of words, for limits.

    >>> count_words("The river flows to the sea."), count_words("河流流向大海。"), count_words("แม่น้ำไหลลงสู่ทะเล")
    (6, 4, 6)
    """
    if text.isascii() or not UNSPACED_CHARACTER.search(text):
        return len(text.split())
    length = sum(weight * sum(map(len, run.findall(text))) for run, weight in _RUNS)
    return len(_SPACED_WORD.findall(text)) - -length // _WORD_LENGTH


def characters_per_word(character: str) -> float:
    """Return how many of the characters count as a word: 1.5 to 3 in a script without spaces, else 1 (a separate word)."""
    if character < "\u0e00":
        return 1.0
    return next((_WORD_LENGTH / weight for run, weight in _RUNS if run.match(character)), 1.0)


def word_places(text: str) -> list[tuple[int, int]]:
    """Return the start and the end of each word, as `count_words` counts: text between white space, or some characters.

    >>> [text[a:b] for text in ["Rivers, seas", "河流流向大海。"] for a, b in word_places(text)]
    ['Rivers,', 'seas', '河流', '流', '向大', '海。']
    """
    if text.isascii() or not UNSPACED_CHARACTER.search(text):
        return [word.span() for word in re.finditer(r"\S+", text)]
    return [place for run in _RUN.finditer(text) for place in _divided(run)]


def words_at(text: str, places: Sequence[tuple[int, int]]) -> list[list[str]]:
    """Return the words (see `words`) that begin at each place; a pair of characters may end in the next place.

    >>> words_at("河流流向海。 It is", word_places("河流流向海。 It is"))
    [['河流', '流流'], ['流向'], ['向海'], ['it'], ['is']]
    """
    found = []
    for number, (start, end) in enumerate(places):
        is_divided = number + 1 < len(places) and places[number + 1][0] == end
        is_rest = bool(number) and places[number - 1][1] == start and UNSPACED_CHARACTER.match(text, start)
        of_place = words(text[start : end + is_divided])
        found.append([] if is_rest and len(of_place) == 1 and len(of_place[0]) == 1 else of_place)
    return found


def join_words(text: str, places: Iterable[tuple[int, int]]) -> str:
    """Return the words at some places of a text, with spaces between them except where the text has nothing between them."""
    joined, end = "", -1
    for start, stop in places:
        joined += text[start:stop] if start == end or not joined else f" {text[start:stop]}"
        end = stop
    return joined


CLUSTER = re.compile(
    rf"(?:[\u1100-\u115e][\u1161-\u11a7]*|.)[\u11a8-\u11ff\u3099\u309a\uff9e\uff9f{MARKS}{INVISIBLE}]*", re.DOTALL
)
"""A letter with the marks that Unicode may compose with it; the parts of a Korean syllable."""


def _divided(run: re.Match[str]) -> Iterator[tuple[int, int]]:
    """Yield the places of the words of a run."""
    text, (first, stop), last = run.string, run.span(), run.end(1)
    length = 0.0
    for place in range(first, last - 1):
        length += 1 / characters_per_word(text[place])
        if length > 0.999 and not _is_joined(text[place], text[place + 1]):
            yield first, place + 1
            first, length = place + 1, length - 1
    yield first, stop


def _is_joined(last: str, following: str) -> bool:
    return unicodedata.category(following)[0] == "M" or bool(_WITH_NEXT.match(last) or _WITH_LAST.match(following))
