"""Find tokens, keys and home folders in files.

The rules in `token_rules.py` are based on the prefixes that services publish for this purpose. Base64 and other encodings are
decoded first.
"""

import base64
import contextlib
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from .token_rules import found, long_words, places

# Escapes such as %68 and \u0068.
_ESCAPED = re.compile(rb"%([0-9A-Fa-f]{2})|\\u00([0-9A-Fa-f]{2})")
_DIGITS = b"+/-_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SPACED = bytes(code if code in _DIGITS else 32 for code in range(256))  # spaces for characters not in base64
_MIN_BASE64 = 24  # characters
_HEX = re.compile(rb"(?:[0-9A-Fa-f]{2}){20,}")
_TO_STANDARD = bytes.maketrans(b"-_", b"+/")
_COMPRESSED = re.compile(rb"[zi]TXt[^\x78]{1,400}(?=\x78[\x01\x5e\x9c\xda])", re.DOTALL)  # text in PNG files
# Part of a path -> expression from there to the end of the user name.
_NAME = rb"[\\/]+([^\s\\/\"'<>{}$`,;:()*|\[\]]+)"
_HOMES = {
    b"home": re.compile(rb"\b(?:net)?homes?\d?" + _NAME),
    b"sers": re.compile(rb"\b[Uu]sers" + _NAME),
    b"Documents and Settings": re.compile(rb"Documents and Settings" + _NAME),
    b"root": re.compile(rb"[\\/]root" + _NAME),
}
_WEB = re.compile(rb"(?:https?|ftps?|git|s3|gs|hf|data|wss?)://")
_ROOTED = re.compile(rb"(?:[a-z][\w.+-]*:[\\/]{1,3}[\w.+@-]*)?(?:[\\/]|[A-Za-z]:[\\/])|[a-z][\w.+-]*://")
_PLACEHOLDERS = {b"user", b"username", b"you", b"yourname", b"your", b"name", b"someone", b"path", b"..."}
VOCABULARIES = {
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
}


def secret_faults(folder: Path, names: list[str]) -> Iterator[str]:
    """Yield the secrets and home folders in the files that would be published."""
    own = os.path.expanduser("~").encode()  # "~" without a home folder
    for name in names:
        raw = _text_of(folder / name)
        data = raw.replace(b"\0", b"") if b"\0" in raw else raw  # UTF-16
        unescaped = data
        for escape in (rb"\n", rb"\r", rb"\t"):  # JSON escapes: a token may begin a line
            unescaped = unescaped.replace(escape, b"||")
        vocabulary = Path(name).name in VOCABULARIES
        words = long_words(data)
        for kind, place in found(unescaped, words, by_name=not vocabulary):
            yield f"{name}:{_line(data, place)} contains what looks like {kind}"
        for kind, word in _found_decoded(raw, data, words):
            yield f"{name}:{_line(data, max(0, data.find(word)))} contains what looks like {kind} in another encoding"
        for match in _homes(data):
            if home := _home(data, match, vocabulary):
                yield f"{name}:{_line(data, match.start())} contains a home folder, {home}"
        if len(own) > 5 and (at := data.find(own + b"/")) >= 0:
            yield f"{name}:{_line(data, at)} contains your home folder {own.decode(errors='replace')}/"


def _text_of(file: Path) -> bytes:
    """Return the part of a file that may contain text: of weights, the JSON header; of other files, everything."""
    with file.open("rb") as stream:
        if file.suffix != ".safetensors":
            return stream.read()
        length = int.from_bytes(stream.read(8), "little")
        return stream.read(min(max(length, 2**20), 100 * 2**20))


def _found_decoded(raw: bytes, data: bytes, words: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield secrets in other encodings, and the encoded word in the file."""
    if _tokens(b"\n".join(text for _, text in _decoded(raw, data, words))):
        for word, text in _decoded(raw, data, words):  # again, to find the position
            yield from ((kind, word) for kind in _tokens(text))


def _tokens(text: bytes) -> list[str]:
    return [kind for kind, _ in found(text, text, by_name=False)]


def _decoded(raw: bytes, data: bytes, words: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield words that may be text in another encoding, and that text."""
    if b"%" in data or rb"\u00" in data:
        unescaped = _ESCAPED.sub(lambda match: bytes.fromhex((match.group(1) or match.group(2)).decode()), data)
        if unescaped != data:
            yield data[:1], unescaped
    for word in words.translate(_SPACED).split():
        if len(word) < _MIN_BASE64:
            continue
        for match in _HEX.finditer(word) if len(word) >= 40 else ():
            yield word, bytes.fromhex(match.group().decode()).replace(b"\0", b"")
        digits = word.translate(_TO_STANDARD)
        for start in range(4):  # the characters before it may be base64, too
            whole = digits[start : start + (len(digits) - start) // 4 * 4]
            yield word, base64.b64decode(whole).replace(b"\0", b"")
    for match in _COMPRESSED.finditer(raw) if raw.startswith(b"\x89PNG") else ():
        with contextlib.suppress(zlib.error):
            yield match.group()[:4], zlib.decompressobj().decompress(raw[match.end() :], 2**20)


def _line(data: bytes, place: int) -> int:
    return data.count(b"\n", 0, place) + 1


def _homes(data: bytes) -> Iterator[re.Match[bytes]]:
    for word, rule in _HOMES.items():
        for at in places(data, word):
            # The expression begins at most three characters before the word.
            for start in range(max(0, at - 3), at + 1):
                if match := rule.match(data, start):
                    yield match
                    break


def _home(data: bytes, match: re.Match[bytes], vocabulary: bool) -> str:
    """Return the absolute path of a match; empty for URLs, relative paths and placeholders."""
    before = re.split(rb"[\s\"'<>(){}\[\]`,;=|*]", data[max(0, match.start() - 120) : match.start()])[-1]
    name = match.group(1).rstrip(b".")
    of_root = match.group().startswith((b"/root", b"\\root"))
    rooted = of_root or _ROOTED.match(before)
    if (
        _WEB.match(before)
        or not rooted
        or not name
        or name.lower() in _PLACEHOLDERS
        or name.lower().startswith(b"your")
    ):
        return ""
    if of_root and before:
        return ""
    if vocabulary and data[match.end() : match.end() + 1] not in (b"/", b"\\"):
        return ""
    return (before + match.group()).decode(errors="replace")
