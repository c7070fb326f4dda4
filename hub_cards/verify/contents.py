"""Decide which files of a folder belong to a model: these are published, all others are skipped.

The rules are an allow-list.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

# Files in the folder itself, with the names of weights that transformers, peft and sentence-transformers load.
ROOT_NAME = re.compile(
    r"""(config|generation_config|modules|router_config|adapter_config|tokenizer|special_tokens_map|added_tokens|vocab
      |chat_template|config_sentence_transformers|sentence_\w+_config|wordembedding_config|\w*tokenizer_config|\w*processor_config)\.json
      |(adapter_)?model(\.\w+)?(-\d{5}-of-\d{5})?\.safetensors|(adapter_)?model(\.\w+)?\.safetensors\.index\.json
      |merges\.txt|vocab\.(txt|tsv)|bpe\.codes|[\w.-]*\.(tiktoken|spm)|(spiece|sentencepiece[\w.]*|tokenizer|source|target)
      \.(model|spm)(\.v\d+)?|chat_template\.jinja|README\.md|(?i:(licen[sc]e|notice|copying)[\w.-]*(?<!\.pdf))|CITATION\.cff""",
    re.VERBOSE,
)
_DOCUMENTATION = re.compile(r"(?i)README|LICEN|NOTICE|COPYING|CITATION")
_IN_MODULE = re.compile(r"[\w.-]+\.(json|safetensors|txt|model|jinja|spm|tiktoken)")
MODULE_FOLDER = re.compile(r"(?:\w+_)?\d{1,2}_[A-Z]\w*")  # as saved by sentence-transformers: query_0_Transformer
_TOKENIZER_FOLDER = re.compile(r"\w*tokenizer|additional_chat_templates")
_IMAGE = re.compile(r"[\w. -]+\.(png|jpe?g|gif|svg|webp)", re.IGNORECASE)
# Code as transformers names it; a file such as handler.py belongs to the user.
_CODE = re.compile(r"(modeling|configuration|tokenization|processing|image_processing|feature_extraction)_\w+\.py")
EVAL_RESULTS = re.compile(r"[\w.-]+__[\w.-]+-[\w.-]+\.yaml")  # the names that we give: DATASET-TASK.yaml
_YAML = re.compile(r"[\w. -]+\.ya?ml")
_PICKLE = re.compile(r".*\.(bin|pt|pth|pkl|pickle|ckpt|joblib|dill|npy|npz|ot)", re.IGNORECASE)
_OTHER_FORMAT = re.compile(
    r"(pytorch_model.*\.bin|tf_model.*|flax_model.*|rust_model\.ot|.*\.(onnx|onnx_data|h5|msgpack))"
)
MODEL, QUANTIZED = "onnx/model.onnx", "onnx/model_quantized.onnx"
_OTHER_FORMAT_FOLDERS = {"onnx", "openvino"}
_ONNX = re.compile(r"model\.onnx(_data)?|model_quantized\.onnx")  # the names that other programs look for
_SIBLING = re.compile(r"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)  # transformers copies only these imports
_IGNORED = {".git", ".gitattributes", ".gitignore", ".cache", "__pycache__", ".revela_hub", ".DS_Store"}


@dataclass
class Contents:
    """The files of a folder."""

    included: dict[str, Path] = field(default_factory=dict)  # path in the model -> file, for files of the model
    skipped: dict[str, str] = field(default_factory=dict)  # path -> reason, for all other files
    links: list[str] = field(default_factory=list)  # problems with symbolic links
    # The skipped files that can run code when loaded, except weights that also exist as safetensors.
    pickles: list[str] = field(default_factory=list)

    def copy_to(self, target: Path, *, links: bool = False) -> None:
        """Copy the included files, or link to them, in a new folder."""
        target.mkdir(parents=True)
        for name, file in self.included.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if links:
                (target / name).symlink_to(file.resolve())
            else:
                shutil.copyfile(file, target / name)


def contents(folder: Path, *, downloaded: bool = False) -> Contents:
    """Return which files belong to the model; in a `downloaded` snapshot in the Hub's cache every file is a link."""
    found = Contents()
    modules, named = module_folders(folder), code_files(folder) | _images_in_card(folder)
    for path in _walk(folder, found, downloaded):
        name = path.relative_to(folder).as_posix()
        if name in named or _belongs(name, modules):
            found.included[name] = path
            continue
        found.skipped[name] = _why_skipped(path, name)
        other_format = _OTHER_FORMAT.fullmatch(path.name) and any(path.parent.glob("*.safetensors"))
        if _PICKLE.fullmatch(path.name) and not other_format:
            found.pickles.append(name)
    return found


def belongs_by_name(name: str) -> bool:
    """Return whether a file in a repository is loaded with a model, so that an old one would break a new model.

    Licenses, cards, pictures, documents, weights in other formats and the user's own files are not. The results in
    `.eval_results` that we wrote are: they are scores of the old model.
    """
    path = PurePosixPath(name)
    if len(path.parts) == 1:
        return bool(_CODE.fullmatch(name) or ROOT_NAME.fullmatch(name)) and not _DOCUMENTATION.match(name)
    if path.parts[0] == ".eval_results":
        return bool(EVAL_RESULTS.fullmatch(path.name))
    module = MODULE_FOLDER.fullmatch(path.parts[0]) or _TOKENIZER_FOLDER.fullmatch(path.parts[0])
    return bool(module and _IN_MODULE.fullmatch(path.name))


