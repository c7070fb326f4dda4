"""Files that hold no text to read: how they are recognised, and what to do about the common formats."""

import re
from collections import Counter

from revela_hub.data.sources.unicode import UTF16

PROBED_BYTES = 8 * 1024
"""Number of bytes at the beginning of a file that are examined."""
_BASE64 = re.compile(rb"(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])(?=\D*\d)[A-Za-z0-9+/]{40,}={0,2}")  # no sequence of DNA
_REMEDIES = {
    "save sheets as CSV": ".numbers .ods .xls .xlsb .xlsm .xlsx",
    "save documents as .docx": ".doc .docm .dot .dotx .odt .pages .rtf .wpd",
    "save slides as .pptx": ".odp .pps .ppt .pptm",
    "save e-mail as .eml": ".msg .pst",
    "unpack archives; of compressed files, only .jsonl.gz is read": ".7z .bz2 .gz .rar .tar .tgz .xz .zip .zst",
    "save text as UTF-8": ".csv .json .log .md .rst .srt .tex .tsv .txt .vtt .xml .yaml .yml",
}


def is_binary(start: bytes) -> bool:
    r"""Return whether a file begins as none of text: with a NUL byte (git's rule), as RTF, or mostly with lines of base64.

    >>> is_binary(b"\x89PNG\0"), is_binary(b"{\\rtf1 Notes}"), is_binary(b"Notes\n"), is_binary("Notes".encode("utf-16"))
    (True, True, False, False)
    """
    if start.startswith(UTF16):
        return False
    encoded = sum(len(line) for line in start.splitlines() if _BASE64.fullmatch(line))
    return b"\0" in start or start.startswith(b"{\\rtf") or 2 * encoded > len(start)


def remedies(endings: Counter[str]) -> list[str]:
    """Return what to do about binary files with these endings."""
    return [remedy for remedy, names in _REMEDIES.items() if endings.keys() & set(names.split())]
