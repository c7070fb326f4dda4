"""Lone surrogates, which Python and JSON allow, but tokenizers, Arrow and UTF-8 do not; and file names that can be printed."""

import re
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def without_surrogates(value: Any) -> Any:
    r"""Return a text or a JSON value with each lone surrogate replaced by U+FFFD.

    >>> without_surrogates({"text": ["caf\udce9", 1]}) == {"text": ["caf\ufffd", 1]}
    True
    """
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    return value


def printable_name(name: str) -> str:
    r"""Return a file name as printable text, in one line and without control characters.

    Bytes that are not UTF-8 (surrogates in Python) become `\udcff`.

    >>> print(printable_name("caf\udcff, two\nlines, \x1b[31mred"))
    caf\udcff, two\nlines, \x1b[31mred
    """
    text = name.encode("utf-8", "backslashreplace").decode()
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
