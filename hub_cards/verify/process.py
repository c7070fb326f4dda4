"""The process in which a model is verified, with only the packages that readers have installed."""

import csv
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import metadata
from inspect import getmodulename
from pathlib import Path
from typing import Any

from .contents import of_type, read_json
from .files import Check, check_files
from .progress import last_step, report_step, report_to


def run(task: dict[str, Any]) -> None:
    """Run all checks of a folder, and write them to the task's answer file as a list of [name, ok, detail].

    Without the file the process ended early, whatever its exit status.
    """
    folder = Path(task["folder"])
    checks: list[Check] = []
    report_to(Path(task["answers"]).with_suffix(".doing"))
    try:
        report_step("reading the files")
        modules = hide_other_packages(_requirements(folder))
        from .model import check_model  # imports large libraries, which look for optional packages

        checks += check_files(folder, modules, adapter_only=task["adapter_only"], offline=task["offline"])
        if all(check.ok for check in checks if check.name in ("folder", "remote code", "adapters")):
            reference = Path(task["reference"]) if task["reference"] else None
            vectors = Path(task["vectors"]) if task["vectors"] else None
            for check in check_model(folder, task["trust_remote_code"], task["adapter_only"], reference, vectors):
                checks.append(check)  # one by one, to keep the checks before an exception
    except Exception as error:  # readers would get the same error
        detail = f"{last_step()}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
        checks.append(Check("encoding", False, detail))
    except BaseException as error:  # the model's code ends the process
        checks.append(Check("process", False, f"loading the model raises {type(error).__name__}"))
    finally:
        rows = [(check.name, check.ok, check.detail[:_MAX_DETAIL]) for check in checks]
        Path(task["answers"]).write_text(json.dumps(rows), encoding="utf-8")


_MAX_DETAIL = 2000  # characters; it may contain names from the folder


def limit_memory() -> None:
    """Limit the memory of this process to that of the machine, so that other programs keep running, if possible."""
    try:
        import resource

        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (machine, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # killed first if memory runs out
    except (ImportError, OSError, ValueError):  # another operating system
        return


def end_with(parent: int) -> None:
    """End this process when its parent ends and thereby closes its end of a pipe."""

    def wait() -> None:
        os.read(parent, 1)
        os.killpg(0, signal.SIGKILL)  # with its child processes

    threading.Thread(target=wait, daemon=True).start()


def _requirements(folder: Path) -> list[str]:
    """Return the packages that the model requires according to its configuration, and to load its ONNX files."""
    config = read_json(folder / "config_sentence_transformers.json", {})
    onnx = ["onnxruntime"] if (folder / "onnx").is_dir() else []
    return [*of_type(config.get("requirements"), {}), *onnx]


def hide_other_packages(requirements: Iterable[str]) -> frozenset[str]:
    """Hide all packages that readers may not have from `import` and `importlib.metadata`; return the modules they can import.

    Readers have the standard library, transformers, sentence-transformers, the given packages, and their requirements.
    """
    wanted, packages = ["transformers", "sentence-transformers", *requirements], set()
    while wanted:
        name = _canonical(wanted.pop())
        if name not in packages:
            packages.add(name)
            wanted += _required_by(name)
    modules = {module for package in packages for module in _modules_of(package)}
    modules |= set(sys.stdlib_module_names) | {"__main__", "transformers_modules"}
    sys.meta_path[:] = [_Only(finder, packages, modules) for finder in sys.meta_path]
    return frozenset(modules)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def _required_by(package: str) -> list[str]:
    from packaging.requirements import Requirement

    try:
        needs = [Requirement(line) for line in metadata.requires(package) or []]
    except metadata.PackageNotFoundError:
        return []
    return [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


@cache
def _modules_of(package: str) -> set[str]:
    # Not metadata.packages_distributions: on Python 3.10 it knows only packages with a top_level.txt.
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return set()
    named = (distribution.read_text("top_level.txt") or "").split()
    record = (distribution.read_text("RECORD") or "").splitlines()  # distribution.files makes a path of each line
    first = {row[0].split("/")[0] for row in csv.reader(record)} or {file.parts[0] for file in distribution.files or ()}
    return {*named, *(getmodulename(name) or name for name in first)}


class _Only:
    """A finder of Python that finds only the packages of readers."""

    def __init__(self, finder: Any, packages: set[str], modules: set[str]) -> None:
        self._finder, self._packages, self._importable = finder, packages, modules

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        # _sysconfigdata_* is the only module of the standard library whose name depends on the machine; and these modules.
        known = name.partition(".")[0] in self._importable or name.startswith(("_sysconfigdata_", f"{__package__}."))
        return self._finder.find_spec(name, path, target) if known else None

    def find_distributions(self, *context: Any) -> Iterator[Any]:
        find = getattr(self._finder, "find_distributions", lambda *_: ())
        # Without a name: the rest of an interrupted installation.
        return (found for found in find(*context) if _canonical(found.metadata["Name"] or "") in self._packages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)
