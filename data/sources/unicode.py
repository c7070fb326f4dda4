"""Lone surrogates: characters that Python and JSON allow, but tokenizers, Arrow and UTF-8 do not."""

import re
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


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
    r"""Return a file name as printable text: bytes that are not UTF-8 (surrogates in Python) become `\udcff`."""
    return name.encode("utf-8", "backslashreplace").decode()
