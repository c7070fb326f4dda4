"""`encode --num-processes`: each child gets complete arguments, starts no children, and ends with its parent."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fork_server import python
from parsed_arguments import parse_arguments

from revela_hub.cli.commands import encode
from revela_hub.cli.main import main
from revela_hub.cli.processes import run_in_processes
from revela_hub.errors import UserError

COMMAND = '''
"""Writes what it was given, and then fails or waits."""

import os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path
from revela_hub.errors import UserError


@dataclass
class Arguments:
    name: str
    then: str = ""


def run(arguments):
    Path(f"{arguments.name}.pid").write_text(str(os.getpid()))
    if arguments.then == "fail":
        raise UserError(f"{arguments.name} does not want to")
    if arguments.then == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if arguments.then == "wait":
        time.sleep(60)
'''


@dataclass
class Given:
    name: str
    then: str = ""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_command.py").write_text(COMMAND)
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the user shadows a module')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "argv", ["a-program-of-the-user", "--num-processes", "4"])
    return "a_command"


def test_every_process_runs_and_those_that_fail_are_reported(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_in_processes(command, [Given("first"), Given("second \udcff \u5ddd")])
    assert Path("first.pid").exists()
    with pytest.raises(UserError, match=r"2 of 3 processes failed \(number 1 with exit status 2, number 2 with signal"):
        run_in_processes(command, [Given("a"), Given("b", "fail"), Given("c", "die")])
    assert "revela-hub: error: b does not want to" in capfd.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_children_end_with_their_parent(command: str, tmp_path: Path, signum: int) -> None:
    script = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where a shell started us in the background
        "from dataclasses import make_dataclass\n"
        "from revela_hub.cli.processes import run_in_processes\n"
        "Given = make_dataclass('Given', ['name', 'then'])\n"
        f"run_in_processes({command!r}, [Given('a', 'wait'), Given('b', 'wait')])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    (tmp_path / "json.py").unlink()
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.DEVNULL)
    files = [tmp_path / "a.pid", tmp_path / "b.pid"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    children = [int(file.read_text()) for file in files]
    parent.send_signal(signum)
    assert parent.wait(30)
    wait_until(lambda: not any(map(is_running, children)))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # a child without a parent that waits remains as a zombie
    try:
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parts(words: str) -> list[encode.Arguments]:
    arguments = parse_arguments(encode.Arguments, words.split(), positionals=encode.POSITIONALS)
    assert arguments is not None
    return encode.parts_of(arguments)


def test_no_part_is_divided_again_wherever_its_options_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (tmp_path / "encode.yaml").write_text("num_processes: 2\nnum_shards: 3\nshard: 1\nmax_words: 7\ncorpus: [a, b]\n")
    first, second = parts(f"my-model --output_dir o --config {tmp_path}/encode.yaml --max_words 9")
    assert (first.num_processes, second.num_processes) == (1, 1)
    assert (first.num_shards, first.shard, second.num_shards, second.shard) == (6, 2, 6, 3)
    assert (first.model, first.output_dir, first.corpus, first.max_words) == ("my-model", "o", ["a", "b"], 9)
    assert first.device is None
    assert [part.num_processes for part in encode.parts_of(first)] == [1]


def test_every_gpu_gets_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(count: int, more: str = "") -> list[str | None]:
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        return [part.device for part in parts(f"m --corpus a --output_dir o --num-processes 3 {more}")]

    assert devices(0) == devices(1) == [None] * 3
    assert devices(2) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices(2, "--device cuda:1") == ["cuda:1"] * 3


def test_encode_in_processes_of_a_file_of_options(
    tmp_path: Path, retriever_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole command from Python: `sys.argv`, which the children would read, belongs to another program."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["another-program", "--corpus", "nowhere"])
    forked = tmp_path / "python"
    forked.write_text(f'#!/bin/sh\nexec {shlex.join(python("trainers"))} "$@"\n')
    forked.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(forked))
    rows = [{"text": f"Note {number}: rivers carry sediment past {number * 7} stones."} for number in range(9)]
    (tmp_path / "notes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "encode.yaml").write_text("num_processes: 2\ncorpus: [notes.jsonl]\noutput_dir: index\ndevice: cpu\n")
    assert main(["encode", str(retriever_folder), "--config", "encode.yaml", "--dtype", "float16"]) == 0
    vectors = [np.load(path)["vector"] for path in Path("index").glob("vectors-*/*.npy")]
    assert [len(part) for part in vectors] in ([4, 5], [5, 4])
    assert vectors[0].dtype == np.float16
    assert capfd.readouterr().out.count("of 9 passages in") == 2
