"""Rules that detect tokens, keys and passwords.

We do not use the package detect-secrets (1.5.0), because it does not detect tokens of the Hub, Google and Anthropic, and its
entropy rules report vocabularies. All of its rules by prefix are included here.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_PLACEHOLDER = rb"(?!(?i:(?:your|my|the)?[_-]?(?:password|passwd|token|secret|api[_-]?key|key))\b)"
_MIXED = rb"(?=[\w-]{0,200}\d)(?=[\w-]{0,200}[A-Z])"  # with a digit and a capital letter, unlike words
_ADDRESS = (
    rb"(?<=[A-Za-z0-9+.-]{2}://)(?:[^/\s:@\"'<>{}]{0,64}:" + _PLACEHOLDER + rb"[^/\s:@\"'<>{}$]{5,200}@[\w.-]"
    rb"|(?=[\w-]{0,200}\d)(?=[\w-]{0,200}[A-Za-z])[\w-]{20,200}@[\w.-])"
)
# Kind -> prefix of its tokens -> expression for the rest. Searching for the prefixes first is ten times as fast as searching
# for the expressions. A prefix that begins with a letter or digit must not follow another one.
_RULES: dict[str, dict[str, bytes]] = {
    "a Hub token": {"hf_": rb"(?:oauth_|jwt_[\w-]*\.?)?[A-Za-z0-9]{20}", "api_org_": rb"[A-Za-z0-9]{20}"},
    "an AWS key": dict.fromkeys(("AKIA", "ASIA", "ABIA", "ACCA"), rb"[A-Z0-9]{16}\b") | {"A3T": rb"[A-Z0-9]{17}\b"},
    "an OpenAI or Anthropic key": {"sk-": _MIXED + rb"[\w-]{20}|[0-9a-f]{32}\b|or-v1-[0-9a-f]{32}"},
    "a private key": {
        "-----BEGIN ": rb"(?:[A-Z0-9]+ ){0,9}PRIVATE KEY(?: BLOCK)?-----",
        "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY": rb"",
        "PuTTY-User-Key-File-": rb"\d",
        "AGE-SECRET-KEY-1": rb"[A-Z0-9]{50}",
    },
    "a GitHub token": dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), rb"[A-Za-z0-9]{36}") | {"github_pat_": rb"\w{40}"},
    "a GitLab token": {"gl": rb"(?:pat|rt|ptt|cbt|dt|ft|soat|imt|agent|oas)-[\w-]{20}"},
    "a Google key": {"AIza": rb"[\w-]{35}", "ya29.": rb"[\w-]{30}", "GOCSPX-": rb"[\w-]{28}", ":APA91b": rb"[\w-]{60}"},
    "a Slack token": {
        "xox": rb"[abeoprs]-[\w-]{10}",
        "xapp-": rb"\d-\w+-\d+-\w{20}",
        "hooks.slack.com/": rb"(?:services|workflows|triggers)/T\w+/\w+/\w",
    },
    "a messenger's token": {
        ":AA": rb"(?<=\d{8}:AA)[\w-]{33}(?![\w-])",
        **dict.fromkeys(("discord.com/api/webhooks/", "discordapp.com/api/webhooks/"), rb"\d{17,20}/[\w-]{60}"),
    },
    "a token of a model service": {
        **dict.fromkeys(("gsk_", "r8_", "nvapi-", "pplx-", "xai-", "fw_", "wandb_v1_"), rb"[A-Za-z0-9_-]{30}"),
        **dict.fromkeys(("jina_", "tvly-", "pcsk_"), _MIXED + rb"[\w-]{30}"),
        "pa-": _MIXED + rb"[\w-]{40}",
        "lsv2_": rb"[ps][tk]_[0-9a-f]{32}_",
        "dapi": rb"[0-9a-f]{32}\b",
    },
    "a token of a package registry": {
        "npm_": rb"[A-Za-z0-9]{36}",
        "pypi-AgE": rb"[\w-]{40}",
        "dckr_": rb"[po]at_[\w-]{20}",
        "rubygems_": rb"[0-9a-f]{48}",
    },
    "a payment or mail key": {
        **dict.fromkeys(("sk_live_", "rk_live_"), rb"[A-Za-z0-9]{20}"),
        "SG.": rb"[\w-]{20,80}\.[\w-]{20}",
        "key-": rb"[0-9a-f]{32}\b",
        "-us": rb"(?<=\b[0-9a-f]{32}-us)\d{1,2}\b",
        **dict.fromkeys(("sq0csp-", "sq0atp-"), rb"[\w-]{22}"),
        "shp": rb"(?:at|ca|pa|ss)_[0-9a-f]{32}",
        "SK": rb"[0-9a-f]{32}\b",
    },
    "a token of a web service": {
        "hvs.": rb"[\w-]{24}",
        **dict.fromkeys(("dop_v1_", "doo_v1_", "dor_v1_"), rb"[0-9a-f]{64}"),
        **dict.fromkeys(("sbp_", "bkua_"), rb"[0-9a-f]{40}"),
        "nfp_": rb"[A-Za-z0-9]{36}",
        "lin_api_": rb"[A-Za-z0-9]{40}",
        "HRKU-": rb"[\w-]{36}",
        "NRAK-": rb"[A-Z0-9]{27}",
        "PMAK-": rb"[0-9a-f]{24}-[0-9a-f]{34}",
        "sl.": _MIXED + rb"[\w-]{100}",
        **dict.fromkeys(("sntrys_eyJ", "ATATT3xFfGF0", "fm2_"), rb"[\w+/=-]{40}"),
        ".atlasv1.": rb"[\w-]{60}",
        "dp.": rb"(?:pt|st|ct|sa|scim|audit)\.[\w.-]{40}",
        "pscale_": rb"(?:tkn|pw|oauth)_[\w.-]{32}",
        "glsa_": rb"[A-Za-z0-9]{32}_[0-9a-f]{8}",
        "glc_eyJ": rb"[\w+/=]{30}",
        "secret_": rb"[A-Za-z0-9]{43,44}\b",
        "ntn_": rb"\d{10,}[A-Za-z0-9]{30}",
    },
    "a storage key": {
        "AccountKey=": rb"[A-Za-z0-9+/=]{60}",
        **dict.fromkeys(("?sig=", "&sig="), rb"[A-Za-z0-9%+/=]{40}"),
        "X-Amz-Signature=": rb"[0-9a-f]{64}",
    },
    "a signed token": {"eyJ": rb"[\w-]{10,8000}\.eyJ[\w-]{10,8000}\.[\w-]{10}"},
    "a password in an address": {"://": _ADDRESS},
}  # fmt: skip
BY_NAME = "a key or password"  # detected by the word before it, which vocabularies and decoded noise may contain, too
_VALUE = rb"[\w-]{0,80}[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?=[\w+/=.-]{0,80}\d)(?=[\w+/=.-]{0,80}[a-z])[\w+/=.-]{16}"
_WHOSE = ("auth", "access", "hub", "hf", "api", "bot", "refresh", "bearer", "private", "deploy")
# As above, but case-insensitive, and anything may precede the prefix.
_IN_ANY_CASE: dict[str, dict[str, bytes]] = {
    "an AWS key": {"aws": rb"_?secret_?(?:access_?)?key[\"'\s:=]{1,6}[a-z0-9/+]{40}"},
    "a login": {
        "authorization": rb"[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:basic|bearer|token)\s{1,9}"
        rb"(?=[\w+/=.-]{0,200}\d)(?=[\w+/=.-]{0,200}[a-z])[\w+/=.-]{16}",
        "machine": rb"\s{1,9}\S{1,99}\s{1,9}login\s{1,9}\S{1,99}\s{1,9}password\s{1,9}"
        + _PLACEHOLDER
        + rb"[^\s<${]{5}",
        "curl": rb"\s[^\n]{0,200}?(?:-u|--user)[ =]?[\"']?[^\s:$<{\"']{1,99}:" + _PLACEHOLDER + rb"[^\s:$<{\"']{5}",
    },
    BY_NAME: {name: _VALUE for name in ("secret", "passwd", "password")}
    | {whose: rb"[_-]?token" + _VALUE for whose in _WHOSE}
    | {"api": rb"[_-]?(?:key|token)" + _VALUE},
}


class Rule(NamedTuple):
    """A kind of token with its prefix and the expression for the rest."""

    kind: str
    prefix: bytes
    rest: re.Pattern[bytes]


def _compiled(rules: dict[str, dict[str, bytes]], flags: re.RegexFlag) -> list[Rule]:
    flat = ((kind, start.encode(), rest) for kind, of_kind in rules.items() for start, rest in of_kind.items())
    return [Rule(kind, start, re.compile(rest, flags)) for kind, start, rest in flat]


_EXACT, _ANY_CASE = _compiled(_RULES, re.RegexFlag(0)), _compiled(_IN_ANY_CASE, re.IGNORECASE)
_MIN_LENGTH = 12  # characters of a token, with its prefix
# Bytes that tokens do not contain become spaces: white space, quotes, brackets, backslashes and non-ASCII.
_SPACED = bytes(code if 32 < code < 127 and code not in b"\"'<>{}\\" else 32 for code in range(256))


def long_words(data: bytes) -> bytes:
    """Return the words that are long enough for a token; of a vocabulary, these are few."""
    return b" ".join([word for word in data.translate(_SPACED).split() if len(word) >= _MIN_LENGTH])


def found(data: bytes, words: bytes, *, by_name: bool) -> Iterator[tuple[str, int]]:
    """Yield the kind and position of the first match of each rule in a file with these `long_words`."""
    for rule in _EXACT:
        if b" " not in rule.prefix and rule.prefix not in words:
            continue
        for at in places(data, rule.prefix):
            inside = rule.prefix[:1].isalnum() and data[at - 1 : at].isalnum()
            if not inside and rule.rest.match(data, at + len(rule.prefix)):
                yield rule.kind, at
                break
    lowered = data.lower()
    for rule in _ANY_CASE:
        for at in places(lowered, rule.prefix) if by_name or rule.kind != BY_NAME else ():
            if rule.rest.match(data, at + len(rule.prefix)):
                yield rule.kind, at
                break


def places(data: bytes, part: bytes) -> Iterator[int]:
    """Yield the positions of a part."""
    at = data.find(part)
    while at >= 0:
        yield at
        at = data.find(part, at + 1)
