"""Python that has the large libraries imported: a server that forks a process for each script that a test runs.

Importing torch, transformers and sentence-transformers takes five seconds of CPU time, more than most tests. A test that
needs another process, and for which it does not matter how that one started, runs `[*python("readers"), "-c", code]`
in place of `[sys.executable, "-c", code]`. The process has its own session, working folder, environment, arguments and
streams; it ends when the client does, and the other way round. The server starts with the first client, and ends with
pytest. Where it cannot help (another system than Linux, other variables that libraries read when they are imported),
the client becomes an ordinary Python.

There are two servers: "readers" has the packages of a user who loads a model from the Hub without this package;
"trainers" has imported all that training needs, and what else takes long. The processes of xdist and of Ray are its forks.
"""

import json
import os
import socket
import sys
import time
from contextlib import suppress
from typing import Any

_TESTS = os.path.dirname(os.path.abspath(__file__))
# Read from the environment when a library is imported: a server cannot take another value.
_READ_AT_IMPORT = (
    "HF_HOME",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "TRANSFORMERS_OFFLINE",
)
# Also read when a library is imported; the process gets its own values.
_CACHES = ("HF_MODULES_CACHE", "HF_HUB_CACHE")
_OF_THE_HUB = ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "HF_HUB_OFFLINE")
_LENGTH = 8


def python(kind: str) -> list[str]:
    """The command that replaces `[sys.executable]`; `kind` is "readers" or "trainers"."""
    if not hasattr(os, "pidfd_open"):
        return [sys.executable]
    return [
        sys.executable,
        "-S",
        "-E",
        os.path.abspath(__file__),
        kind,
        os.environ["HF_HOME"],
        os.environ.get("FORK_SERVER_PARENT", str(os.getpid())),
    ]


def launch(script: str, *words: str, processes: int, environment: dict[str, str] | None = None) -> list[str]:
    """Runs a script in processes of one process group, as `torchrun` does, and returns what each of them wrote.

    Raises:
        AssertionError: one has failed; the message is the end of what it wrote.
    """
    import subprocess
    import tempfile

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    together |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    started = []
    for rank in range(processes):
        own = (
            together | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {"ACCELERATE_USE_CPU": "true"}
        )
        own = os.environ | own | (environment or {})
        errors = tempfile.TemporaryFile()
        started.append(
            (subprocess.Popen([*python("trainers"), script, *words], env=own, stdout=errors, stderr=errors), errors)
        )
    try:
        while None in (ended := [process.poll() for process, _ in started]) and not any(ended):
            time.sleep(0.02)
    finally:
        for process, _ in started:
            process.kill()
    written = []
    for status, (_, errors) in zip(ended, started, strict=True):
        errors.seek(0)
        said = errors.read().decode(errors="replace")
        errors.close()
        assert not status, said[-3000:]
        written.append(said)
    return written


def quicken() -> None:
    """Leaves out what libraries repeat for each client, seed and file: it takes more time than some tests."""
    import functools
    import ssl

    import torch

    os.fsync = lambda fd: None  # no test cuts the power; 5 ms, and a run writes dozens of files
    ssl.create_default_context = functools.cache(ssl.create_default_context)  # reads 140 certificates in 20 ms
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():  # then it keeps the stack of each call, for errors when it is initialized
            device.manual_seed_all = lambda seed: None


# --- the client


def client(kind: str, folder: str, pytest: str, words: list[str]) -> int:
    """Sends the server what is to be run, and ends as it ends."""
    connection = _connect(kind, folder, pytest)
    if connection is None:
        os.execv(sys.executable, [sys.executable, *words])
    streams = [0, 1, 2, *_inherited(connection.fileno())]
    task = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ), "streams": streams}
    message = json.dumps(task).encode()
    socket.send_fds(connection, [len(message).to_bytes(_LENGTH, "big")], streams)
    connection.sendall(message)
    answer = connection.recv(64).decode()
    if answer == "not here":
        os.execv(sys.executable, [sys.executable, *words])
    status = int(answer or 1)
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


