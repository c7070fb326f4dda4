"""Verify a model folder in a process that has only transformers and sentence-transformers, as its readers do.

The process (`process.py`) cannot import this package, and loads the folder as documented. It may run code and templates of the
folder, so it gets a time limit, an environment without secrets, and no terminal input. The checks are in `files.py` (files)
and `model.py` (the loaded model).
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from revela_hub.hub_cards.verify.contents import read_json
from revela_hub.hub_cards.verify.files import Check
from revela_hub.scratch import scratch_folder

# Imports this folder under another name, so that the process does not import the package itself.
_CHILD = """
import json, os, sys, types
package = types.ModuleType("verification")
package.__path__ = [sys.argv[1]]
sys.modules["verification"] = package
from verification.process import end_with, limit_memory, run
limit_memory()
if len(sys.argv) > 3:
    end_with(int(sys.argv[3]))
run(json.load(open(sys.argv[2], encoding="utf-8")))
os._exit(0)  # not waiting for threads of the model
"""

# Environment variables of the process: locations of programs and caches, language, threads, mirror and certificates. All
# others may be secrets.
_ENVIRONMENT = re.compile(
    r"""PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|LD_LIBRARY_PATH|DYLD_\w+
      |SYSTEMROOT|SYSTEMDRIVE|WINDIR|COMSPEC|PATHEXT|USERPROFILE|APPDATA|LOCALAPPDATA|PROGRAMDATA|NUMBER_OF_PROCESSORS
      |PYTHON(PATH|HOME|UTF8|IOENCODING|HASHSEED|WARNINGS)|VIRTUAL_ENV|CONDA_PREFIX|XDG_CACHE_HOME|TORCH_HOME
      |HF_(HOME|HUB_CACHE|ENDPOINT|HUB_OFFLINE|HUB_DISABLE_XET|HUB_DOWNLOAD_TIMEOUT|HUB_ETAG_TIMEOUT)|HUGGINGFACE_HUB_CACHE
      |TRANSFORMERS_(OFFLINE|CACHE|VERBOSITY)|SENTENCE_TRANSFORMERS_HOME
      |SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|CUDA_VISIBLE_DEVICES
      |(OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|VECLIB|BLIS|DNNL|ONEDNN|MALLOC)_\w+|ATEN_CPU_CAPABILITY""",
    re.VERBOSE,
)
_PROXIES = re.compile(r"(HTTPS?|ALL|NO)_PROXY", re.IGNORECASE)  # may contain a password; only passed on for downloads
_SECONDS, _SECONDS_PER_GB = 300, 180
# Tests replace it with a Python that has imported the readers' libraries already.
_PYTHON = (sys.executable,)
_MAX_STDERR = 1 << 16


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
    """Verify a folder in a clean process.

    Args:
        folder: a sentence-transformers folder or a transformers folder.
        trust_remote_code: run the Python files in the folder.
        adapter_only: the folder is a PEFT repository, not a whole model.
        reference: a safetensors file with the expected (n_texts, d) vectors of `probe_texts`, named `query` and `document`.
        vectors: the file in the method's record, see `Method.vectors`.
        offline: prevent the process from accessing the Hub.
        timeout: time limit in seconds (default: 300, plus 180 per GB of weights).

    Returns:
        The checks in order, up to a fault that makes the following ones pointless.
    """
    with scratch_folder("verify") as scratch:
        answers, limit = scratch / "answers.json", timeout or _seconds(Path(folder))
        task = {
            "folder": str(Path(folder).resolve()),
            "trust_remote_code": trust_remote_code,
            "adapter_only": adapter_only,
            "reference": str(Path(reference).resolve()) if reference else None,
            "vectors": str(vectors) if vectors else None,
            "offline": offline,
            "answers": str(answers),
        }
        (scratch / "task").write_text(json.dumps(task), encoding="utf-8")
        late = True
        with _started(scratch, offline) as (process, stderr), suppress(subprocess.TimeoutExpired):
            process.wait(limit)
            late = False
        if rows := read_json(answers):
            return [Check(*row) for row in rows]
        if late:
            return [Check("time", False, _timeout_message(answers, limit))]
    last = (bytes(stderr).decode("utf-8", "replace").strip().splitlines() or ["no output"])[-1][:400]
    fault = f"the verifying process ended early with status {process.returncode}: {last}"
    return [Check("process", False, fault)]


def _seconds(folder: Path) -> float:
    """Return the time limit for a folder, by the size of its weights."""
    size = sum(file.stat().st_size for file in sorted(folder.rglob("*.safetensors")) if file.is_file())
    return _SECONDS + _SECONDS_PER_GB * size / 1e9


def _timeout_message(answers: Path, limit: float) -> str:
    doing = answers.with_suffix(".doing")
    step = doing.read_text(encoding="utf-8", errors="replace") if doing.exists() else "starting"
    return (
        f"stopped after {limit:.0f} seconds while {step}: the code or the chat template of the model may not terminate. For a"
        " large model, increase --timeout SECONDS"
    )


@contextmanager
def _started(scratch: Path, offline: bool) -> Iterator[tuple[subprocess.Popen[bytes], bytearray]]:
    """Run the process with a new cache for remote code; yield it and the end of its stderr.

    The process and its child processes are killed on exit.
    """
    reading, writing = os.pipe()
    watched = (reading,) if os.name == "posix" else ()
    command = [*_PYTHON, "-c", _CHILD, str(Path(__file__).resolve().parent), str(Path(scratch, "task"))]
    stderr = bytearray()
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
        listener = threading.Thread(target=_keep_the_end, args=(process.stderr, stderr), daemon=True)
        listener.start()
        try:
            yield process, stderr
        finally:
            _end(process)
            listener.join(5)
    finally:
        os.close(reading)
        os.close(writing)


def _keep_the_end(stream: IO[bytes], kept: bytearray) -> None:
    """Read all of the stream, and keep only the end."""
    while block := stream.read1(_MAX_STDERR):  # type: ignore[attr-defined]
        kept += block
        del kept[:-_MAX_STDERR]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its child processes."""
    process.poll()
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _environment(scratch: Path, offline: bool) -> dict[str, str]:
    own = {
        "HF_MODULES_CACHE": str(Path(scratch, "modules")),
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    } | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    allowed = (name for name in os.environ if _ENVIRONMENT.fullmatch(name.upper()))
    proxies = () if offline else (name for name in os.environ if _PROXIES.fullmatch(name))
    return {name: os.environ[name] for name in (*allowed, *proxies)} | own


def as_table(checks: Iterable[Check]) -> str:
    """Format the checks as a table with one line each."""
    rows = list(checks)
    width = max((len(check.name) for check in rows), default=0)
    return "\n".join(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<{width}}  {check.detail}" for check in rows)
