"""The scripts for Slurm and Hugging Face Jobs: shards in a loop instead of a cluster, one of them killed and repeated."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHARDS = 2


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A corpus of 400 passages, and the command on the path."""
    rows = [f"Note {number}: rivers carry sediment past {number * 7} stones." for number in range(400)]
    (tmp_path / "corpus.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    command = tmp_path / "bin" / "revela-hub"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m revela_hub "$@"\n')
    command.chmod(0o755)
    return tmp_path


def vectors(index: Path) -> int:
    return sum(len(np.load(path)) for path in index.glob("vectors-*/vectors-*.npy"))


def run_shards(command: list[str], environments: list[dict[str, str]], index: Path) -> None:
    """Run the shards one after the other, the second of them twice: it is killed as soon as it has written vectors."""
    for number, environment in enumerate(environments):
        each = [word.replace("SHARD", str(number)) for word in command]
        if number == 1:
            before = vectors(index)
            with subprocess.Popen(each, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as killed:
                while killed.poll() is None and vectors(index) == before:
                    time.sleep(0.005)
                os.killpg(killed.pid, signal.SIGKILL)
            kept = vectors(index)
            assert before < kept < before + 200
        done = subprocess.run(each, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert f"encoded 200 of 400 passages in {index} (shard {number} of 0 to {SHARDS - 1})" in done.stdout
    assert vectors(index) == 400  # no vector is stored twice


def test_the_slurm_array(repository: Path, place: Path, retriever_folder: Path) -> None:
    index = place / "index"
    environment = os.environ | {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "MODEL": str(retriever_folder),
        "CORPUS": str(place / "corpus.jsonl"), "OUTPUT": str(index), "SLURM_ARRAY_TASK_MAX": str(SHARDS - 1),
    }  # fmt: skip
    script = str(repository / "examples" / "slurm" / "encode.sh")
    tasks = [environment | {"SLURM_ARRAY_TASK_ID": str(number)} for number in range(SHARDS)]
    # Texts one by one take long enough to be killed in between.
    run_shards([script, "--device", "cpu", "--batch_size", "1"], tasks, index)
    del environment["CORPUS"]
    failed = subprocess.run([script], env=environment, capture_output=True, text=True, check=False)
    assert failed.returncode and "set CORPUS to the texts" in failed.stderr


def test_the_job_script_declares_what_it_needs_and_encodes_a_shard(
    repository: Path, place: Path, retriever_folder: Path
) -> None:
    script = repository / "examples" / "hf-jobs" / "encode.py"
    header = re.search(r"(?ms)^# /// script\n(.*?)^# ///$", script.read_text(encoding="utf-8"))
    assert header is not None
    declared = tomllib.loads("\n".join(line[2:] for line in header[1].splitlines()))
    assert declared["dependencies"] == ["revela-hub[search]"]
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert declared["requires-python"] == project["requires-python"]
    index = place / "index"
    words = [sys.executable, str(script), "encode", str(retriever_folder), "--corpus", str(place / "corpus.jsonl")]
    words += ["--output_dir", str(index), "--device", "cpu", "--shard", "1/2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert vectors(index) == 200
