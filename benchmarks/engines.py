"""What do the engines cost? `encode` in two processes, as two shards, with Ray and with datatrove, on the same passages and cores.

    python benchmarks/engines.py --data path/to/data --model examples/quickstart/retriever

The engines run in turn, `--rounds` times. A row has the median of the wall-clock time, from the start of the command to its end, and
the largest memory of all its processes together (PSS: shared pages count once). One thread per process.
"""

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from itertools import cycle, islice
from pathlib import Path

from retrieval_common import heading

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import ParquetWriter
from revela_hub.retrieval.datatrove_blocks import CutPassages, EncodePassages

corpus, model, output = sys.argv[1:]
if __name__ == "__main__":
    steps = [JsonlReader(corpus), CutPassages(), EncodePassages(model), ParquetWriter(output, expand_metadata=True)]
    LocalPipelineExecutor(steps, tasks=2, workers=2, logging_dir=f"{output}-logs").run()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with squad")
    parser.add_argument("--model", required=True, help="sentence-transformers folder")
    parser.add_argument("--work", type=Path, default=Path("outputs/engines"))
    parser.add_argument("--passages", type=int, default=2500)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    corpus = write_corpus(given.data / "squad" / "passages.jsonl.gz", given.work / "corpus", given.passages)
    output = given.work / "output"
    encode = [sys.executable, "-m", "revela_hub", "encode", "--model", given.model, "--corpus", str(corpus), "--quiet"]
    encode += ["--output_dir", str(output)]
    shards = [[*encode, "--num_shards", "2", "--shard", str(shard)] for shard in range(2)]
    engines = {
        "one process": [encode],
        "two processes (`--num_processes 2`)": [[*encode, "--num_processes", "2"]],
        "two shards at a time (`--num_shards 2`)": shards,
        "Ray, two actors (`--engine ray`)": [[*encode, "--engine", "ray"]],
        "datatrove, two workers": [
            [sys.executable, "-c", DATATROVE, str(corpus), given.model, str(output / "parquet")]
        ],
    }
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in engines}
    for _ in range(given.rounds):
        for name, commands in engines.items():
            shutil.rmtree(output, ignore_errors=True)
            runs[name].append(measured(commands))
            print(f"{name}: {runs[name][-1][0]:.1f} s", file=sys.stderr, flush=True)
    print(f"{heading()}\n\n{given.passages:,} passages of SQuAD, median of {given.rounds}:\n")
    print("| engine | seconds | ratio | memory, MB |\n|---|---|---|---|")
    base = statistics.median(seconds for seconds, _ in runs["two processes (`--num_processes 2`)"])
    for name, found in runs.items():
        seconds = statistics.median(each for each, _ in found)
        print(f"| {name} | {seconds:.1f} | {seconds / base:.2f} | {max(each for _, each in found) / 2**20:.0f} |")


def write_corpus(passages: Path, folder: Path, number: int) -> Path:
    """Write passages, numbered so that all are different, as two files of JSON lines."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with gzip.open(passages, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    rows = [{"id": str(place), "text": f"{place}. {text}"} for place, text in enumerate(islice(cycle(texts), number))]
    for part in range(2):
        lines = (json.dumps(row) + "\n" for row in rows[part::2])
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def measured(commands: list[list[str]]) -> tuple[float, int]:
    """Run commands at the same time, and return the seconds and the largest memory in bytes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    began, largest, ended = time.perf_counter(), 0, threading.Event()
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for command in commands]

    def watch() -> None:
        nonlocal largest
        while not ended.wait(0.5):
            largest = max(largest, sum(map(memory, descendants({process.pid for process in running}))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    codes = [process.wait() for process in running]
    seconds = time.perf_counter() - began
    ended.set()
    watcher.join()
    if any(codes):
        raise SystemExit(f"failed: {commands[0]}")
    return seconds, largest


def descendants(roots: set[int]) -> set[int]:
    """Return processes and all processes that they started."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended
            continue
    found = set(roots)
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def memory(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # it ended
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main()
