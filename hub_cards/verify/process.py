"""The process in which a model is verified: what readers of a model have installed, and nothing else.

Part of `verify.py`'s clean process: standard library and siblings only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .contents import read_json
from .files import Check, check_files
from .model import check_model
from .progress import doing, doing_now, report_to


def run(task: dict[str, Any]) -> None:
    """Makes all checks of one folder and writes them, as a list of [name, ok, detail], to the task's answer file.

    The last one is `LAST_WORD`: without it the process has not come to its end, whatever its exit status.
    """
    folder = Path(task["folder"])
    checks: list[Check] = []
    report_to(Path(task["answers"]).with_suffix(".doing"))
    try:
        doing("reading its files")
        readers = Readers.with_requirements(_requirements(folder))
        offline = task.get("offline", True)
        checks += check_files(folder, readers.modules, adapter_only=task["adapter_only"], offline=offline)
        readers.hide_everything_else()
        if all(check.ok for check in checks if check.name in ("folder", "remote code", "adapters")):
            reference = Path(task["reference"]) if task["reference"] else None
            vectors = Path(task["vectors"]) if task.get("vectors") else None
            for check in check_model(folder, task["trust_remote_code"], task["adapter_only"], reference, vectors):
                checks.append(check)  # one by one: those before an exception count
        checks.append(LAST_WORD)
    except Exception as error:  # whatever it is, the reader would see it, too
        checks += [
            Check("encoding", False, f"{doing_now()}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"),
            LAST_WORD,
        ]
    except BaseException as error:  # the model's own code ends the process
        checks += [Check("process", False, f"loading the model raises {type(error).__name__}"), LAST_WORD]
    finally:
        rows = [(check.name, check.ok, check.detail[:_LONGEST_DETAIL]) for check in checks]
        file = Path(task["answers"])
        file.with_suffix(".part").write_text(json.dumps(rows), encoding="utf-8")
        os.replace(file.with_suffix(".part"), file)  # the file is waited for: it must be whole when it is there


LAST_WORD = Check("end", True, "")
_LONGEST_DETAIL = 2000  # characters; names of weights come from the folder


def limit_memory() -> None:
    """Keeps a folder that takes more memory than the machine has from taking other programs with it, where that is possible."""
    try:
        import resource

        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (machine, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # the first to end if memory runs out
    except (ImportError, OSError, ValueError):  # of another system
        return


def end_with(parent: int) -> None:
    """Ends this process when the one that started it does, whose end of a pipe is then closed."""

    def wait() -> None:
        os.read(parent, 1)
        os.killpg(0, signal.SIGKILL)  # and what it has started

    threading.Thread(target=wait, daemon=True).start()


def _requirements(folder: Path) -> list[str]:
    """The packages that the folder itself says its readers need."""
    config = read_json(folder / "config_sentence_transformers.json")
    requirements = config.get("requirements") if isinstance(config, dict) else None
    return list(requirements) if isinstance(requirements, dict) else []


@dataclass(frozen=True)
class Readers:
    """What readers of a model have installed: names of packages, and of the top-level modules they hold."""

    packages: frozenset[str]
    modules: frozenset[str]

    @classmethod
    def with_requirements(cls, requirements: Iterable[str]) -> Readers:
        """The standard library, transformers, sentence-transformers, the given packages, and what these require."""
        wanted, packages = ["transformers", "sentence-transformers", *requirements], set()
        while wanted:
            name = _canonical(wanted.pop())
            if name in packages:
                continue
            packages.add(name)
            wanted += _required_by(name)
        owners = metadata.packages_distributions().items()
        modules = {module for module, names in owners if any(_canonical(name) in packages for name in names)}
        modules |= set(sys.stdlib_module_names) | {"__main__", "transformers_modules"}
        return cls(frozenset(packages), frozenset(modules))

    def hide_everything_else(self) -> None:
        """Makes what readers do not have look as if it were not installed, to `import` and to `importlib.metadata`."""
        sys.meta_path[:] = [_Only(finder, self) for finder in sys.meta_path]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _required_by(package: str) -> list[str]:
    from packaging.requirements import Requirement

    try:
        needs = [Requirement(line) for line in metadata.requires(package) or []]
    except metadata.PackageNotFoundError:
        return []
    return [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


class _Only:
    """One of Python's finders, made to find nothing but what readers have."""

    def __init__(self, finder: Any, readers: Readers) -> None:
        self._finder, self._readers = finder, readers

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        # _sysconfigdata_*: the standard library's one module whose name depends on the machine.
        known = name.partition(".")[0] in self._readers.modules or name.startswith("_sysconfigdata_")
        return self._finder.find_spec(name, path, target) if known else None

    def find_distributions(self, *context: Any) -> Iterator[Any]:
        find = getattr(self._finder, "find_distributions", lambda *_: ())
        return (found for found in find(*context) if _canonical(found.metadata["Name"]) in self._readers.packages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)
