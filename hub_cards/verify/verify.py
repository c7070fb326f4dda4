"""Verifies a model folder as its readers will meet it: in a process that has transformers and sentence-transformers only.

The process (`process.py`) imports nothing of this package, and nothing else that a reader may not have. It loads
the folder by the documented way; a question at the terminal is answered with end-of-file. It may run the folder's code and
templates, so it gets an environment without secrets and a time limit. What is checked stands in `files.py` (what the files
say) and `model.py` (what the loaded model does).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from revela_hub.hub_cards.verify.files import Check

# Imports this folder under another name: the package itself, and all that it imports, stays out of the process.
_CHILD = """
import json, sys, types
package = types.ModuleType("verification")
package.__path__ = [sys.argv[1]]
sys.modules["verification"] = package
from verification.process import end_with, limit_memory, run
limit_memory()
if len(sys.argv) > 3:
    end_with(int(sys.argv[3]))
for task in json.load(open(sys.argv[2], encoding="utf-8")):
    run(task)
"""

# What the process gets of the environment: where programs and caches are, language, threads, mirror and certificates.
# No token, no key, and nothing that we do not know.
_PASSED_ON = re.compile(
    r"""PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|LD_LIBRARY_PATH|DYLD_\w+
      |SYSTEMROOT|SYSTEMDRIVE|WINDIR|COMSPEC|PATHEXT|USERPROFILE|APPDATA|LOCALAPPDATA|PROGRAMDATA|NUMBER_OF_PROCESSORS
      |PYTHON(PATH|HOME|UTF8|IOENCODING|HASHSEED|WARNINGS)|VIRTUAL_ENV|CONDA_PREFIX|XDG_CACHE_HOME|TORCH_HOME
      |HF_(HOME|HUB_CACHE|ENDPOINT|HUB_OFFLINE|HUB_DISABLE_XET|HUB_DOWNLOAD_TIMEOUT|HUB_ETAG_TIMEOUT)|HUGGINGFACE_HUB_CACHE
      |TRANSFORMERS_(OFFLINE|CACHE|VERBOSITY)|SENTENCE_TRANSFORMERS_HOME
      |SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|CUDA_VISIBLE_DEVICES
      |(OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|VECLIB|BLIS|DNNL|ONEDNN|MALLOC)_\w+|ATEN_CPU_CAPABILITY""",
    re.VERBOSE,
)
_PROXIES = re.compile(r"(HTTPS?|ALL|NO)_PROXY", re.IGNORECASE)  # they may hold a password: only where the Hub is asked
_SECONDS, _SECONDS_PER_GB = 300, 180
_KEPT_OF_STDERR = 1 << 16


def verify(
    folder: str | Path,
    *,
    trust_remote_code: bool = False,
    adapter_only: bool = False,
    reference: Path | None = None,
    vectors: Path | None = None,
    offline: bool = True,
    timeout: float | None = None,
) -> list[Check]:
    """Verifies a folder in a clean process.

    Args:
        folder: a sentence-transformers folder, or a transformers folder.
        trust_remote_code: run the Python files of the folder.
        adapter_only: the folder is a PEFT repository, not a whole model.
        reference: a safetensors file with the (n_texts, d) vectors of `probe_texts` that the folder has to give, under
            the names `query` and `document`.
        vectors: the file of the method's record, see `Method.vectors`.
        offline: keep the process from asking the Hub for anything.
        timeout: seconds that it may take; by default 300, and 180 more for each GB of weights.

    Returns:
        The checks in the order in which they were made; loading stops at the first that makes going on pointless.
    """
    task: dict[str, str | bool | None] = {
        "folder": str(Path(folder).resolve()),
        "trust_remote_code": trust_remote_code,
        "adapter_only": adapter_only,
        "reference": str(Path(reference).resolve()) if reference else None,
        "vectors": str(vectors) if vectors else None,
    }
    return verify_all([task], offline=offline, timeout=timeout)[0]


def verify_all(
    tasks: list[dict[str, str | bool | None]], *, offline: bool = True, timeout: float | None = None
) -> list[list[Check]]:
    """Verifies several folders in one clean process: `verify`'s arguments, with absolute paths, for each of them.

    Where a folder's code ends the process, or does not end in time, another process continues with the next folder.
    """
    results: list[list[Check]] = []
    while len(results) < len(tasks):
        results += _in_one_process(tasks[len(results) :], offline, timeout)
    return results


def _in_one_process(
    tasks: list[dict[str, str | bool | None]], offline: bool, timeout: float | None
) -> list[list[Check]]:
    """The checks of the first folders, up to the one at which the process ended."""
    with tempfile.TemporaryDirectory(prefix="revela-hub-verify-", ignore_cleanup_errors=True) as scratch:
        answers = [Path(scratch, f"{number}.json") for number in range(len(tasks))]
        todo = [task | {"answers": str(a), "offline": offline} for task, a in zip(tasks, answers, strict=True)]
        Path(scratch, "tasks").write_text(json.dumps(todo, default=str), encoding="utf-8")
        limits = [timeout or _seconds(Path(str(task["folder"]))) for task in tasks]
        with _started(scratch, offline) as (process, said):
            late = _wait(process, answers, limits)
        results: list[list[Check]] = []
        for file, limit in zip(answers, limits, strict=True):
            found = [Check(*row) for row in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []
            if found and found[-1].name == "end":
                results.append(found[:-1])
                continue
            if late:
                fault = _not_in_time(file, limit)
            else:
                last = (bytes(said).decode("utf-8", "replace").strip().splitlines() or ["it says nothing"])[-1][:400]
                status = process.returncode
                fault = f"the verifying process ended before its last check, with status {status}: {last}"
            return [*results, [*found, Check("time" if late else "process", False, fault)]]
        return results


def _seconds(folder: Path) -> float:
    """The time limit of a folder, by the size of its weights."""
    size = sum(file.stat().st_size for file in sorted(folder.rglob("*.safetensors")) if file.is_file())
    return _SECONDS + _SECONDS_PER_GB * size / 1e9


def _wait(process: subprocess.Popen[bytes], answers: list[Path], limits: list[float]) -> bool:
    """Waits for one answer after the other; returns whether one did not come in time."""
    for file, limit in zip(answers, limits, strict=True):
        end = time.monotonic() + limit
        while not file.exists():
            if process.poll() is not None:
                return False
            if time.monotonic() > end:
                return True
            time.sleep(0.05)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)  # its threads may hold it up, but all is said
    return False


def _not_in_time(answers: Path, limit: float) -> str:
    doing = answers.with_suffix(".doing")
    what = doing.read_text(encoding="utf-8", errors="replace") if doing.exists() else "starting"
    return (
        f"stopped after {limit:.0f} seconds while {what}: code or a chat template of the model may never end. Give a large"
        " model more time with --timeout SECONDS"
    )


@contextmanager
def _started(scratch: str, offline: bool) -> Iterator[tuple[subprocess.Popen[bytes], bytearray]]:
    """Runs the process as a reader's, with a cache of its own for remote code, and the end of what it says to stderr.

    An earlier run's cache would have that run's code, not the folder's. The process and what it has started end when this
    ends.
    """
    reading, writing = os.pipe()
    watched = (reading,) if os.name == "posix" else ()
    command = [sys.executable, "-c", _CHILD, str(Path(__file__).resolve().parent), str(Path(scratch, "tasks"))]
    said = bytearray()
    try:
        process = subprocess.Popen(
            [*command, *map(str, watched)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=scratch,
            env=_environment(scratch, offline),
            pass_fds=watched,
            start_new_session=True,
        )
        listener = threading.Thread(target=_keep_the_end, args=(process.stderr, said), daemon=True)
        listener.start()
        try:
            yield process, said
        finally:
            _end(process)
            listener.join(5)
    finally:
        os.close(reading)
        os.close(writing)


def _keep_the_end(stream: IO[bytes], said: bytearray) -> None:
    """Reads what the process says, however much it is, and keeps the end of it."""
    while block := stream.read1(_KEPT_OF_STDERR):  # type: ignore[attr-defined]
        said += block
        del said[:-_KEPT_OF_STDERR]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all that it has started."""
    process.poll()
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _environment(scratch: str, offline: bool) -> dict[str, str]:
    allowed = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name.upper())}
    if not offline:
        allowed |= {name: value for name, value in os.environ.items() if _PROXIES.fullmatch(name)}
    return (
        allowed
        | {
            "HF_MODULES_CACHE": str(Path(scratch, "modules")),
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    )


def as_table(checks: Iterable[Check]) -> str:
    """Returns the checks as lines of text, one a row."""
    rows = list(checks)
    width = max((len(check.name) for check in rows), default=0)
    return "\n".join(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<{width}}  {check.detail}" for check in rows)
