"""Which files of a folder belong to a model: those go to the Hub, everything else stays, and a reader needs none of it.

An allow-list: what is not known to belong stays. Part of `verify.py`'s clean process: standard library only.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

# In the folder itself. Weights: the names that transformers, peft and sentence-transformers load.
ROOT_NAME = re.compile(
    r"""(config|generation_config|modules|router_config|adapter_config|tokenizer|special_tokens_map|added_tokens|vocab
      |chat_template|config_sentence_transformers|sentence_\w+_config|\w*tokenizer_config|\w*processor_config)\.json
      |(adapter_)?model(\.\w+)?(-\d{5}-of-\d{5})?\.safetensors|(adapter_)?model(\.\w+)?\.safetensors\.index\.json
      |merges\.txt|vocab\.(txt|tsv)|bpe\.codes|[\w.-]*\.(tiktoken|spm)|(spiece|sentencepiece[\w.]*|tokenizer|source|target)
      \.(model|spm)(\.v\d+)?|chat_template\.jinja|README\.md|(?i:(licen[sc]e|notice|copying)[\w.-]*(?<!\.pdf))|CITATION\.cff""",
    re.VERBOSE,
)
_IN_MODULE = re.compile(r"[\w.-]+\.(json|safetensors|txt|model|jinja|spm|tiktoken)")
_TOKENIZER_FOLDER = re.compile(r"\w*tokenizer|additional_chat_templates")
_PICTURE = re.compile(r"[\w. -]+\.(png|jpe?g|gif|svg|webp)", re.IGNORECASE)
_RESULTS = re.compile(r"[\w. -]+\.ya?ml")
_PICKLE = re.compile(r".*\.(bin|pt|pth|pkl|pickle|ckpt|joblib|dill|npy|npz|ot)", re.IGNORECASE)
_OTHER_FORMAT = re.compile(
    r"(pytorch_model.*\.bin|tf_model.*|flax_model.*|rust_model\.ot|.*\.(onnx|onnx_data|h5|msgpack))"
)
_OTHER_FORMAT_FOLDERS = {"onnx", "openvino"}
_QUIET = {".git", ".gitattributes", ".gitignore", ".cache", "__pycache__", ".revela_hub", ".DS_Store"}


@dataclass
class Contents:
    """What there is in a folder.

    Attributes:
        goes: path in the model -> file, for what belongs to it.
        stays: path -> why, for the rest.
        links: what is wrong with a symbolic link, for each that is.
        pickles: those of `stays` that run code when they are read, and are not the same weights in an older form.
    """

    goes: dict[str, Path] = field(default_factory=dict)
    stays: dict[str, str] = field(default_factory=dict)
    links: list[str] = field(default_factory=list)
    pickles: list[str] = field(default_factory=list)

    def copy_to(self, target: Path, *, links: bool = False) -> None:
        """Copies, or links, what goes into a folder that is made."""
        target.mkdir(parents=True)
        for name, file in self.goes.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if links:
                (target / name).symlink_to(file.resolve())
            else:
                shutil.copyfile(file, target / name)


def contents(folder: Path, *, downloaded: bool = False) -> Contents:
    """Tells what belongs to the model.

    Args:
        folder: the model.
        downloaded: it is a snapshot in the Hub's cache, in which every file is a link.
    """
    found = Contents()
    modules, code = module_folders(folder), code_files(folder)
    pictures = _pictures(folder)
    for path in _walk(folder, found, downloaded):
        name = path.relative_to(folder).as_posix()
        if _belongs(name, modules, code, pictures):
            found.goes[name] = path
        else:
            found.stays[name] = _why(path, name)
            if _PICKLE.fullmatch(path.name) and not (
                _OTHER_FORMAT.fullmatch(path.name) and any(path.parent.glob("*.safetensors"))
            ):
                found.pickles.append(name)
    return found


def belongs_by_name(name: str) -> bool:
    """Whether a file of a repository would be loaded as part of a model, so that an old one would disturb a new model.

    A licence, a card, pictures, documents and weights in other formats are none of it.
    """
    path = PurePosixPath(name)
    if path.suffix == ".py" or path.parts[0] == ".eval_results":
        return True
    if len(path.parts) == 1:
        return bool(ROOT_NAME.fullmatch(name)) and not re.match(r"(?i)README|LICEN|NOTICE|COPYING|CITATION", name)
    module = re.fullmatch(r"\w*\d+_\w+|\w*tokenizer|additional_chat_templates", path.parts[0])
    return module is not None and bool(_IN_MODULE.fullmatch(path.name))


def _walk(folder: Path, found: Contents, downloaded: bool) -> Iterator[Path]:
    root = os.path.realpath(folder)
    for place, folders, files in os.walk(folder):  # does not follow links to folders
        folders[:] = sorted(name for name in folders if name not in _QUIET)
        for name in sorted([*files, *(name for name in folders if os.path.islink(os.path.join(place, name)))]):
            path = Path(place, name)
            if name in _QUIET:
                continue
            if path.is_symlink() and not (downloaded and path.is_file()):
                where, target = path.relative_to(folder).as_posix(), os.path.realpath(path)
                if not os.path.exists(path):
                    found.links.append(f"{where} is a link to nothing, or to itself: delete it")
                    continue
                if path.is_dir() or os.path.commonpath([root, target]) != root:
                    found.links.append(
                        f"{where} is a link that leaves the folder or leads to a folder: copy what it means"
                    )
                    continue
            if path.is_file():
                yield path
            else:
                found.stays[path.relative_to(folder).as_posix()] = "no ordinary file"


def _belongs(name: str, modules: set[str], code: set[str], pictures: set[str]) -> bool:
    path = PurePosixPath(name)
    parent = "" if str(path.parent) == "." else str(path.parent)
    if name in code or name in pictures:
        return True
    if parent == "":
        return bool(ROOT_NAME.fullmatch(name))
    if parent in modules:
        return bool(_IN_MODULE.fullmatch(path.name))
    if len(path.parts) == 2 and _TOKENIZER_FOLDER.fullmatch(parent):
        return (
            bool(ROOT_NAME.fullmatch(path.name)) and not path.name.endswith(".safetensors") or path.suffix == ".jinja"
        )
    if parent == "figures":
        return bool(_PICTURE.fullmatch(path.name))
    return parent == ".eval_results" and bool(_RESULTS.fullmatch(path.name))


def _why(path: Path, name: str) -> str:
    if _OTHER_FORMAT.fullmatch(path.name) or name.split("/")[0] in _OTHER_FORMAT_FOLDERS:
        return "the weights in another format"
    if _PICKLE.fullmatch(path.name):
        return "a pickle, which runs code when it is read"
    if path.suffix == ".py":
        return "code that no auto_map reaches"
    if re.match(r"checkpoint-\d+/", name):
        return "a training checkpoint"
    return "not a file that a model is loaded from"


def read_json(file: Path) -> Any:
    """The file's content; None where there is none that can be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def module_folders(folder: Path) -> set[str]:
    """The subfolders that sentence-transformers loads modules from, also those of a Router, by modules.json."""
    listed = read_json(folder / "modules.json")
    found: set[str] = set()
    waiting = (
        [str(entry.get("path", "")) for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    )
    while waiting:
        path = PurePosixPath(waiting.pop())
        name = "" if str(path) == "." else str(path)
        if name in found or path.is_absolute() or ".." in path.parts:
            continue
        found.add(name)
        router = read_json(folder / name / "router_config.json")
        if isinstance(router, dict) and isinstance(router.get("types"), dict):
            waiting += [str(path / inner) for inner in router["types"]]
    return found - {""}


def auto_maps(folder: Path) -> Iterator[tuple[str, str]]:
    """Every class of remote code that the model's own files name: (file, `module.Class` or `repository--module.Class`)."""
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        for file in sorted(folder.rglob(name)):
            config = read_json(file)
            listed = config.get("auto_map") if isinstance(config, dict) else None
            for value in listed.values() if isinstance(listed, dict) else ():
                for reference in value if isinstance(value, list) else [value]:
                    if isinstance(reference, str):
                        yield file.relative_to(folder).as_posix(), reference
    modules = read_json(folder / "modules.json")
    for entry in modules if isinstance(modules, list) else ():
        kind = entry.get("type") if isinstance(entry, dict) else None
        if isinstance(kind, str) and not kind.startswith("sentence_transformers."):
            yield "modules.json", kind


def code_files(folder: Path) -> set[str]:
    """The Python files that transformers or sentence-transformers run: those of the auto_map, and what they import."""
    waiting = [reference.partition(".")[0] + ".py" for _, reference in auto_maps(folder) if "--" not in reference]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        file = folder / name
        if name in found or not file.is_file():
            continue
        found.add(name)
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                modules = [node.module] if node.module else [alias.name for alias in node.names]
                waiting += [module.replace(".", "/") + ".py" for module in modules]
    return found


def _pictures(folder: Path) -> set[str]:
    """The pictures in the folder that its card shows."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    named = re.findall(r"!\[[^\]]*\]\(\s*<?([^)\s>]+)", text) + re.findall(r"<img[^>]+src=[\"']([^\"']+)", text)
    names = {name.removeprefix("./") for name in named}
    return {name for name in names if _PICTURE.fullmatch(name.rpartition("/")[2]) and ".." not in name.split("/")}
