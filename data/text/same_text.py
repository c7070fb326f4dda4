r"""One notion of "the same text", for everything that holds out, deduplicates, excludes or compares texts.

Texts are the same if they differ only in Unicode form (NFKC: composed or decomposed, full width, ligatures), case, white space,
invisible characters, and punctuation of sentences: quotes, brackets, commas, dashes, full stops, question marks.

Characters that change the meaning count: operators and currency (`a+b`, `C++`, `C#`, `50%`, `$5`), punctuation within numbers
(`1.5`, `10:30`), minus signs, emoji, and `. _ / \` within words. In a text of nothing but punctuation, all of it counts.
"""

import hashlib
import re
import unicodedata
from functools import lru_cache

from revela_hub.data.text.words import CLUSTER, INVISIBLE, UNSPACED, normal

_QUOTES = dict.fromkeys(
    map(ord, "\u00b4\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u2032\u2033\u02b9\u02bb\u02bc"), "'"
)
"""Replaced before NFKC, which would make a space and a mark of the acute accent."""
_INVISIBLE = re.compile(f"[{INVISIBLE}]")
_WITHIN_WORDS = "\u00b7\u055b\u055c\u055e\u05f3\u05f4"
"""Catalan, Armenian and Hebrew punctuation within words."""


_SPECIAL = re.compile('[^\\w\t-\r\x1c-\x1f -~]|["`\u115f\u1160]')
"""All but words, white space and punctuation of ASCII."""
_OPERATORS = "+*/%<=>|&^~"
_BULLET = re.compile(r"\s*(?:[*+>-]|#+)\s+")
_PUNCTUATION = re.compile(r"[*_]+|['(),.:;?!\[\]{}-]")
_SPACE_OF_OPERATOR = re.compile(rf" (?:(?=[{_OPERATORS}])|(?<=[{_OPERATORS}] ))")
_SPACE_OF_UNSPACED = re.compile(rf" (?:(?=[{UNSPACED}])|(?<=[{UNSPACED}] ))")


def text_key(text: str) -> str:
    """Return a form of the text that is equal for the same texts, see the top of this file.

    >>> len({text_key(text) for text in ("What is caf\u00e9?", " what is \u201ccafe\u0301\u201d", "WHAT IS CA\u00adF\u00c9\u200b!")})
    1
    >>> [text_key(text) for text in ("Is C++ > C#?", "It's 1.5, not -15.", "\uff21-\u5217\u3002", "...", "?")]
    ['is c++>c#', 'its 1.5 not -15', 'a列', '...', '?']
    """
    plain = _plain(text)
    padded = f"  {_BULLET.sub('', plain, count=1) if _BULLET.match(plain) else plain}  "
    key = " ".join(_PUNCTUATION.sub(_kept, padded).split()).replace(" - ", "-")  # left between numbers only
    key = _SPACE_OF_OPERATOR.sub("", key)
    if not key.isascii():
        key = _SPACE_OF_UNSPACED.sub("", key)
    return key or " ".join(plain.split()) or " ".join(text.split())


def _kept(match: re.Match[str]) -> str:
    """Return the part of a punctuation mark that counts, given the characters around it."""
    text, mark, start, end = match.string, match[0], match.start(), match.end()
    before, after = text[start - 1], text[end]
    in_number = before.isdigit() and after.isdigit()
    if mark == "'":
        return mark if in_number else ""
    if mark == ",":
        return mark if in_number else " "
    if mark == ":":
        return mark if in_number or before == "[" or after == "]" else " "  # x[1:] is not x[:1]
    if mark == "!":
        return mark if after == "=" or (_in_word(after) and not _in_word(before)) else " "
    if mark == ".":
        return _dot(text, start)
    if mark == "-":
        if _in_word(before) and _in_word(after):
            return mark if in_number else ""
        minus = after == ">" or text[end : end + 2].removeprefix(".")[:1].isdigit()
        return mark if minus or (text[start - 2].isdigit() and text[end + 1].isdigit()) else " "
    if mark[0] in "*_":
        opens = (before.isspace() or before in "([") and _in_word(after)
        closes = not before.isspace() and (after.isspace() or after in ".,;:!?)]'")
        return "" if opens or closes else mark  # emphasis
    if mark in "()[]{}":  # (a + b) * c is not a + (b * c)
        next_to = text[start - 2 : start].strip()[-1:] if mark in "([{" else text[end : end + 2].strip()[:1]
        return f" {mark} " if next_to and next_to in _OPERATORS else " "
    return " "


