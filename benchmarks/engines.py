"""What do the engines cost? `encode` in two processes, as two shards, with Ray and with datatrove, on the same passages and cores.

    python benchmarks/engines.py --data $REVELA_HUB_DATA --model examples/quickstart/retriever
    python benchmarks/engines.py --data $REVELA_HUB_DATA --task synthesize --model examples/quickstart/lm
    python benchmarks/engines.py --data $REVELA_HUB_DATA --task cut --passages 200000

`synthesize` answers prompts with a local language model, and `cut` cuts JSON lines into passages, here and with Ray.

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

SYNTHESIZE = """
import sys
from functools import partial
from revela_hub.data.ray_cluster import RayCluster
from revela_hub.data.synthesis.backends import LocalModel, Request, Sampling
from revela_hub.data.synthesis.ray_model import ray_model

model, prompts, actors = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
requests = [Request(f"Write about number {number}.", number) for number in range(prompts)]
load = partial(LocalModel, model, Sampling(max_new_tokens=128), batch_size=8, device="cpu")
if actors:
    with ray_model(load, RayCluster(num_actors=actors), 8) as backend:
        replies = list(backend.replies(requests))
else:
    replies = list(load().replies(requests))
assert len(replies) == prompts
"""

CUT = """
import json, sys
from pathlib import Path
import pyarrow as pa
import pyarrow.parquet as pq
from revela_hub.data.text.passage_rows import cut_rows

corpus, output, engine = sys.argv[1:]
if engine == "ray":
    import ray
    ray.init(log_to_driver=False)
    rows = ray.data.read_json(corpus, lines=True)
    rows.map_batches(cut_rows, fn_kwargs={"id_column": "id"}).write_parquet(output, min_rows_per_file=100_000)
else:
    Path(output).mkdir(parents=True)
    for file in sorted(Path(corpus).glob("*.jsonl")):
        rows = [json.loads(line) for line in file.open()]
        columns = {name: [row[name] for row in rows] for name in ("id", "text")}
        pq.write_table(pa.table(cut_rows(columns, id_column="id")), f"{output}/{file.stem}.parquet")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with squad")
    parser.add_argument("--task", choices=("encode", "synthesize", "cut"), default="encode")
    parser.add_argument("--model", help="encode: sentence-transformers folder; synthesize: language model")
    parser.add_argument("--work", type=Path, default=Path("outputs/engines"))
    parser.add_argument("--passages", type=int, default=2500, help="number of passages; synthesize: of prompts")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    output = given.work / "output"
    engines = {"encode": encode, "synthesize": synthesize, "cut": cut}[given.task](given, output)
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in engines}
    for _ in range(given.rounds):
        for name, commands in engines.items():
            shutil.rmtree(output, ignore_errors=True)
            runs[name].append(measured(commands))
            print(f"{name}: {runs[name][-1][0]:.1f} s", file=sys.stderr, flush=True)
    print(f"{heading()}\n\n{given.passages:,} passages of SQuAD (synthesize: prompts), median of {given.rounds}:\n")
    print("| engine | seconds | ratio | memory, MB |\n|---|---|---|---|")
    medians = {name: statistics.median(seconds for seconds, _ in found) for name, found in runs.items()}
    base = medians.get("two processes (`--num_processes 2`)", medians["one process"])
    for name, found in runs.items():
        largest = max(each for _, each in found) / 2**20
        print(f"| {name} | {medians[name]:.1f} | {medians[name] / base:.2f} | {largest:.0f} |")


def encode(given: argparse.Namespace, output: Path) -> dict[str, list[list[str]]]:
    """Return the commands of each engine."""
    corpus = write_corpus(given.data / "squad" / "passages.jsonl.gz", given.work / "corpus", given.passages)
    encode = [sys.executable, "-m", "revela_hub", "encode", "--model", given.model, "--corpus", str(corpus), "--quiet"]
    encode += ["--output_dir", str(output)]
    return {
        "one process": [encode],
        "two processes (`--num_processes 2`)": [[*encode, "--num_processes", "2"]],
        "two shards at a time (`--num_shards 2`)": [
            [*encode, "--num_shards", "2", "--shard", str(shard)] for shard in range(2)
        ],
        "Ray, two actors (`--engine ray`)": [[*encode, "--engine", "ray"]],
        "datatrove, two workers": [
            [sys.executable, "-c", DATATROVE, str(corpus), given.model, str(output / "parquet")]
        ],
    }


def synthesize(given: argparse.Namespace, output: Path) -> dict[str, list[list[str]]]:
    """Return the commands of each engine."""
    names = {"one process": 0, "Ray, one actor": 1, "Ray, two actors": 2}
    command = [sys.executable, "-c", SYNTHESIZE, given.model, str(given.passages)]
    return {name: [[*command, str(actors)]] for name, actors in names.items()}


def cut(given: argparse.Namespace, output: Path) -> dict[str, list[list[str]]]:
    """Return the commands of each engine."""
    corpus = write_corpus(given.data / "squad" / "passages.jsonl.gz", given.work / "corpus", given.passages)
    command = [sys.executable, "-c", CUT, str(corpus), str(output.resolve())]
    return {"one process": [[*command, "local"]], "Ray, two cores": [[*command, "ray"]]}


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
