"""Verify a model folder in a process that has only what its readers have: transformers, sentence-transformers, no token.

The process imports the files of this folder without the package, so this file, `contents.py`, `secrets.py` and `verify.py`
import only the standard library, each other, and what readers have. It may run code and templates of the model, so it gets a time
limit, an environment without secrets, and no terminal input.
"""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from inspect import getmodulename
from pathlib import Path
from typing import Any

from .contents import Check, read_json

# Imports this folder under another name, so that the process does not import the package itself.
_CHILD = """
import json, os, sys, types
package = types.ModuleType("verification")
package.__path__ = [sys.argv[1]]
sys.modules["verification"] = package
from verification.clean_process import run
run(**json.load(open(sys.argv[2], encoding="utf-8")))
os._exit(0)  # not waiting for threads of the model
"""
# Environment variables of the process: locations of programs and caches, language, threads, mirror and certificates. All
# others may be secrets.
_ENVIRONMENT = re.compile(
    r"""PATH|HOME|USER|LANG|LC_\w+|TZ|TMPDIR|TEMP|TMP|LD_LIBRARY_PATH|DYLD_\w+
      |SYSTEMROOT|SYSTEMDRIVE|WINDIR|COMSPEC|PATHEXT|USERPROFILE|APPDATA|LOCALAPPDATA|PROGRAMDATA
      |PYTHON(PATH|HOME|UTF8|IOENCODING|HASHSEED|WARNINGS)|VIRTUAL_ENV|CONDA_PREFIX|XDG_CACHE_HOME|TORCH_HOME
      |HF_(HOME|HUB_CACHE|ENDPOINT|HUB_OFFLINE|HUB_DISABLE_XET)|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE
      |(OMP|KMP|MKL|OPENBLAS|VECLIB|DNNL|ONEDNN)_\w+|ATEN_CPU_CAPABILITY|CUDA_VISIBLE_DEVICES""",
    re.VERBOSE,
)
_SECONDS, _SECONDS_PER_GB = 300, 180
_PYTHON = (sys.executable,)  # tests replace it with a Python that has imported the readers' libraries already


def verify(
    folder: str | Path,
    *,
    trust_remote_code: bool = False,
    reference: Path | None = None,
    vectors: Path | None = None,
    offline: bool = True,
    timeout: float | None = None,
) -> list[Check]:
    """Verify a folder in a clean process; return the checks in order, up to a fault that makes the following ones pointless.

    `reference` is a safetensors file with the expected (n_texts, d) vectors of `probe_texts`, named `query` and `document`; `vectors`
    the file in the method's record. `offline` prevents the process from accessing the Hub.
    """
    size = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
    limit = timeout or _SECONDS + _SECONDS_PER_GB * size / 1e9
    with tempfile.TemporaryDirectory(prefix="revela-hub-", ignore_cleanup_errors=True) as scratch:
        answers, task, errors = (Path(scratch, name) for name in ("answers", "task", "errors"))
        answers.touch()
        values = {
            "folder": str(Path(folder).resolve()),
            "answers": str(answers),
            "limit": limit,
            "trust_remote_code": trust_remote_code,
            "reference": str(reference.resolve()) if reference else None,
            "vectors": str(vectors) if vectors else None,
        }
        task.write_text(json.dumps(values), encoding="utf-8")
        late = _run_child(task, errors, _environment(Path(scratch), offline), limit)
        rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
        checks = [Check(*row) for row in rows if row]
        if late:
            fault = f"stopped after {limit:.0f} seconds: a larger model needs a longer timeout"
            checks.append(Check("time", False, fault))
        elif None not in rows:
            last = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
            checks.append(Check("process", False, f"the verifying process ended early: {last[-1][:400]}"))
        return checks


def _run_child(task: Path, errors: Path, environment: dict[str, str], limit: float) -> bool:
    """Run the process, kill it and its child processes at the end, and return whether the time was up."""
    command = [*_PYTHON, "-c", _CHILD, str(Path(__file__).resolve().parent), str(task)]
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            cwd=task.parent,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(limit)
            return False
        except subprocess.TimeoutExpired:
            return True
        finally:
            process.kill()
            if os.name == "posix":
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment(scratch: Path, offline: bool) -> dict[str, str]:
    own = {
        "HF_MODULES_CACHE": str(scratch / "modules"),  # of remote code
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    } | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    proxies = () if offline else ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")  # may contain a password
    kept = (name for name in os.environ if _ENVIRONMENT.fullmatch(name.upper()) or name.upper() in proxies)
    return {name: os.environ[name] for name in kept} | own


# --- in the process


def run(folder: str, answers: str, limit: float, **options: Any) -> None:
    """Write the checks of a folder to a file, each as a line of JSON, and null at the end; `options` are those of `verify.checks`."""
    if hasattr(signal, "alarm"):
        signal.alarm(int(limit) + 5)  # also ends this process if the one that started it was killed
    with Path(answers).open("a", encoding="utf-8", buffering=1) as file:
        try:
            required = read_json(Path(folder, "config_sentence_transformers.json"), {}).get("requirements") or {}
            hide_other_packages(required)
            from .verify import checks  # imports large libraries, which look for optional packages

            for check in checks(Path(folder), **options):
                file.write(json.dumps(check) + "\n")
        except Exception as error:  # readers would get the same error
            row = Check("encoding", False, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
            file.write(json.dumps(row) + "\n")
        file.write("null\n")


def hide_other_packages(requirements: Iterable[str]) -> None:
    """Hide all packages from `import` but the standard library, transformers, sentence-transformers, the given ones, and their requirements."""
    from packaging.requirements import Requirement

    wanted, packages = ["transformers", "sentence-transformers", *requirements], set[str]()
    modules = {*sys.stdlib_module_names, "__main__", "transformers_modules"}
    while wanted:
        name = _canonical(wanted.pop())
        if name in packages:
            continue
        packages.add(name)
        with suppress(metadata.PackageNotFoundError):  # of another platform
            package = metadata.distribution(name)
            needs = map(Requirement, package.requires or ())
            wanted += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
            # Not metadata.packages_distributions: on Python 3.10 it knows only packages with a top_level.txt. And
            # package.files makes a path of each line.
            record = csv.reader((package.read_text("RECORD") or "").splitlines())
            modules |= {getmodulename(top) or top for top in {row[0].split("/")[0] for row in record}}
            modules |= set((package.read_text("top_level.txt") or "").split())
    sys.meta_path[:] = [_Only(finder, packages, modules) for finder in sys.meta_path]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class _Only:
    """A finder of Python that finds only some packages and their modules."""

    def __init__(self, finder: Any, packages: set[str], modules: set[str]) -> None:
        self._finder, self._packages, self._modules = finder, packages, modules

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        # _sysconfigdata_* is the only module of the standard library whose name depends on the machine; and these modules.
        known = name.partition(".")[0] in self._modules or name.startswith(("_sysconfigdata_", f"{__package__}."))
        return self._finder.find_spec(name, path, target) if known else None

    def find_distributions(self, *context: Any) -> Iterator[Any]:
        find = getattr(self._finder, "find_distributions", lambda *_: ())
        # The rest of an interrupted installation has no name.
        return (found for found in find(*context) if _canonical(found.metadata["Name"] or "") in self._packages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)
