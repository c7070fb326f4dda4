"""Tokens, keys and home folders, found in the bytes of any file.

The rules are the prefixes that services publish for this purpose. The detectors that exist as packages were looked at:
detect-secrets (1.5.0, of 2024) knows no Hub, Google or Anthropic token, reads lines of text, and its entropy rules fire on
vocabularies. What its rules by prefix find is found here, too; its rules without one (Discord, Twilio, IBM) are left out.
Part of `verify.py`'s clean process: standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

_RULES = {
    "a Hub token": rb"\bhf_[A-Za-z0-9]{20,}|\bapi_org_[A-Za-z0-9]{20,}",
    "an AWS key": rb"\b(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}\b"
    rb"|(?i:aws_?secret_?(?:access_?)?key)[\"'\s:=]{1,6}[A-Za-z0-9/+]{40}",
    "an OpenAI or Anthropic key": rb"\bsk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}",
    "a private key": rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
    rb"|---- BEGIN SSH2 ENCRYPTED PRIVATE KEY|PuTTY-User-Key-File-\d",
    "a GitHub token": rb"\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_\w{40,}",
    "a GitLab token": rb"\bgl(?:pat|rt|ptt|cbt|dt|ft|soat|imt|agent|oas)-[\w-]{20,}",
    "a Google key": rb"\bAIza[\w-]{35}|\bya29\.[\w-]{30,}",
    "a Slack token": rb"\bxox[abeoprs]-[\w-]{10,}|hooks\.slack\.com/services/T\w+/B\w+/\w+",
    "a messenger's token": rb"\b\d{8,10}:AA[\w-]{33}(?![\w-])",
    "a token of a model service": rb"\b(?:gsk_|r8_|nvapi-|pplx-|xai-|fw_|wandb_v1_)[A-Za-z0-9_-]{30,}",
    "a token of a package registry": rb"\bnpm_[A-Za-z0-9]{36}|\bpypi-AgE[\w-]{40,}|\bdckr_pat_[\w-]{20,}",
    "a payment or mail key": rb"\b[sr]k_live_[A-Za-z0-9]{20,}|\bSG\.[\w-]{20,}\.[\w-]{20,}|\bkey-[0-9a-f]{32}\b"
    rb"|\b[0-9a-f]{32}-us\d{1,2}\b|\bsq0(?:csp|atp)-[\w-]{22,}",
    "a storage key": rb"AccountKey=[A-Za-z0-9+/=]{60,}|[?&]sig=[A-Za-z0-9%+/=]{40,}|X-Amz-Signature=[0-9a-f]{64}",
    "a signed token": rb"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",
    "a password in an address": rb"\b(?i:[a-z][a-z0-9+.-]{2,12})://[^/\s:@\"'<>{}]{0,64}:[^/\s:@\"'<>{}$]{5,}@[\w.-]+",
    "a login": rb"(?i:\bauthorization)[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?i:basic|bearer|token)\s+"
    rb"(?=[\w+/=.-]*\d)(?=[\w+/=.-]*[A-Za-z])[\w+/=.-]{16,}",
    "a key or password": rb"(?i:\b[\w-]*(?:api[_-]?key|secret|passwd|password|(?:auth|access|hub)[_-]?token)[\w-]*)"
    rb"[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?=[\w+/=.-]{0,80}\d)(?=[\w+/=.-]{0,80}[A-Za-z])[\w+/=.-]{16,}",
}
_TOKENS = {name: re.compile(rule) for name, rule in _RULES.items()}
_BY_NAME = "a key or password"  # goes by the word before it, which a vocabulary and decoded noise may have, too
# Other ways to write the same bytes: %68, \u0068, and base64 or hexadecimal digits in a row.
_ESCAPED = re.compile(rb"%([0-9A-Fa-f]{2})|\\u00([0-9A-Fa-f]{2})")
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{24,}")
_HEX = re.compile(rb"(?:[0-9A-Fa-f]{2}){20,}")
_TO_STANDARD = bytes.maketrans(b"-_", b"+/")
_COMPRESSED = re.compile(rb"[zi]TXt[^\x78]{1,400}(?=\x78[\x01\x5e\x9c\xda])", re.DOTALL)  # text in a PNG picture
_HOME = re.compile(rb"(?:\b(?:home\d?|[Uu]sers)[\\/]+|[\\/]root[\\/]+)([^\s\\/\"'<>{}$`,;:()*|\[\]]+)")
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
    """Yields what the files hold that should not leave the machine.

    Args:
        folder: the model.
        names: of the files that would.
    """
    own = str(Path.home()).encode()
    for name in names:
        raw = _text_of(folder / name)
        data = raw.replace(b"\0", b"") if b"\0" in raw else raw  # UTF-16
        unescaped = re.sub(rb"\\[nrt]", b"||", data)  # of JSON: a token may be the first word of a line
        vocabulary = Path(name).name in VOCABULARIES
        for kind, rule in _TOKENS.items():
            if not (vocabulary and kind == _BY_NAME) and (match := rule.search(unescaped)):
                yield f"{name}:{_line(data, match.start())} holds what looks like {kind}"
        for place, decoded in _decoded(raw, data):
            for kind, rule in _TOKENS.items():
                if kind != _BY_NAME and rule.search(decoded):
                    yield f"{name}:{_line(data, place)} holds what looks like {kind}, in another encoding"
        for match in _HOME.finditer(data):
            if home := _home(data, match, vocabulary):
                yield f"{name}:{_line(data, match.start())} names a home folder, {home}"
        if len(own) > 5 and (at := data.find(own + b"/")) >= 0:
            yield f"{name}:{_line(data, at)} names your home folder {own.decode(errors='replace')}/"


def _text_of(file: Path) -> bytes:
    """What of a file may be text: of weights, the JSON at their head; other files are not larger than `kinds.py` allows."""
    with file.open("rb") as stream:
        if file.suffix != ".safetensors":
            return stream.read()
        length = int.from_bytes(stream.read(8), "little")
        return stream.read(min(max(length, 2**20), 100 * 2**20))


def _decoded(raw: bytes, data: bytes) -> Iterator[tuple[int, bytes]]:
    """What the file says in another encoding, and where."""
    if _ESCAPED.search(data):
        yield 0, _ESCAPED.sub(lambda match: bytes.fromhex((match.group(1) or match.group(2)).decode()), data)
    for match in _HEX.finditer(data):
        yield match.start(), bytes.fromhex(match.group().decode()).replace(b"\0", b"")
    for match in _BASE64.finditer(data):
        digits = match.group().translate(_TO_STANDARD)
        for start in range(4):  # a word before it may be of digits, too
            whole = digits[start : start + (len(digits) - start) // 4 * 4]
            yield match.start(), base64.b64decode(whole).replace(b"\0", b"")
    for match in _COMPRESSED.finditer(raw) if raw.startswith(b"\x89PNG") else ():
        with contextlib.suppress(zlib.error):
            yield match.start(), zlib.decompressobj().decompress(raw[match.end() :], 2**20)


def _line(data: bytes, place: int) -> int:
    return data.count(b"\n", 0, place) + 1


def _home(data: bytes, match: re.Match[bytes], vocabulary: bool) -> str:
    """The path, where the match is in one that begins at a root: not in an address of the web, nor a relative one."""
    before = re.split(rb"[\s\"'<>(){}\[\]`,;=|*]", data[max(0, match.start() - 120) : match.start()])[-1]
    name = match.group(1).rstrip(b".")
    web = b"://" in before and not before.startswith(b"file:")
    rooted = re.match(rb"(?:file:[\\/]*)?(?:[\\/]|[A-Za-z]:[\\/])", before) or match.group().startswith(
        (b"/root", b"\\root")
    )
    if web or not rooted or not name or name.lower() in _PLACEHOLDERS or name.lower().startswith(b"your"):
        return ""
    if match.group().startswith((b"/root", b"\\root")) and before:
        return ""
    if vocabulary and data[match.end() : match.end() + 1] not in (b"/", b"\\"):
        return ""
    return (before + match.group()).decode(errors="replace")