def _walk(folder: Path, found: Contents, downloaded: bool) -> Iterator[Path]:
    root = os.path.realpath(folder)
    for place, folders, files in os.walk(folder):  # does not follow links to folders
        folders[:] = sorted(name for name in folders if name not in _IGNORED)
        linked = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for path in (Path(place, name) for name in sorted([*files, *linked]) if name not in _IGNORED):
            where = path.relative_to(folder).as_posix()
            if path.is_symlink() and not (downloaded and path.is_file()):
                if not path.exists():
                    found.links.append(f"{where} is a broken symbolic link: delete it")
                    continue
                if path.is_dir() or os.path.commonpath([root, os.path.realpath(path)]) != root:
                    found.links.append(f"{where} links to a folder or out of the model: replace it with a copy")
                    continue
            if path.is_file():
                yield path
            else:
                found.skipped[where] = "not a regular file"


def _belongs(name: str, modules: list[str]) -> bool:
    path = PurePosixPath(name)
    parent = path.parent.as_posix()
    if parent == ".":
        return bool(ROOT_NAME.fullmatch(name))
    if parent in modules:
        return bool(_IN_MODULE.fullmatch(path.name))
    if len(path.parts) == 2 and _TOKENIZER_FOLDER.fullmatch(parent):
        return path.suffix == ".jinja" or bool(ROOT_NAME.fullmatch(path.name)) and path.suffix != ".safetensors"
    wanted = {"figures": _IMAGE, ".eval_results": _YAML, "onnx": _ONNX}.get(parent)
    return wanted is not None and bool(wanted.fullmatch(path.name))


def _why_skipped(path: Path, name: str) -> str:
    if _OTHER_FORMAT.fullmatch(path.name) or name.split("/")[0] in _OTHER_FORMAT_FOLDERS:
        return "weights in another format"
    if _PICKLE.fullmatch(path.name):
        return "a pickle, which can run code when loaded"
    if path.suffix == ".py":
        return "code that no auto_map refers to"
    if re.match(r"checkpoint-\d+/", name):
        return "a training checkpoint"
    return "not a model file"


def of_type(value: Any, default: Any) -> Any:
    """Return the value, or `default` if the value has another type than `default`; None allows all types."""
    return value if default is None or isinstance(value, type(default)) else default


def read_json(file: Path, default: Any = None) -> Any:
    """Return the content of a JSON file, or `default` if it cannot be read or has another type; None allows all types."""
    try:
        return of_type(json.loads(file.read_text(encoding="utf-8")), default)
    except (OSError, ValueError, RecursionError):
        return default


def listed_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the path and the type of each module in modules.json, without malformed entries."""
    entries = [of_type(entry, {}) for entry in read_json(folder / "modules.json", [])]
    pairs = [(entry.get("path"), entry.get("type")) for entry in entries]
    return [(path, kind) for path, kind in pairs if isinstance(path, str) and isinstance(kind, str)]


def module_folders(folder: Path) -> list[str]:
    """Return the subfolders that sentence-transformers loads modules from, including those of a Router, sorted."""
    found: set[str] = set()
    waiting = [path for path, _ in listed_modules(folder)]
    while waiting:
        path = PurePosixPath(waiting.pop())
        if path.as_posix() in found or path.is_absolute() or ".." in path.parts:
            continue
        found.add(path.as_posix())
        routes = of_type(read_json(folder / path / "router_config.json", {}).get("types"), {})
        waiting += [str(path / inner) for inner in routes]
    return sorted(found - {"."})


def auto_maps(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each class of remote code that the model refers to: (file, `module.Class` or `repository--module.Class`)."""
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        for file in sorted(folder.rglob(name)):
            for value in of_type(read_json(file, {}).get("auto_map"), {}).values():
                for reference in value if isinstance(value, list) else [value]:
                    if isinstance(reference, str):
                        yield file.relative_to(folder).as_posix(), reference
    for _, kind in listed_modules(folder):
        if not kind.startswith("sentence_transformers."):
            yield "modules.json", kind


def code_files(folder: Path) -> set[str]:
    """Return the Python files that transformers or sentence-transformers run: those in auto_map, and their imports."""
    waiting = [reference.partition(".")[0] + ".py" for _, reference in auto_maps(folder) if "--" not in reference]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        file = folder / name
        if name in found or not file.is_file():
            continue
        found.add(name)
        waiting += [f"{module}.py" for module in _SIBLING.findall(file.read_text(encoding="utf-8", errors="replace"))]
    return found


def _images_in_card(folder: Path) -> set[str]:
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    named = re.findall(r"!\[[^\]]*\]\(\s*<?([^)\s>]+)", text) + re.findall(r"<img[^>]+src=[\"']([^\"']+)", text)
    names = {name.removeprefix("./") for name in named}
    return {name for name in names if _IMAGE.fullmatch(name.rpartition("/")[2]) and ".." not in name.split("/")}
