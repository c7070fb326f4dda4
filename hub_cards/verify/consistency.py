"""Where a folder contradicts itself: modules without a listing, names in another case, an adapter or a model beside the model.

A reader loads what modules.json lists, by exact names. What lies beside it was meant to be part of the model, or is part of
another one; either way the vectors are not those that the author has seen.
Part of `verify.py`'s clean process: standard library and siblings only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .contents import ROOT_NAME, Contents, module_folders, read_json
from .weights import unmerged

_MODULE = re.compile(r"(?:\w+_)?\d{1,2}_[A-Z][A-Za-z]*")  # as sentence-transformers calls the folders of modules
_TRAINING = re.compile(r"(^|.*/)checkpoint-\d+/.*")
_WITHOUT_WEIGHTS = ("Router", "Asym", "Pooling", "Normalize", "Dropout")
_CONFIGURED = ("Pooling", "Dense")


def contradictions(folder: Path, found: Contents) -> Iterator[str]:
    """Yield what in a folder cannot all be true of one model.

    Args:
        folder: the model.
        found: what of the folder belongs to the model.
    """
    yield from _unlisted_modules(folder)
    yield from _wrong_case(folder, found)
    yield from _listing(folder, found)
    yield from _routes(folder)
    for name in found.stays:
        if "/" in name and not _TRAINING.fullmatch(name) and (what := unmerged(folder / name, folder)):
            yield f"{name} {what}: the adapter was not merged, and readers would get the model without it"


def _unlisted_modules(folder: Path) -> Iterator[str]:
    listed = module_folders(folder)
    for place in ["", *sorted(listed)]:
        for path in sorted((folder / place).iterdir()) if (folder / place).is_dir() else ():
            where = path.relative_to(folder).as_posix()
            if path.is_dir() and _MODULE.fullmatch(path.name) and where not in listed:
                yield f"{where} is the folder of a module that modules.json does not list: list it, or delete the folder"


def _wrong_case(folder: Path, found: Contents) -> Iterator[str]:
    seen: dict[str, str] = {}
    for name in found.goes:
        if (other := seen.setdefault(name.casefold(), name)) != name:
            yield f"{other} and {name} are one file where case does not matter: rename one"
    places = {"", *module_folders(folder)}
    for name in (*found.goes, *found.stays):
        place, _, last = name.rpartition("/")
        right = "README.md" if last.lower() == "readme.md" else last.lower()
        if place in places and ROOT_NAME.fullmatch(right) and not ROOT_NAME.fullmatch(last):
            yield f"{name}: readers look for {right}, and the case of names matters: rename the file, or delete it"


def _listing(folder: Path, found: Contents) -> Iterator[str]:
    """Modules that share a folder or lack their configuration, and weights that no module reads."""
    modules = read_json(folder / "modules.json")
    if not isinstance(modules, list):
        return
    kinds: dict[str, str] = {}
    for entry in modules:
        if not (isinstance(entry, dict) and isinstance(entry.get("path"), str) and isinstance(entry.get("type"), str)):
            continue
        place, kind = entry["path"].strip("/"), entry["type"].rpartition(".")[2]
        if place in kinds:
            yield f"modules.json lists {place or 'the folder itself'} twice, as {kinds[place]} and {kind}"
        kinds[place] = kind
        if place and kind.endswith(_CONFIGURED) and not (folder / place / "config.json").is_file():
            yield f"{place}/config.json is missing, which the module {kind} is read from"
    for place in sorted(module_folders(folder) - kinds.keys()):  # of a Router's routes
        kinds[place] = place.rpartition("_")[2]
    for name in found.goes:
        place = name.rpartition("/")[0]
        if name.endswith(".safetensors") and kinds.get(place, "Router").endswith(_WITHOUT_WEIGHTS):
            yield f"{name} is read by no module of modules.json: it is of another model"


def _routes(folder: Path) -> Iterator[str]:
    for place in ["", *sorted(module_folders(folder))]:
        router = read_json(folder / place / "router_config.json")
        types, routes = (
            (router.get(key) for key in ("types", "structure")) if isinstance(router, dict) else (None, None)
        )
        if not isinstance(types, dict) or not isinstance(routes, dict):
            continue
        file, used = f"{place}/router_config.json".lstrip("/"), {name for names in routes.values() for name in names}
        if lost := sorted(used - types.keys()):
            yield f"{file}: a route goes through {lost[0]}, which has no type"
        if unused := sorted(types.keys() - used):
            yield f"{file}: no route goes through {unused[0]}"
        default = (router.get("parameters") or {}).get("default_route")
        if default is not None and default not in routes:
            yield f"{file}: default_route is {default}, which is not one of {', '.join(routes)}"
