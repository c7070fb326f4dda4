"""Check a model folder by reading its files: complete weights, no local path, no secret, only imports that readers have."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from .consistency import contradictions, setting_faults
from .contents import auto_maps, code_files, contents, listed_modules, read_json
from .kinds import content_faults
from .secrets import VOCABULARIES, secret_faults
from .weights import NotReadable, adapter_faults, weights_faults

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_CHECKPOINT = re.compile(r"(^|/)checkpoint-\d+$")
_NAME_KEYS = re.compile(r"(\w*_)?name_or_path|(\w*_)?(path|dir|directory|folder|file)")
_NAMES = {"_name_or_path", "name_or_path", "base_model_name_or_path", "tokenizer_name_or_path"}
_ROOTS = (
    r"home|root|Users|users|mnt|data|tmp|scratch|work|workspace|content|opt|srv|var|usr|lustre|gpfs|nfs|storage|private"
)
# A value that is a path as a whole: below a common root folder, or relative to a folder, home or drive.
_LOCAL_PATH = re.compile(rf"(file:)?/+({_ROOTS})/.+|(~|\.{{1,2}})[/\\].+|file:.+|[A-Za-z]:[\\/].+|\\\\[\w.]+\\.+")
_ANY_PATH = re.compile(r"([/~]|\.{1,2}[/\\]|file:|[A-Za-z]:[\\/]).+")
# Prompts are free text, and labels and special tokens may begin with a slash.
_FREE_TEXT = {
    "prompts", "chat_template", "added_tokens_decoder", "weight_map", "special_tokens_map", "id2label", "label2id",
    "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens",
}  # fmt: skip


class Check(NamedTuple):
    """One row of the table: what was checked, whether it passed, and the fault or a summary."""

    name: str
    ok: bool
    detail: str

    @classmethod
    def of(cls, name: str, faults: Iterable[str], fine: str) -> "Check":
        """Return a check that fails with the first of the faults; without a fault its detail is `fine`."""
        fault = next(iter(faults), "")
        return cls(name, not fault, fault or fine)


def check_files(folder: Path, allowed: frozenset[str], *, adapter_only: bool, offline: bool) -> Iterator[Check]:
    """Yield the checks that do not load the model. Its code may import the `allowed` top-level modules."""
    fault = folder_fault(folder)
    yield Check("folder", not fault, fault or "configuration and safetensors weights")
    if fault:
        return
    names = sorted(contents(folder, downloaded=True).included)
    merged = "an adapter of a Hub model" if adapter_only else "merged"
    code = sorted(code_files(folder))
    self_contained = f"self-contained: {', '.join(code)}" if code else "none needed"
    yield Check.of("paths", _path_faults(folder, names), "no local paths")
    yield Check.of("secrets", secret_faults(folder, names), "no token, no key, no home folder")
    yield Check.of("adapters", adapter_faults(folder, names, adapter_only), merged)
    yield Check.of("remote code", _code_faults(folder, allowed, offline), self_contained)


# --- the folder


def folder_fault(folder: Path) -> str:
    """Return why readers could not load the folder, or an empty string."""
    try:
        return next(_folder_faults(folder), "")
    except NotReadable as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or folder.name} cannot be read: {error.strerror}"


def _folder_faults(folder: Path) -> Iterator[str]:
    wanted = [folder / name for name in ("config.json", "modules.json")]
    if not any(file.is_file() for file in wanted):
        yield from (f"{file.name} is not a file" for file in wanted if file.exists())
        if not (folder / "adapter_config.json").is_file():
            yield f"{folder.name} contains neither modules.json nor config.json: not a model folder"
    found = contents(folder, downloaded=True)
    yield from content_faults(folder, sorted(found.included))
    for file in sorted(folder.rglob("*.json")):
        where = file.relative_to(folder)
        if not file.is_file():
            yield f"{where} is not a file"
        elif not any(part.startswith(".") for part in where.parts):
            content = _json(where, file.read_bytes())
            expected = list if where.as_posix() == "modules.json" else dict
            if where.as_posix() in _MAIN_FILES and not isinstance(content, expected):
                yield f"{where} contains a {type(content).__name__} instead of a {expected.__name__}"
    yield from _module_faults(folder)
    yield from weights_faults(folder)
    yield from contradictions(folder, found)
    yield from setting_faults(folder)


_MAIN_FILES = ("config.json", "modules.json", "tokenizer.json", "tokenizer_config.json")


def _json(where: Path, data: bytes) -> Any:
    """Return the content of a JSON file.

    Raises:
        NotReadable: it is not JSON, or uses a name twice.
    """
    if data.startswith(b"version https://git-lfs"):
        raise NotReadable(f"{where} is a Git LFS pointer, not the file: run git lfs pull")
    if not data.strip():
        raise NotReadable(f"{where} is empty")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_without_repeats if len(data) < 2**20 else None)
    except (ValueError, RecursionError) as error:
        raise NotReadable(f"{where} is not valid JSON: {str(error)[:200]}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; JSON libraries disagree about which of two values for a name they use."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return content


def _module_faults(folder: Path) -> Iterator[str]:
    if not (folder / "modules.json").is_file():
        others = ["config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling"]
        found = next((name for name in others if (folder / name).exists()), None)
        if found and read_json(folder / others[0], {}).get("model_type") != "CrossEncoder":
            yield f"{found} belongs to a sentence-transformers model, but modules.json with its pooling is missing"
        return
    entries, modules = read_json(folder / "modules.json", []), listed_modules(folder)
    if not entries:
        yield "modules.json lists no modules"
    if len(modules) < len(entries):
        yield f"modules.json: an entry without path or type among {str(entries)[:80]}"
    for place, kind in modules:
        path = PurePosixPath(place)
        if path.is_absolute() or ".." in path.parts or "\\" in place:
            yield f"modules.json: the module path {place!r} is outside of the folder"
            return
        if kind.endswith(".StaticEmbedding") and not (folder / path / "tokenizer.json").is_file():
            yield f"{path / 'tokenizer.json'} is missing: copy it from the original model"
        activation = read_json(folder / path / "config.json", {}).get("activation_function")
        if kind.endswith("Dense") and isinstance(activation, str) and not activation.startswith("torch."):
            yield f"{path / 'config.json'}: the activation {activation} is not from torch, so readers get Tanh instead"


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
                yield f"{where}, a local path: use a Hub id, or remove it"


# --- remote code


def _code_faults(folder: Path, allowed: frozenset[str], offline: bool) -> Iterator[str]:
    """Yield code that readers would not get, and imports that transformers rejects on their machines."""
    for where, reference in auto_maps(folder):
        repository, foreign, name = reference.rpartition("--")
        file = f"{name.partition('.')[0]}.py"
        if foreign and offline:
            found = f"{where}: auto_map runs code of another repository, {repository}, which may change or be private"
            yield f"{found}: copy its files into the folder"
        elif not foreign and not (folder / file).is_file() and where != "modules.json":
            yield f"{where}: auto_map refers to {name}, but {file} is missing"
    for name in sorted(code_files(folder)):
        yield from (f"{name}:{line} {fault}" for line, fault in _import_faults(folder / name, allowed))


def _import_faults(file: Path, allowed: frozenset[str]) -> Iterator[tuple[int, str]]:
    from transformers.dynamic_module_utils import get_imports

    try:
        modules, lines = get_imports(file), file.read_text(encoding="utf-8").splitlines()
    except (SyntaxError, ValueError, RecursionError) as error:
        yield getattr(error, "lineno", None) or 1, f"is not valid Python: {getattr(error, 'msg', error)}"
        return
    for module in (module for module in modules if module not in allowed):
        imports = re.compile(rf"\s*(import|from)\s.*\b{module}\b")
        place = next((number for number, line in enumerate(lines, 1) if imports.match(line)), 1)
        yield place, f"imports {module}, which readers may not have installed"
    for number, line in enumerate(lines, 1):
        if found := re.match(r"\s*from\s+\.(\S*)\s+import\b", line):
            if not found[1].isidentifier():
                yield number, "is a relative import that the Hub does not resolve: use `from .sibling import name`"
            elif not (file.parent / f"{found[1]}.py").is_file():
                yield number, f"imports from {found[1]}.py, which is missing"