def _dot(text: str, at: int) -> str:
    before, after = text[at - 1], text[at + 1]
    if not _in_word(after) or before == ".":
        return " "
    initials = before.isalpha() and after.isalpha() and not (_in_word(text[at - 2]) or _in_word(text[at + 2]))
    return "" if initials else "."  # U.S.


def _in_word(character: str) -> bool:
    return character.isalnum() or character > "\x7f"


def text_hash(text: str) -> int:
    """Return a 63-bit hash of `text_key`, which is the same in all processes and fits into a tensor of int64."""
    key = text_key(text).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


@lru_cache(maxsize=4096)
def _replaced(character: str) -> str:
    """Return what replaces a character of `_SPECIAL`: nothing for an invisible one, mostly a space for punctuation."""
    kind = unicodedata.category(character)
    if character in '"`':
        return "'"
    if character.isspace() or character in "\u2014\u2015":  # a dash between words
        return " "
    if kind in ("Cf", "Cc") or character in _WITHIN_WORDS or _INVISIBLE.match(character):
        return ""
    if kind == "Pd" or character == "\u2212":
        return "-"
    if character == "\u2044":  # NFKC makes it of fractions
        return "/"
    if kind == "So" and not (
        "\u2500" <= character <= "\u25ff" or character in "\u00a9\u00ae"
    ):  # emoji, without ornaments
        return f" {character} "
    return " " if kind[0] == "P" or kind == "So" else character


def _plain(text: str) -> str:
    """Return the text in small letters, in one Unicode form, with punctuation of ASCII only."""
    if text.isascii():
        text = text.lower()
    else:
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text.translate(_QUOTES)).casefold())
    return _SPECIAL.sub(lambda match: _replaced(match[0]), text)


# --- a text within a longer one

_BETWEEN_LETTERS = re.compile(r"[\s!-/:-@\[-`{-~]+")


def one_form(text: str) -> str:
    """Return the text in NFKC and in one line, without invisible characters; case and punctuation stay."""
    return " ".join(normal(text).split())


def letters(text: str) -> str:
    r"""Return the letters, marks, digits and other symbols of `text_key`, for a search within longer texts.

    >>> letters("What is\nX?") in letters("He asked: \u201cWhat is x\u201d, again.")
    True
    """
    return _BETWEEN_LETTERS.sub("", _plain(text))


def without_part(text: str, part: str, replacement: str = " ") -> tuple[str, int]:
    """Replace all occurrences of a text, in any form that is the same; return the text and their number.

    >>> without_part("Yes. WHAT is  caf\u00e9? Well.", "What is cafe\u0301?")
    ('Yes.   Well.', 1)
    """
    wanted = letters(part)
    if not wanted or wanted not in letters(text):
        return text, 0
    places = [cluster.span() for cluster in CLUSTER.finditer(text)]
    found = [letters(text[start:end]) for start, end in places]
    at = [number for number, piece in enumerate(found) for _ in piece]  # each letter's cluster
    joined, cut, count, place = "".join(found), 0, 0, 0
    kept: list[str] = []
    while (place := joined.find(wanted, place)) >= 0:
        first, last = at[place], at[place + len(wanted) - 1] + 1
        if not part[-1].isalnum():  # with its full stop
            while last < len(found) and not found[last] and not text[places[last][0]].isspace():
                last += 1
        kept += [text[cut : places[first][0]], replacement]
        cut, count, place = places[last - 1][1], count + 1, place + len(wanted)
    return "".join([*kept, text[cut:]]), count
