"""Runs a command in several processes of this machine, each with complete arguments of its own.

The arguments go through the child's standard input, so that no child reads a command line or a configuration file again,
and none of them starts children by itself. The input stays open while the parent lives: when the parent ends, however it
is ended, the children end too.
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

# Ctrl-C reaches all processes of a terminal: the parent stops the children, they need not report it as well.
CHILD = """
import sys
sys.path[:] = sys.argv[1:]
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from revela_hub.cli.processes import child
sys.exit(child())
"""


def run_in_processes(module: str, parts: Sequence[Any]) -> None:
    """Runs a command once for each of `parts`, all at the same time, and waits for them.

    Args:
        module: the full name of the command's module, with `Arguments` and `run`.
        parts: the arguments of each process; their fields are plain values or paths.

    Raises:
        UserError: a process failed; its own message is on standard error. The others were left to finish.
    """
    command = [sys.executable, "-c", CHILD, *(path or os.getcwd() for path in sys.path)]
    started: list[subprocess.Popen[str]] = []
    try:
        for part in parts:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
            started.append(process)
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([module, dataclasses.asdict(part)], default=str) + "\n")
                process.stdin.flush()
            except BrokenPipeError:  # it has ended already, which its exit status says
                pass
        ended = [process.wait() for process in started]
    finally:
        for process in started:
            process.terminate()  # does nothing to one that has ended
        for process in started:
            process.communicate()
    if failed := [(number, status) for number, status in enumerate(ended) if status]:
        numbers = ", ".join(f"number {number} with {_in_words(status)}" for number, status in failed)
        raise UserError(
            f"{len(failed)} of {len(parts)} processes failed ({numbers}), their messages are above; "
            "run the command again to continue"
        )


def _in_words(status: int) -> str:
    return f"exit status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"


def child() -> int:
    """The process that `run_in_processes` starts: runs the command and returns the exit status."""
    from revela_hub.cli.main import exit_status

    name, values = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, args=[sys.stdin.fileno()], daemon=True).start()
    module = importlib.import_module(name)
    return exit_status(lambda: module.run(module.Arguments(**values)), values, trace=False)


def _end_with_parent(pipe: int) -> None:
    """Waits for the parent's end of the pipe to close, and ends this process alone: the group is that of a terminal."""
    os.read(pipe, 1)
    os._exit(1)
