"""Find files and settings of a model folder that contradict each other.

Libraries load the modules in modules.json by their exact names, and silently pick one of two conflicting settings. In all of
these cases readers would get other vectors than the author.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .contents import MODULE_FOLDER, ROOT_NAME, Contents, listed_modules, module_folders, of_type, read_json
from .weights import unmerged

_IN_CHECKPOINT = re.compile(r"(^|.*/)checkpoint-\d+/.*")
_WITHOUT_WEIGHTS = ("Router", "Asym", "Pooling", "SpladePooling", "Normalize", "Dropout")
_CONFIGURED = ("Pooling", "Dense")
_SIMILARITIES = ("cosine", "dot", "dot_score", "euclidean", "manhattan", "maxsim", "meanmaxsim")
_POOLING_SWITCHES = {
    "cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken",
}  # fmt: skip


def contradictions(folder: Path, found: Contents) -> Iterator[str]:
    """Yield the files of a folder that cannot belong to the same model."""
    modules = module_folders(folder)
    yield from _unlisted_modules(folder, modules)
    yield from _wrong_case(found, modules)
    yield from _listed_modules(folder, found, modules)
    yield from _routes(folder, modules)
    for name in found.skipped:
        if "/" in name and not _IN_CHECKPOINT.fullmatch(name) and (what := unmerged(folder / name, folder)):
            yield f"{name} {what}: the adapter is not merged, so readers would get the model without it"


def _unlisted_modules(folder: Path, modules: list[str]) -> Iterator[str]:
    for place in ["", *modules]:
        for path in sorted((folder / place).iterdir()) if (folder / place).is_dir() else ():
            where = path.relative_to(folder).as_posix()
            if path.is_dir() and MODULE_FOLDER.fullmatch(path.name) and where not in modules and _is_module(path):
                yield f"{where} is a module folder, but modules.json does not list it: list it, or delete the folder"


def _is_module(folder: Path) -> bool:
    """Return whether a folder holds a module: its configuration or weights, or no files, as Normalize did before version 6."""
    files = sorted(folder.iterdir())
    return not files or any(file.name == "config.json" or file.suffix == ".safetensors" for file in files)


def _wrong_case(found: Contents, modules: list[str]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for name in found.included:
        if (other := seen.setdefault(name.casefold(), name)) != name:
            yield f"{other} and {name} are the same file on case-insensitive file systems: rename one"
    for name in (*found.included, *found.skipped):
        place, _, last = name.rpartition("/")
        right = "README.md" if last.lower() == "readme.md" else last.lower()
        if place in ("", *modules) and ROOT_NAME.fullmatch(right) and not ROOT_NAME.fullmatch(last):
            yield f"{name}: libraries look for {right}, and file names are case-sensitive: rename or delete the file"


def _listed_modules(folder: Path, found: Contents, modules: list[str]) -> Iterator[str]:
    """Yield modules that share a folder or have no configuration, and weights that no module loads."""
    if not (listed := listed_modules(folder)):
        return
    kinds: dict[str, str] = {}
    for path, kind in listed:
        place, kind = path.strip("/"), kind.rpartition(".")[2]
        if place in kinds:
            yield f"modules.json lists {place or 'the model folder'} twice, as {kinds[place]} and {kind}"
        kinds[place] = kind
        if place and kind.endswith(_CONFIGURED) and not (folder / place / "config.json").is_file():
            yield f"{place}/config.json, the configuration of the module {kind}, is missing"
    for place in modules:  # the others are in the routes of a Router
        kinds.setdefault(place, place.rpartition("_")[2])
    for name in found.included:
        if name.endswith(".safetensors") and kinds.get(name.rpartition("/")[0], "Router") in _WITHOUT_WEIGHTS:
            yield f"{name} is not loaded by any module in modules.json: it belongs to another model"


def _routes(folder: Path, modules: list[str]) -> Iterator[str]:
    for place in ["", *modules]:
        router, file = read_json(folder / place / "router_config.json", {}), f"{place}/router_config.json".lstrip("/")
        types, routes = router.get("types"), router.get("structure")
        if not isinstance(types, dict) or not isinstance(routes, dict):
            continue
        used = {name for names in routes.values() for name in of_type(names, [])}
        if missing := sorted(used - types.keys()):
            yield f"{file}: a route contains {missing[0]}, which has no entry in types"
        if unused := sorted(types.keys() - used):
            yield f"{file}: no route contains {unused[0]}"
        default = (router.get("parameters") or {}).get("default_route")
        if default is not None and default not in routes:
            yield f"{file}: default_route is {default}, not one of {', '.join(routes)}"


def setting_faults(folder: Path) -> Iterator[str]:
    """Yield settings that contradict each other: prompts, similarity, module order, pooling, vocabularies."""
    yield from _prompts_and_similarity("config_sentence_transformers.json", folder)
    yield from _order(folder)
    modules = module_folders(folder)
    for place in modules:
        yield from _pooling(f"{place}/config.json", read_json(folder / place / "config.json", {}))
    for place in ["", *modules]:
        yield from _vocabulary(folder / place, read_json(folder / place / "tokenizer.json", {}))


def _prompts_and_similarity(name: str, folder: Path) -> Iterator[str]:
    config = read_json(folder / name, {})
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        yield f"{name}: prompts must map names to texts, found {str(prompts)[:60]}"
    elif default is not None and default not in prompts:
        yield f"{name}: default_prompt_name is {default!r}, but there is no such prompt"
    if (similarity := config.get("similarity_fn_name")) is not None and similarity not in _SIMILARITIES:
        yield f"{name}: unknown similarity_fn_name {similarity!r}: use one of {', '.join(_SIMILARITIES)}"


def _order(folder: Path) -> Iterator[str]:
    """sentence-transformers loads modules in the order of the list, other libraries by `idx`."""
    entries = [entry for entry in read_json(folder / "modules.json", []) if isinstance(entry, dict)]
    numbers = [entry["idx"] for entry in entries if isinstance(entry.get("idx"), int)]
    if numbers != sorted(set(numbers)):
        yield f"modules.json: the modules are not in the order of their idx, which are {numbers}"
    kinds = [str(entry.get("type")).rpartition(".")[2] for entry in entries]
    if "Normalize" in kinds and "Pooling" in kinds[kinds.index("Normalize") :]:
        yield "modules.json: Normalize has no effect before Pooling: put it after"


def _pooling(where: str, config: dict[str, Any]) -> Iterator[str]:
    """Older versions of sentence-transformers read one switch per pooling mode, version 6 reads `pooling_mode`."""
    switches = {key: value for key, value in config.items() if key.startswith("pooling_mode_")}
    enabled = {key.removeprefix("pooling_mode_") for key, value in switches.items() if value}
    mode = config.get("pooling_mode") if switches else None
    if isinstance(mode, str) and enabled != {_POOLING_SWITCHES.get(mode, mode)}:
        names = ", ".join(f"pooling_mode_{name}" for name in sorted(enabled)) or "none"
        yield f"{where}: pooling_mode is {mode}, but these switches are true: {names}"
    elif mode is None and len(switches) > 1 and not enabled:
        yield f"{where}: every pooling_mode_* is false: set one to true"


def _vocabulary(folder: Path, tokenizer: dict[str, Any]) -> Iterator[str]:
    """Libraries that do not read tokenizer.json read vocab.txt, or vocab.json and merges.txt; tokens must be the same."""
    model = of_type(tokenizer.get("model"), {})
    if not isinstance(vocabulary := model.get("vocab"), dict):
        return
    known = {number: token for token, number in vocabulary.items()}
    for token in of_type(tokenizer.get("added_tokens"), []):
        token = of_type(token, {})
        text, number = token.get("content"), token.get("id")
        if known.get(number, text) != text:
            yield f"tokenizer.json: {known[number]!r} and the added token {text!r} have the same id, {number}"
    other: dict[str, int] = {}
    if model.get("type") == "WordPiece" and (file := folder / "vocab.txt").is_file():
        other = {line: number for number, line in enumerate(file.read_text("utf-8", "replace").split("\n")) if line}
    if model.get("type") == "BPE":
        other = read_json(file := folder / "vocab.json", {})
    for token, number in other.items():
        if vocabulary.get(token, number) != number:
            found = f"{file.name}: {token!r} has the id {number}, but {vocabulary[token]} in tokenizer.json"
            yield f"{found}: save the tokenizer again"
            return
    if model.get("type") == "BPE" and (file := folder / "merges.txt").is_file():
        lines = [line.rstrip("\r") for line in file.read_text("utf-8", "replace").split("\n")]
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or ()]
        if [line for line in lines if line and not line.startswith("#version")] != merges:
            yield "merges.txt and tokenizer.json have different merges: save the tokenizer again"
