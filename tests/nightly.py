"""Killed runs of every training command: too slow for `make test`.

    python tests/nightly.py                      # all methods
    python tests/nightly.py --methods revela imprag --kills 20

Each method trains once without a break. Other runs of the same command are killed (`kill -9`) at a random time, and resumed
with `--resume_from_checkpoint last` until they end. Their weights must be those of the first run, bit for bit.
"""

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}

from tiny_runs import commands

from revela_hub.cli.main import main as revela_hub
from revela_hub.trainers.methods import METHODS

STEPS, SAVE_STEPS, RESTARTS = 24, 6, 5


def fork(words: list[str], log: Path) -> int:
    """Start a command in a fork, which writes to a log; return its process id."""
    child = os.fork()
    if child:
        return child
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        status = revela_hub(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 2
    except BaseException as error:  # a fork must not return into the loop of its parent
        os.write(2, f"Traceback: {type(error).__name__}: {error}\n".encode())
    os._exit(status)


def status_of(child: int) -> int:
    """Return the exit status of a process; negative if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def weights(output: Path) -> dict[str, str]:
    """Return the digest of every file of weights that a run leaves, checkpoints aside."""
    return {
        str(file.relative_to(output)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(output.rglob("*.safetensors"))
        if not any(part.startswith(("checkpoint-", ".")) for part in file.relative_to(output).parts)
    }


def resumed(words: list[str], output: Path, expected: dict[str, str]) -> str:
    """Restart a run that was killed until it ends, and return the outcome."""
    for _ in range(RESTARTS):
        if status_of(fork([*words, "--resume_from_checkpoint", "last"], output.with_suffix(".log"))) == 0:
            return "same weights" if weights(output) == expected else "OTHER WEIGHTS"
    return "NOT RESUMED"


def kills(words: dict[str, list[str]], root: Path, count: int) -> list[str]:
    """Kill and resume runs of each method, and return the failures."""
    failures = []
    for method, line in words.items():
        line = [*line, "--max_steps", str(STEPS), "--save_steps", str(SAVE_STEPS)]
        began, whole = time.monotonic(), root / f"{method}-whole"
        if status_of(fork([*line, "--output_dir", str(whole)], whole.with_suffix(".log"))):
            failures.append(f"{method} does not train: see {whole.with_suffix('.log')}")
            continue
        length, outcomes = time.monotonic() - began, Counter[str]()
        for number in range(count):
            output = root / f"{method}-{number}"
            run = [*line, "--output_dir", str(output)]
            child = fork(run, output.with_suffix(".log"))
            time.sleep(random.uniform(0, length))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            outcomes[resumed(run, output, weights(whole))] += 1
        print(f"kills: {method}: {dict(outcomes)}", flush=True)
        failures += [f"{method}: {outcome}" for outcome in outcomes if outcome != "same weights"]
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--kills", type=int, default=5, help="of each method")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="nightly-"))
    words = {name: line for name, line in commands(root / "inputs").items() if name in options.methods}
    sys.exit("\n".join(kills(words, root, options.kills)) or 0)


if __name__ == "__main__":
    main()
