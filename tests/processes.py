"""Other processes for tests: a reader's Python, and several processes as `torchrun` starts them."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_READER = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "revela_hub":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
del sys.argv[0]
exec(compile(sys.argv[0], "<reader>", "exec"))
"""


def reader(code: str, *words: str) -> list[str]:
    """The command that runs code as a user does who has no package of ours; `words` are its arguments."""
    return [sys.executable, "-c", _READER, code, *words]


def launch(script: str, *words: str, processes: int, environment: dict[str, str] | None = None) -> list[str]:
    """Runs a script in processes of one process group, as `torchrun` does, and returns what each of them wrote.

    Raises:
        AssertionError: one has failed; the message is the end of what it wrote.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))  # as in conftest
    together = {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": path}
    if processes > 1:
        together |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
        together |= {"LOCAL_WORLD_SIZE": str(processes)}
    started = []
    for rank in range(processes):
        own = together | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {})
        output = tempfile.TemporaryFile()
        command = [sys.executable, script, *words]
        environ = os.environ | own | (environment or {})
        started.append((subprocess.Popen(command, env=environ, stdout=output, stderr=output), output))
    try:
        while None in (ended := [process.poll() for process, _ in started]) and not any(ended):
            time.sleep(0.02)
    finally:
        for process, _ in started:
            process.kill()
    written = []
    for status, (_, output) in zip(ended, started, strict=True):
        output.seek(0)
        text = output.read().decode(errors="replace")
        output.close()
        assert not status, text[-3000:]
        written.append(text)
    return written
