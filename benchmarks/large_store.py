"""Open and search an index of ten million passages: seconds from a cold start, and memory.

python benchmarks/large_store.py                         # 10 million passages: 15 minutes on one CPU core, 5 GB of disk
python benchmarks/large_store.py --passages 1000000 --kinds exact

The index is written by `build_store`, with pseudo-random vectors of the passages' numbers instead of a model's. Each row is a new
process. "cold": the files of the index were dropped from the page cache before. "open" includes the comparison of the canary,
"first query" the passages that are printed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from retrieval_common import heading

from revela_hub.data.text.chunks import Chunk
from revela_hub.retrieval import IndexOptions, PassageStore, RankerSettings, build_ranker, build_store, write_passages
from revela_hub.retrieval.dense import open_index

DIMENSION = 64
IDENTITY = "numbers@1"


class NumberEncoder:
    """Return clustered vectors that depend on the number in a text."""

    def __init__(self) -> None:
        self.centres = np.random.default_rng(0).normal(size=(5000, DIMENSION)).astype(np.float32)
        self.noise = np.random.default_rng(1).normal(size=(65_536, DIMENSION)).astype(np.float32)

    def encode_document(self, inputs: list[str], /, **options: Any) -> np.ndarray:
        """Return the vectors (N, D) of texts."""
        numbers = np.array([int(text.split(" ", 2)[1]) for text in inputs], dtype=np.int64)
        vectors = self.centres[numbers * 7919 % 5000] + 0.7 * self.noise[numbers * 104_729 % 65_536]
        return vectors + 0.3 * self.noise[numbers * 31 % 65_521]

    encode_query = encode_document


def passages(number: int) -> Iterator[Chunk]:
    for row in range(number):
        line = row % 1000 + 1
        yield Chunk(f"{row // 1000}", f"passage {row} on line {line} of file {row // 1000}.txt", None, line, line)


def build(folder: Path, number: int) -> None:
    began = time.process_time()
    build_store(
        lambda place: write_passages(passages(number), place),
        NumberEncoder(),
        folder,
        settings("exact"),
        model="numbers",
    )
    print(f"{'exact':<8} {time.process_time() - began:9.1f} {memory('VmHWM'):9.0f} {size(folder):11.1f}", flush=True)


def add(folder: Path, kind: str) -> None:
    """Build another index over the same vectors."""
    began, before = time.process_time(), size(folder)
    open_index(PassageStore(folder, IDENTITY).vectors, settings(kind).index, folder=folder)
    grown = size(folder) - before
    print(f"{kind:<8} {time.process_time() - began:9.1f} {memory('VmHWM'):9.0f} {grown:11.1f}", flush=True)


def settings(kind: str) -> RankerSettings:
    quantized = kind in ("int8", "binary")
    options = IndexOptions("exact" if quantized else kind, precision=kind if quantized else "float32")
    return RankerSettings(identity=IDENTITY, index=options)


def search(folder: Path, kind: str, cold: bool) -> None:
    import torch

    torch.set_num_threads(1)
    encoder = NumberEncoder()
    if kind != "exact":
        import faiss  # noqa: F401 (as a model is, it is loaded before the time starts)
    before, began = memory("RssAnon"), time.monotonic()
    store = PassageStore(folder, IDENTITY)
    warning = store.compare_canary(encoder)
    ranker = build_ranker(store.passages.texts, settings(kind), folder, dense=encoder, vectors=store.vectors)
    opened = time.monotonic()
    taken = []
    for number in (4321, 77, len(store) - 1):
        started = time.monotonic()
        [hits] = store.found(ranker.search(ranker.encode([f"passage {number} x"]), 10))
        taken.append(time.monotonic() - started)
        if warning or hits[0].text.split()[1] != str(number):
            raise RuntimeError(f"the wrong passage was found: {warning or hits[0]}")
    anonymous, peak = memory("RssAnon") - before, memory("VmHWM")
    print(
        f"{kind:<8} {'cold' if cold else 'warm':<5} {opened - began:8.2f} {taken[0]:14.2f} {taken[1]:13.2f} {anonymous:14.0f}"
        f" {peak:9.0f}",
        flush=True,
    )


def memory(name: str) -> float:
    """Return a number of /proc/self/status in MB."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) / 1024  # type: ignore[union-attr]


def size(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9


def drop(folder: Path) -> None:
    """Remove the files of a folder from the page cache."""
    for file in (file for file in folder.rglob("*") if file.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=10_000_000)
    parser.add_argument("--kinds", nargs="+", default=["exact", "int8", "binary", "ivfpq"])
    parser.add_argument("--folder", type=Path, default=Path("large-store"), help="for the index; deleted afterwards")
    parser.add_argument("--keep", action="store_true", help="keep the folder, or continue with it")
    parser.add_argument("--part", choices=["build", "add", "cold", "warm"], help="for the child processes")
    args = parser.parse_args()
    if args.part == "build":
        return build(args.folder, args.passages)
    if args.part == "add":
        return add(args.folder, args.kinds[0])
    if args.part is not None:
        return search(args.folder, args.kinds[0], args.part == "cold")
    if args.folder.exists() and not args.keep:
        sys.exit(f"{args.folder} exists already")
    print(heading(), flush=True)
    try:
        print(f"\n{args.passages:,} passages\n{'build':<8} {'CPU s':>9} {'peak MB':>9} {'GB on disk':>11}", flush=True)
        for kind in dict.fromkeys(["exact", *args.kinds]):
            child(kind, "build" if kind == "exact" else "add")
        columns = f"{'open s':>8} {'first query s':>14} {'next query s':>13} {'own memory MB':>14} {'peak MB':>9}"
        print(f"\n{'search':<14} {columns}", flush=True)
        for kind, part in ((kind, part) for kind in args.kinds for part in ("cold", "warm")):
            if part == "cold":
                drop(args.folder)
            child(kind, part)
    finally:
        if not args.keep:
            shutil.rmtree(args.folder, ignore_errors=True)


def child(kind: str, part: str) -> None:
    subprocess.run([sys.executable, *sys.argv, "--kinds", kind, "--part", part], check=True)


if __name__ == "__main__":
    main()
