"""Decide which files of a folder belong to a model: only these are verified and published. And `Check`, a row of the result.

The clean process imports this file, so it imports only the standard library.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

# Paths in the folder: settings, tokenizer and weights of a model, of one of its modules (1_Pooling) or of a tokenizer
# (lm_tokenizer); the card with its figures; licenses; the ONNX file. Everything else stays where it is.
MODEL_FILE = re.compile(
    r"""(?:(?:\w+_)?\d{1,2}_[A-Z]\w*/|\w*tokenizer/)*
        (?:(?:config|generation_config|modules|router_config|adapter_config|tokenizer|special_tokens_map|added_tokens|vocab
           |chat_template|config_sentence_transformers|sentence_\w+_config|wordembedding_config
           |hybrid|\w*tokenizer_config|\w*processor_config)\.json
          |(?:adapter_)?model(?:-\d{5}-of-\d{5})?\.safetensors|(?:adapter_)?model\.safetensors\.index\.json
          |merges\.txt|vocab\.txt|(?:spiece|sentencepiece[\w.]*|tokenizer|source|target)\.(?:model|spm)|chat_template\.jinja)
      |(?:\w*tokenizer/)?additional_chat_templates/[\w-]+\.jinja
      |README\.md|(?i:licen[sc]e|notice)(?:\.md|\.txt)?|figures/[\w.-]+\.(?:png|jpe?g|svg|webp)|onnx/model\.onnx(?:_data)?""",
    re.VERBOSE,
)
HYBRID = "hybrid.json"
"""What `adapt` has fitted for a model: the settings of BM25, the weights, and the verdict."""
_DOCUMENT = re.compile(r"(?i:readme|licen[sc]e|notice)[\w.-]*|figures/.*")
# Weights in other formats: made from an earlier model, they give its vectors.
_CONVERTED = re.compile(r"(?:onnx|openvino)/.*|(?:pytorch|tf|flax|rust)_model[\w.-]*|(?:[\w-]*/)?pytorch_model\.bin")
VOCABULARY = re.compile(
    r"(?:.*/)?(?:tokenizer|vocab|added_tokens|special_tokens_map)\.json|(?:.*/)?(?:vocab|merges)\.txt"
)
_SIBLING = re.compile(r"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)  # transformers copies only these imports


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


def as_table(checks: Iterable[Check]) -> str:
    """Format the checks as a table with one line each."""
    rows = list(checks)
    width = max((len(check.name) for check in rows), default=0)
    return "\n".join(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<{width}}  {check.detail}" for check in rows)


class Contents(NamedTuple):
    """The paths of a folder's files, relative to it: those of the model, and the others."""

    included: list[str]
    skipped: list[str]


def contents(folder: Path, *, links: bool = False) -> Contents:
    """Return which files belong to the model.

    Hidden files are ignored. Links are skipped, because they may lead to other files of the author, unless `links` is given for a
    snapshot in the Hub's cache, where every file is a link.
    """
    code, found = code_files(folder), Contents([], [])
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not any(part.startswith(".") for part in PurePosixPath(name).parts):
            belongs = (MODEL_FILE.fullmatch(name) or name in code) and (links or not path.is_symlink())
            (found.included if belongs else found.skipped).append(name)
    return found


def is_of_model(name: str) -> bool:
    """Return whether a file goes with a model that is replaced. Cards, figures, licenses and the user's own files stay."""
    return bool(_CONVERTED.fullmatch(name) or (MODEL_FILE.fullmatch(name) and not _DOCUMENT.fullmatch(name)))


def copy_model(folder: Path, target: Path, *, links: bool = False) -> Contents:
    """Copy the files of a model to a new folder, and return the `contents` of the old one; with `links`, link to them."""
    found = contents(folder, links=links)
    target.mkdir(parents=True)
    for name in found.included:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (os.symlink if links else shutil.copyfile)((folder / name).resolve(), target / name)
    return found


def read_json(file: Path, default: Any = None) -> Any:
    """Return the content of a JSON file, or `default` if it cannot be read or has another type; None allows all types."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return default
    return content if default is None or isinstance(content, type(default)) else default


def listed_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the path and the type of each module in modules.json."""
    entries = [entry for entry in read_json(folder / "modules.json", []) if isinstance(entry, dict)]
    return [(str(entry.get("path", "")), str(entry.get("type", ""))) for entry in entries]


def auto_maps(folder: Path) -> Iterator[str]:
    """Yield each class of remote code that the model refers to: `module.Class` or `repository--module.Class`."""
    for name in ("config.json", "tokenizer_config.json"):
        for file in sorted(folder.rglob(name)):
            mapping = read_json(file, {}).get("auto_map")
            for value in mapping.values() if isinstance(mapping, dict) else ():
                yield from (one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str))
    yield from (kind for _, kind in listed_modules(folder) if not kind.startswith("sentence_transformers."))


def code_files(folder: Path) -> set[str]:
    """Return the Python files that transformers or sentence-transformers run: those in an auto_map, and their imports."""
    waiting = [reference.partition(".")[0] + ".py" for reference in auto_maps(folder) if "--" not in reference]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found and (folder / name).is_file():
            found.add(name)
            code = (folder / name).read_text(encoding="utf-8", errors="replace")
            waiting += [f"{module}.py" for module in _SIBLING.findall(code)]
    return found
