"""Runs a command in several processes on this machine, each with its own complete arguments.

The arguments are sent through the child's standard input, so that no child reads a command line or a configuration file, and
none starts further processes. The input stays open as long as the parent runs; when the parent exits for any reason, the
children exit too.
"""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from revela_hub.errors import UserError

# Ctrl-C is sent to all processes of a terminal; the parent stops the children, so they ignore it.
CHILD_PROGRAM = """
import sys
sys.path[:] = sys.argv[1:]
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from revela_hub.cli.processes import child
sys.exit(child())
"""


def run_in_processes(module: str, parts: Sequence[Any]) -> None:
    """Run a command once for each of `parts`, its arguments, concurrently, and wait for all of them.

    The fields of the arguments are plain values or paths.

    Raises:
        UserError: A process failed and printed its message on standard error; the others were left to finish.
    """
    command = [sys.executable, "-c", CHILD_PROGRAM, *(path or os.getcwd() for path in sys.path)]
    started: list[subprocess.Popen[str]] = []
    try:
        for part in parts:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
            started.append(process)
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([module, dataclasses.asdict(part)], default=str) + "\n")
                process.stdin.flush()
            except BrokenPipeError:  # the process has already exited; its status is checked below
                pass
        ended = [process.wait() for process in started]
    finally:
        for process in started:
            process.terminate()  # no effect if it has exited
        for process in started:
            process.communicate()
    if failed := [(number, status) for number, status in enumerate(ended) if status]:
        numbers = ", ".join(f"number {number} with {_described(status)}" for number, status in failed)
        raise UserError(
            f"{len(failed)} of {len(parts)} processes failed ({numbers}), their messages are above; "
            "run the command again to continue"
        )


def _described(status: int) -> str:
    return f"exit status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"


def child() -> int:
    """Run the command in a process that `run_in_processes` started, and return the exit status."""
    from revela_hub.cli.main import exit_status

    name, values = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, args=[sys.stdin.fileno()], daemon=True).start()
    module = importlib.import_module(name)
    return exit_status(lambda: module.run(module.Arguments(**values)))


def _end_with_parent(pipe: int) -> None:
    """Exit this process when the parent's end of the pipe closes."""
    os.read(pipe, 1)
    os._exit(1)
