"""What can be said about a model folder by reading its files: no local path, no token, no stray adapter, honest imports.

Part of `verify.py`'s clean process: standard library only.
"""

from __future__ import annotations

import ast
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_CHECKPOINT = re.compile(r"(^|/)checkpoint-\d+$")
_LOCAL_PATH = re.compile(r"(/|~/|\.{1,2}/|file:|[A-Za-z]:[\\/])\S*")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")
_NAME_KEYS = {"_name_or_path", "name_or_path", "base_model_name_or_path", "tokenizer_name_or_path"}
# Vocabularies are full of strings that look like paths, and prompts are whatever the author wants.
_VOCABULARIES = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt"}
_FREE_TEXT = {"prompts", "chat_template", "added_tokens_decoder", "weight_map", "special_tokens_map"}


class Check(NamedTuple):
    """One row of the table: what was checked, whether it holds, and where it does not (or what was found)."""

    name: str
    ok: bool
    detail: str


def check_files(folder: Path, allowed: frozenset[str], *, adapter_only: bool = False) -> Iterator[Check]:
    """Yields the checks that need no model.

    Args:
        folder: the model.
        allowed: top-level modules that a reader can import.
        adapter_only: a PEFT repository, in which adapters are what is wanted.
    """
    fault = _folder_fault(folder)
    yield Check("folder", not fault, fault or "configuration and safetensors weights")
    if fault:
        return
    for name, found, fine in (
        ("paths", _path_faults(folder), "no path of the machine it was made on"),
        ("secrets", _secret_faults(folder), "no token, no home folder"),
        ("adapters", _adapter_faults(folder, adapter_only), "an adapter of a Hub model" if adapter_only else "merged"),
        ("remote code", _import_faults(folder, allowed), _code_files(folder)),
    ):
        fault = next(found, "")
        yield Check(name, not fault, fault or fine)


def _folder_fault(folder: Path) -> str:
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        return f"{folder.name} holds neither modules.json nor config.json: not a model folder"
    for file in sorted(folder.rglob("*.json")):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            return f"{file.relative_to(folder)} is not valid JSON: {error}"
    if not any(folder.rglob("*.safetensors")):
        return "no weights in safetensors form (pickled weights can run code on the reader's machine)"
    return ""


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in _FREE_TEXT:
                yield from _strings(item, name)


def _path_faults(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*.json")):
        if file.name in _VOCABULARIES:
            continue
        for key, text in _strings(json.loads(file.read_text(encoding="utf-8"))):
            named = key in _NAME_KEYS and text and (not _HUB_ID.fullmatch(text) or _CHECKPOINT.search(text))
            if named or (len(text) > 1 and _LOCAL_PATH.fullmatch(text)):
                where = f"{file.relative_to(folder)}: {key} is {text!r}"
                yield f"{where}, a path on the machine it was made on: name a Hub id, or remove it"


def _secret_faults(folder: Path) -> Iterator[str]:
    home = f"{Path.home()}/"
    for file in sorted(folder.rglob("*")):
        if file.suffix not in (".json", ".md", ".py", ".yaml", ".yml", ".txt") or file.name in _VOCABULARIES:
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if _TOKEN.search(line):
                yield f"{file.relative_to(folder)}:{number} holds what looks like a Hub token"
            if len(home) > 2 and home in line:
                yield f"{file.relative_to(folder)}:{number} names your home folder {home}"


def _adapter_faults(folder: Path, adapter_only: bool) -> Iterator[str]:
    config = folder / "adapter_config.json"
    if adapter_only:
        if not config.is_file():
            yield "adapter_config.json is missing"
        return
    if config.is_file():
        yield "adapter_config.json is in the folder: the LoRA weights were not merged into the model"
    for file in sorted(folder.rglob("*.safetensors")):
        if name := next((name for name in safetensors_header(file) if "lora_" in name), None):
            yield f"{file.relative_to(folder)} holds {name}: the LoRA weights were not merged into the model"


def safetensors_header(file: Path) -> dict[str, Any]:
    """Returns tensor name -> type, shape and place, from the head of a safetensors file (8 bytes of length, then JSON)."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    return header


def _code_files(folder: Path) -> str:
    files = [file.name for file in sorted(folder.rglob("*.py"))]
    return f"self-contained: {', '.join(files)}" if files else "none needed"


def _import_faults(folder: Path, allowed: frozenset[str]) -> Iterator[str]:
    """Imports that fail on the reader's machine: other packages, and relative ones that transformers does not follow."""
    for file in sorted(folder.rglob("*.py")):
        where = file.relative_to(folder)
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except SyntaxError as error:
            yield f"{where}:{error.lineno} is not valid Python: {error.msg}"
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level > 0:
                faults = _relative_import_faults(node, file.parent)
            else:
                missing = [name for name in _imported(node) if name not in allowed]
                faults = [f"imports {name}, which readers of the model do not have" for name in missing]
            yield from (f"{where}:{node.lineno} {fault}" for fault in faults)  # type: ignore[attr-defined]


def _imported(node: ast.AST) -> list[str]:
    """The top-level modules that an absolute import imports; none for any other statement."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module.partition(".")[0]]
    return []


def _relative_import_faults(node: ast.ImportFrom, folder: Path) -> list[str]:
    if node.level > 1 or not node.module or "." in node.module:
        return ["is a relative import that the Hub does not follow: only `from .sibling import name` is"]
    if not (folder / f"{node.module}.py").is_file():
        return [f"imports from {node.module}.py, which is not in the folder"]
    return []
