"""What can be said about a model folder by reading its files: whole weights, no local path, no secret, honest imports.

Part of `verify.py`'s clean process: standard library and siblings only.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from .consistency import contradictions
from .contents import auto_maps, code_files, contents, read_json
from .kinds import content_faults
from .secrets import VOCABULARIES, secret_faults
from .settings import setting_faults
from .weights import NotReadable, adapter_faults, weights_faults

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_CHECKPOINT = re.compile(r"(^|/)checkpoint-\d+$")
_NAME_KEYS = re.compile(r"(\w*_)?name_or_path|(\w*_)?(path|dir|directory|folder|file)")
_NAMES = {"_name_or_path", "name_or_path", "base_model_name_or_path", "tokenizer_name_or_path"}
_ROOTS = (
    r"home|root|Users|users|mnt|data|tmp|scratch|work|workspace|content|opt|srv|var|usr|lustre|gpfs|nfs|storage|private"
)
# A whole value that is a path: below a root that machines have, or relative to a folder, a home or a drive.
_LOCAL_PATH = re.compile(rf"(file:)?/+({_ROOTS})/.+|(~|\.{{1,2}})[/\\].+|file:.+|[A-Za-z]:[\\/].+|\\\\[\w.]+\\.+")
_ANY_PATH = re.compile(r"([/~]|\.{1,2}[/\\]|file:|[A-Za-z]:[\\/]).+")
# Prompts are whatever the author wants, and labels and special tokens may begin with a slash.
_FREE_TEXT = {
    "prompts", "chat_template", "added_tokens_decoder", "weight_map", "special_tokens_map", "id2label", "label2id",
    "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens",
}  # fmt: skip
_GUARD = re.compile(r"is_\w+_available|TYPE_CHECKING|_available\b|version|find_spec")


class Check(NamedTuple):
    """One row of the table: what was checked, whether it holds, and where it does not (or what was found)."""

    name: str
    ok: bool
    detail: str


def check_files(folder: Path, allowed: frozenset[str], *, adapter_only: bool, offline: bool) -> Iterator[Check]:
    """Yields the checks that need no model.

    Args:
        folder: the model.
        allowed: top-level modules that a reader can import.
        adapter_only: a PEFT repository, in which adapters are what is wanted.
        offline: nothing may be fetched, and so no code of another repository.
    """
    fault = folder_fault(folder)
    yield Check("folder", not fault, fault or "configuration and safetensors weights")
    if fault:
        return
    names = sorted(contents(folder, downloaded=True).goes)
    for name, found, fine in (
        ("paths", _path_faults(folder, names), "no path of the machine it was made on"),
        ("secrets", secret_faults(folder, names), "no token, no key, no home folder"),
        (
            "adapters",
            adapter_faults(folder, names, adapter_only),
            "an adapter of a Hub model" if adapter_only else "merged",
        ),
        ("remote code", _code_faults(folder, allowed, offline), _code_found(folder)),
    ):
        fault = next(found, "")
        yield Check(name, not fault, fault or fine)


# --- the folder


def folder_fault(folder: Path) -> str:
    """Says why the folder is no model that a reader could load, or nothing."""
    try:
        return next(_folder_faults(folder), "")
    except NotReadable as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or folder.name} cannot be read: {error.strerror}"


def _folder_faults(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        broken = next((name for name in ("config.json", "modules.json") if (folder / name).exists()), None)
        if broken:
            yield f"{broken} is not a file"
        if not (folder / "adapter_config.json").is_file():
            yield f"{folder.name} holds neither modules.json nor config.json: not a model folder"
    found = contents(folder, downloaded=True)
    yield from content_faults(folder, sorted(found.goes))
    for file in sorted(folder.rglob("*.json")):
        where = file.relative_to(folder)
        if not file.is_file():
            yield f"{where} is not a file"
            continue
        if any(part.startswith(".") for part in where.parts):
            continue
        content = _json(folder, file)
        expected = list if where.as_posix() == "modules.json" else dict
        if len(where.parts) == 1 and where.stem in ("config", "modules", "tokenizer", "tokenizer_config"):
            if not isinstance(content, expected):
                yield f"{where} holds a {type(content).__name__}, where a {expected.__name__} belongs"
    yield from _module_faults(folder)
    yield from weights_faults(folder)
    yield from contradictions(folder, found)
    yield from setting_faults(folder)


def _json(folder: Path, file: Path) -> Any:
    data = file.read_bytes()
    where = file.relative_to(folder)
    if data.startswith(b"version https://git-lfs"):
        raise NotReadable(f"{where} is a Git-LFS pointer, not the file: run git lfs pull")
    if not data.strip():
        raise NotReadable(f"{where} is empty")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_without_repeats if len(data) < 2**20 else None)
    except (ValueError, RecursionError) as error:
        raise NotReadable(f"{where} is not valid JSON: {str(error)[:200]}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict; Python would keep the last of two values for a name, other readers the first or neither."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return content


def _module_faults(folder: Path) -> Iterator[str]:
    modules = read_json(folder / "modules.json")
    if modules is None:
        left = ["config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling"]
        if found := next((name for name in left if (folder / name).exists()), None):
            config = read_json(folder / "config_sentence_transformers.json")
            if not (isinstance(config, dict) and config.get("model_type") == "CrossEncoder"):
                yield f"{found} is of a sentence-transformers model, but modules.json is missing: pooling and prompts are lost"
        return
    if not modules:
        yield "modules.json lists no modules"
    for entry in modules:
        if not (isinstance(entry, dict) and isinstance(entry.get("path"), str) and isinstance(entry.get("type"), str)):
            yield f"modules.json: {str(entry)[:80]} is not a module with path and type"
            return
        path = PurePosixPath(entry["path"])
        if path.is_absolute() or ".." in path.parts or "\\" in entry["path"]:
            yield f"modules.json: the module path {entry['path']!r} leaves the folder"
            return
        config = read_json(folder / path / "config.json")
        activation = config.get("activation_function") if isinstance(config, dict) else None
        if entry["type"].endswith("Dense") and isinstance(activation, str) and not activation.startswith("torch."):
            yield f"{path / 'config.json'}: readers get Tanh instead of {activation}, which is not one of torch's"


# --- paths


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in _FREE_TEXT and not name.endswith("_token"):
                yield from _strings(item, name)


def _path_faults(folder: Path, names: list[str]) -> Iterator[str]:
    for name in names:
        if not name.endswith(".json") or name.rpartition("/")[2] in VOCABULARIES:
            continue
        for key, text in _strings(read_json(folder / name)):
            named = key in _NAMES and text and (not _HUB_ID.fullmatch(text) or _CHECKPOINT.search(text))
            pathlike = _NAME_KEYS.fullmatch(key) and _ANY_PATH.fullmatch(text)
            if named or pathlike or _LOCAL_PATH.fullmatch(text):
                where = f"{name}: {key} is {text!r}"
                yield f"{where}, a path on the machine it was made on: name a Hub id, or remove it"


# --- remote code


def _code_found(folder: Path) -> str:
    files = sorted(code_files(folder))
    return f"self-contained: {', '.join(files)}" if files else "none needed"


def _code_faults(folder: Path, allowed: frozenset[str], offline: bool) -> Iterator[str]:
    """Code that a reader would not get, and imports that fail on the reader's machine."""
    for where, reference in auto_maps(folder):
        repository, foreign, name = reference.rpartition("--")
        if foreign and offline:
            yield (
                f"{where}: auto_map runs code of another repository, {repository}, which may change or not be for everyone"
                " to see: copy its files into the folder"
            )
        elif not foreign and not (folder / f"{name.partition('.')[0]}.py").is_file() and where != "modules.json":
            yield f"{where}: auto_map names {name}, but {name.partition('.')[0]}.py is not in the folder"
    for name in sorted(code_files(folder)):
        try:
            tree = ast.parse((folder / name).read_bytes())
        except (SyntaxError, ValueError, RecursionError) as error:
            yield f"{name}:{getattr(error, 'lineno', 1)} is not valid Python: {getattr(error, 'msg', error)}"
            continue
        for node in _unguarded(tree):
            if isinstance(node, ast.ImportFrom) and node.level > 0:
                faults = _relative_import_faults(node, (folder / name).parent)
            else:
                missing = [module for module in _imported(node) if module not in allowed]
                faults = [f"imports {module}, which readers of the model do not have" for module in missing]
            yield from (f"{name}:{node.lineno} {fault}" for fault in faults)  # type: ignore[attr-defined]


def _unguarded(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are not under a condition on what is installed: `try`, `if is_..._available()`, `if TYPE_CHECKING`.

    What is imported under such a condition is found by loading, in a process that has what readers have.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Try) and any(_catches_import(handler) for handler in child.handlers):
            for part in [*child.handlers, *child.orelse, *child.finalbody]:
                yield from _unguarded(part)
        elif isinstance(child, ast.If) and _GUARD.search(ast.unparse(child.test)):
            for part in child.orelse:
                yield part
                yield from _unguarded(part)
        else:
            yield child
            yield from _unguarded(child)


def _catches_import(handler: ast.ExceptHandler) -> bool:
    names = "" if handler.type is None else ast.unparse(handler.type)
    return handler.type is None or bool(
        re.search(r"ImportError|ModuleNotFoundError|\bException\b|BaseException", names)
    )


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
