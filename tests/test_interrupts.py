"""Signals that end a command: one line, a status, and no temporary folders, not even after a kill."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from revela_hub.cli.main import exit_status
from revela_hub.interrupts import SIGNALS, Interrupted, if_interrupted, raising_signals
from revela_hub.scratch import LOCK, scratch_folder

STATUS = [(number, 128 + number) for number in (signal.SIGINT, *SIGNALS)]


@pytest.mark.parametrize(("number", "status"), STATUS)
def test_a_signal_ends_a_command_with_one_line_and_a_status(
    number: int, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Ctrl-C is ignored in a shell's background jobs, and libraries such as Ray may have set handlers in this process.
    before = {each: signal.signal(each, signal.SIG_DFL) for each in SIGNALS}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)

    def command() -> None:
        with if_interrupted("run the same command again"), scratch_folder("test", tmp_path):
            assert len(list(tmp_path.iterdir())) == 1
            signal.raise_signal(number)

    with raising_signals():
        assert exit_status(command) == status
    left = [signal.getsignal(each) for each in SIGNALS]
    for each, handler in before.items():
        signal.signal(each, handler)
    assert capsys.readouterr().err == "revela-hub: interrupted: run the same command again\n"
    assert not list(tmp_path.iterdir())
    assert left == [signal.SIG_DFL for _ in SIGNALS]


def test_the_innermost_message_is_kept() -> None:
    with pytest.raises(Interrupted, match="step 3 was saved") as caught:
        with if_interrupted("start over"), if_interrupted(lambda: "step 3 was saved"):
            raise Interrupted("", signal.SIGTERM)
    assert caught.value.status == 128 + signal.SIGTERM


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(SIGNALS[-1], signal.SIG_IGN)
    try:
        with raising_signals():
            signal.raise_signal(SIGNALS[-1])
    finally:
        signal.signal(SIGNALS[-1], before)


_FORKS = """
import multiprocessing, time
from revela_hub.interrupts import raising_signals
with raising_signals():
  for _ in range(20):  # often enough to send the signal before the fork is complete
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=[20])
    worker.start()
    worker.terminate()
    worker.join()
    assert worker.exitcode == -15, worker.exitcode
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")
def test_a_forked_worker_ends_silently() -> None:
    ended = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, check=False)
    assert ended.stderr == ""


_HOLDS = """
import sys, time
from pathlib import Path
from revela_hub.scratch import scratch_folder
with scratch_folder("test", Path(sys.argv[1])) as folder:
    (folder / "weights").write_text("many")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot rename the locked file")
def test_the_folder_of_a_killed_process_is_deleted_by_the_next_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDS, str(tmp_path)]
    killed, living = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2))
    try:
        left, used = (Path((process.stdout or sys.stdin).readline().strip()) for process in (killed, living))
        killed.kill()
        killed.wait()
        assert (left / "weights").exists()
        (tmp_path / "revela-hub-other").mkdir()  # not locked: not ours, or of an earlier version
        with scratch_folder("test", tmp_path) as own:
            assert sorted(tmp_path.iterdir()) == sorted([own, used, tmp_path / "revela-hub-other"])
            with scratch_folder("test", tmp_path):
                assert (own / LOCK).exists()
        assert (used / "weights").exists()
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()
