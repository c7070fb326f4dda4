"""Find tokens, keys, home folders and local paths in the text files of a model.

The twelve rules know the prefixes that services publish for this purpose. They find accidents, not secrets that are encoded or
compressed.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .contents import VOCABULARY, read_json

RULES = {
    "a Hub token": r"\b(?:hf|api_org)_[A-Za-z0-9]{30}",
    "an OpenAI or Anthropic key": r"\bsk-(?=[\w-]*\d)[\w-]{20}",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_\w{40}",
    "a GitLab token": r"\bglpat-[\w-]{20}",
    "an AWS key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a Google key": r"\bAIza[\w-]{35}|\bya29\.[\w-]{30}",
    "a Slack token": r"\bxox[abeoprs]-[\w-]{10}",
    "a token of a package registry": r"\bnpm_[A-Za-z0-9]{36}|\bpypi-AgE[\w-]{40}",
    "a token of a model service": r"\b(?:gsk|r8|nvapi|pplx|wandb_v1)[_-](?=[\w-]*\d)[\w-]{30}",
    "a private key": r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY",
    "a signed token": r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10}",
    "a password in an address": r"://[^/\s:@\"'<>{}]*:[^/\s:@\"'<>{}$]{5,}@[\w.-]",
}
# Not a part of a web address or of a longer path. A JSON file has two backslashes for one.
HOME = (
    r"(?<![\w.:/\\-])(?:/home|/Users|/root|[A-Za-z]:[/\\]+Users)[/\\]+"
    r"(?!(?:user|username|you|yourname|name|path)\b)[\w.-]+"
)
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_CHECKPOINT = re.compile(r"(^|/)checkpoint-\d+$")
_PATH = re.compile(r"(/|~|\.{1,2}[/\\]|file:|[A-Za-z]:[\\/]|\\\\).+")
_PATH_KEY = re.compile(r"(\w*_)?(path|dir|directory|folder|file)")


def private_faults(folder: Path, names: list[str]) -> Iterator[str]:
    """Yield what looks private in the files of a model, with the file and the line."""
    home = os.path.expanduser("~")
    own = re.escape(f"{home}/") if len(home) > 5 else r"(?!)"
    rules = {kind: re.compile(rule.encode()) for kind, rule in (RULES | {"a home folder": f"{HOME}|{own}"}).items()}
    for name in names:
        if VOCABULARY.fullmatch(name) or name.endswith((".png", ".onnx", ".onnx_data", ".model", ".spm")):
            continue
        with (folder / name).open("rb") as stream:
            of_weights = name.endswith(".safetensors")  # their header
            data = stream.read(min(int.from_bytes(stream.read(8), "little"), 2**24) if of_weights else -1)
        for kind, rule in rules.items():
            if match := rule.search(data):
                line = data[: match.start()].count(b"\n") + 1
                yield f"{name}:{line} contains what looks like {kind}"
        for key, value in _texts(read_json(folder / name)) if name.endswith(".json") else ():
            if _is_local(key, value):
                yield f"{name}: {key} is {value!r}, a local path: use a Hub id, or remove it"


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in a JSON value with their keys, without prompts and templates."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in ("prompts", "chat_template", "added_tokens_decoder", "id2label"):
                yield from _texts(item, name)


def _is_local(key: str, value: str) -> bool:
    if key.endswith("name_or_path"):
        return bool(value) and (not _HUB_ID.fullmatch(value) or bool(_CHECKPOINT.search(value)))
    return bool(_PATH_KEY.fullmatch(key) and _PATH.fullmatch(value))
