"""Lone surrogates: characters that Python and JSON can hold, and that neither a tokenizer, Arrow nor UTF-8 takes."""

import re
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


def without_surrogates(value: Any) -> Any:
    r"""Return a text, or what JSON holds, with U+FFFD for each lone surrogate.

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
    r"""Return a file's name as a text: bytes that are not UTF-8, which Python keeps as surrogates, as `\udcff`."""
    return name.encode("utf-8", "backslashreplace").decode()