def _inherited(own: int) -> list[int]:
    """The files that this process received besides its three streams."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != own and os.path.exists(f"/proc/self/fd/{name}"):
            found.append(int(name))
    return found


def _connect(kind: str, folder: str, pytest: str) -> socket.socket | None:
    """A connection to the server, which is started if necessary."""
    import fcntl

    place = os.path.join(folder, kind)
    with open(place + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(place + ".socket"):
            other = (*_CACHES, *_OF_THE_HUB, "PYTHONDONTWRITEBYTECODE")
            environment = {name: value for name, value in os.environ.items() if name not in other}
            environment["HF_HUB_OFFLINE"] = "1"
            null, log = os.open(os.devnull, os.O_RDWR), os.open(place + ".log", os.O_WRONLY | os.O_CREAT)
            arguments = [sys.executable, os.path.abspath(__file__), "--serve", kind, folder, pytest]
            streams = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
            closed = [(os.POSIX_SPAWN_CLOSE, number) for number in _inherited(null)]
            server = os.posix_spawn(
                sys.executable, arguments, environment, file_actions=[*streams, *closed], setsid=True
            )
            os.close(null), os.close(log)
            while not os.path.exists(place + ".socket"):
                if os.waitpid(server, os.WNOHANG)[0]:
                    return None
                time.sleep(0.05)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(place + ".socket")
    except OSError:
        return None
    return connection


# --- the server


def serve(kind: str, folder: str, pytest: int) -> None:
    """Imports, and forks for each client until pytest ends."""
    import gc
    import select
    import signal

    sys.path.append(_TESTS)
    gc.disable()  # makes the imports faster
    {"readers": _import_as_readers, "trainers": _import_for_training}[kind]()
    gc.enable()
    gc.freeze()  # garbage collections of the processes skip what has been imported
    quicken()
    place = os.path.join(folder, kind)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place + ".part")
    listener.listen(64)
    os.rename(place + ".part", place + ".socket")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.pidfd_open(pytest)
    while parent not in (ready := select.select([listener, parent], [], [])[0]):
        assert ready
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            os.close(parent)
            try:
                _supervise(connection)
            finally:
                os._exit(0)
        connection.close()


def _import_as_readers() -> None:
    """Import the packages of the verifying process, and hide those that readers may not have."""
    from types import ModuleType

    package = ModuleType("verification")
    package.__path__ = [os.path.join(os.path.dirname(_TESTS), "hub_cards")]
    sys.modules["verification"] = package
    from verification.clean_process import hide_other_packages

    hide_other_packages([])
    import transformers
    from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Router, Transformer
    from transformers.models.bert import modeling_bert
    from transformers.models.llama import modeling_llama

    assert all((transformers.AutoModel, transformers.AutoModelForCausalLM, transformers.AutoTokenizer, modeling_bert))
    assert all(
        (CrossEncoder, SentenceTransformer, SparseEncoder, Normalize, Pooling, Router, Transformer, modeling_llama)
    )
    from verification import verify

    # These modules stay, with what they know of the packages, so that no process finds it out again.
    assert verify
    with suppress(ImportError):  # other versions
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("bert")
    # sentence-transformers has added another one.
    sys.meta_path[:] = [vars(finder).get("_finder", finder) for finder in sys.meta_path]


def _import_for_training() -> None:
    import importlib
    from unittest.mock import patch

    import accelerate
    import datasets
    import peft
    import pytest
    import sentence_transformers
    import transformers

    import revela_hub.cli.main
    import revela_hub.trainers as trainers

    assert all((accelerate, datasets, peft, pytest, sentence_transformers, transformers.Trainer, revela_hub.cli.main))
    assert all(getattr(trainers, name) for name in trainers.__all__)
    with suppress(ImportError), patch("atexit.register"):  # at its end, polars 2.0 waits for a thread that no fork has
        importlib.import_module("polars")
    for optional in ("gradio", "mteb"):
        with suppress(ImportError):
            importlib.import_module(optional)


def _supervise(connection: socket.socket) -> None:
    """Forks the process that runs the script, and ends it if its client ends."""
    import select
    import signal

    header, files, _, _ = socket.recv_fds(connection, _LENGTH, 64)
    message = b""
    while len(message) < int.from_bytes(header, "big"):
        message += connection.recv(1 << 20)
    task = json.loads(message)
    mine, other = os.environ, task["environment"]
    own_copies = ("HF_HUB_OFFLINE",) if "datasets" in sys.modules else ()
    at_import = _READ_AT_IMPORT + own_copies
    if any(mine.get(name) != other.get(name) for name in at_import):
        connection.sendall(b"not here")
        return
    worker = os.fork()
    if worker == 0:
        os.setsid()
        connection.close()
        os._exit(_run(task, files))
    for file in files:
        os.close(file)
    ended = os.pidfd_open(worker)
    if ended in select.select([connection, ended], [], [])[0]:
        status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        if status < 0:  # killed, perhaps without its own processes
            with suppress(ProcessLookupError):
                os.killpg(worker, signal.SIGKILL)
        connection.sendall(str(status).encode())
    else:
        os.killpg(worker, signal.SIGKILL)


def _run(task: dict[str, Any], files: list[int]) -> int:
    """Runs the script as `__main__` with the client's streams; returns the status."""
    import atexit
    import random
    import threading
    import traceback

    moved = [os.dup2(file, 200 + place, inheritable=False) for place, file in enumerate(files)]
    os.closerange(3, 200)
    for file, number in zip(moved, task["streams"], strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", errors="backslashreplace" if number == 2 else None, closefd=False)
        for number, mode in enumerate("rww")
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(task["folder"])
    os.environ.clear()
    take_environment(task["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    random.seed()
    status: int | None = 1
    try:
        _run_as_main(task["words"])
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def take_environment(variables: dict[str, str]) -> None:
    """Sets variables, also where libraries have read them already: folders, and the address of the Hub."""
    os.environ.update(variables)
    if "transformers" not in sys.modules:
        return
    environment = os.environ
    from huggingface_hub import constants, hf_api
    from transformers.utils import hub

    old = {"HF_HUB_CACHE": constants.HF_HUB_CACHE, "HF_MODULES_CACHE": hub.HF_MODULES_CACHE}
    for module in list(sys.modules.values()):
        for name in old:
            if name in environment and getattr(module, "__dict__", {}).get(name) == old[name]:
                setattr(module, name, environment[name])
    endpoint = environment.get("HF_ENDPOINT", constants.ENDPOINT)
    constants.ENDPOINT = hf_api.api.endpoint = endpoint
    hub._hf_api = None  # the client of transformers, which keeps the address that it had first
    constants.HUGGINGFACE_CO_URL_TEMPLATE = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_OFFLINE = environment.get("HF_HUB_OFFLINE") == "1"
    for name in ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        setattr(constants, name, environment.get(name) == "1")


def _run_as_main(words: list[str]) -> None:
    import runpy
    from types import ModuleType

    kind, *rest = words if words[0] != "-u" else words[1:]
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(kind))
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__file__ = kind
        with open(kind, encoding="utf-8") as file:
            exec(compile(file.read(), kind, "exec"), vars(main))


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        sys.exit(client(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
