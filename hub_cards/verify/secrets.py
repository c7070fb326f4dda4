"""Tokens, keys and home folders, found in the bytes of any file.

The rules are the prefixes that services publish for this purpose. The detectors that exist as packages were looked at:
detect-secrets (1.5.0, of 2024) knows no Hub, Google or Anthropic token, reads lines of text, and its entropy rules fire on
vocabularies. What its rules by prefix find is found here, too; its rules without one (Discord, Twilio, IBM) are left out.
Part of `verify.py`'s clean process: standard library only.
"""

from __future__ import annotations

import re
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
    "a password in an address": rb"\b[a-z][a-z0-9+.-]{2,12}://[^/\s:@\"'<>{}]{1,64}:[^/\s:@\"'<>{}$]{5,}@[\w.-]+",
    "a key or password": rb"(?i:\b[\w-]*(?:api_?key|secret|passwd|password|auth_?token|access_?token|hub_?token)[\w-]*)"
    rb"[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?=[\w+/=.-]{0,80}\d)(?=[\w+/=.-]{0,80}[A-Za-z])[\w+/=.-]{16,}",
}
_TOKENS = {name: re.compile(rule) for name, rule in _RULES.items()}
_NOT_IN_VOCABULARIES = ("a key or password", "a password in an address")
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
_LARGEST = 64 * 2**20  # bytes of a file that are looked at; weights begin with their header, the only text in them


def secret_faults(folder: Path, names: list[str]) -> Iterator[str]:
    """Yields what the files hold that should not leave the machine.

    Args:
        folder: the model.
        names: of the files that would.
    """
    own = str(Path.home()).encode()
    for name in names:
        with (folder / name).open("rb") as stream:
            raw = stream.read(2**20 if name.endswith(".safetensors") else _LARGEST)
        data = raw.replace(b"\0", b"") if b"\0" in raw else raw  # UTF-16
        unescaped = re.sub(rb"\\[nrt]", b"||", data)  # of JSON: a token may be the first word of a line
        vocabulary = Path(name).name in VOCABULARIES
        for kind, rule in _TOKENS.items():
            if not (vocabulary and kind in _NOT_IN_VOCABULARIES) and (match := rule.search(unescaped)):
                yield f"{name}:{_line(data, match.start())} holds what looks like {kind}"
        for match in _HOME.finditer(data):
            if place := _home(data, match, vocabulary):
                yield f"{name}:{_line(data, match.start())} names a home folder, {place}"
        if len(own) > 5 and (at := data.find(own + b"/")) >= 0:
            yield f"{name}:{_line(data, at)} names your home folder {own.decode(errors='replace')}/"


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
