"""Time hard-negative mining, against sentence-transformers' `mine_hard_negatives`, and on a million passages.

python benchmarks/mining.py                              # a few minutes on one CPU core
python benchmarks/mining.py --scale 1000000 --kinds exact ivfpq hnsw
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from retrieval_common import cost, heading, static_model, texts

from revela_hub.retrieval import IndexOptions, MiningSettings, RankerSettings, TextList
from revela_hub.retrieval.dense import open_index
from revela_hub.retrieval.mining import MiningReport, mine
from revela_hub.retrieval.vectors import VectorStore

SETTINGS: dict[str, Any] = {"num_negatives": 3, "range_max": 50, "relative_margin": 0.05}


def pairs(number: int) -> tuple[list[str], list[str]]:
    positives = list(texts(number, 30, seed=5))
    return [" ".join(text.split()[:8]) for text in positives], positives


def theirs(documents: int, anchors: int) -> str:
    from sentence_transformers.util import mine_hard_negatives

    asked, positives = pairs(anchors)
    mined = mine_hard_negatives(
        Dataset.from_dict({"anchor": asked, "positive": positives}),
        static_model(256),
        corpus=list(texts(documents, 30)) + positives,
        output_format="n-tuple",
        verbose=False,
        **SETTINGS,
    )
    return str(len(mined))


def ours(documents: int, anchors: int, folder: str) -> str:
    asked, positives = pairs(anchors)
    ranking = RankerSettings(identity="static")
    mined = mine(
        zip(asked, positives, strict=True),
        texts(documents, 30),
        static_model(256),
        MiningSettings(**SETTINGS),
        ranking,
        MiningReport(),
        folder=folder,
    )
    return str(sum(1 for _ in mined))


def clusters(rows: list[int], dimension: int) -> np.ndarray:
    """Return clustered vectors, like those of texts, the same for the same numbers."""
    centres = np.random.default_rng(0).normal(size=(5000, dimension)).astype(np.float32)
    noise = np.random.default_rng(1).normal(size=(4096, dimension)).astype(np.float32)
    numbers = np.array(rows)
    return centres[numbers * 7919 % 5000] + 0.7 * noise[numbers * 104_729 % 4096] + 0.3 * noise[numbers * 31 % 4093]


def at_scale(documents: int, anchors: int, dimension: int, kind: str, folder: Path) -> str:
    source = TextList([str(row) for row in range(documents)])
    store = VectorStore(folder, "clusters")
    store.fill(source, lambda batch: clusters([int(text) for text in batch], dimension))
    vectors = store.vectors(source, normalize=True)
    random = np.random.default_rng(2)
    queries = vectors[np.sort(random.choice(documents, anchors, replace=False))]
    queries += random.normal(size=queries.shape).astype(np.float32) * 0.05
    began = time.process_time()
    index = open_index(vectors, IndexOptions(kind), folder=folder)
    built = time.process_time() - began
    began = time.process_time()
    hits = index.search(queries, 50)
    searched = time.process_time() - began
    sample = slice(0, 500)
    exact = open_index(vectors).search(queries[sample], 50) if kind != "exact" else hits
    found = zip(exact.rows_QK[sample], hits.rows_QK[sample], strict=True)
    recall = np.mean([len(set(one) & set(other)) / 50 for one, other in found])
    return f"{built:9.1f} {searched:9.1f} {recall:9.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--anchors", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--scale", type=int, default=0, help="passages for the test with many anchors, for example 1000000"
    )
    parser.add_argument("--scale-anchors", type=int, default=20_000)
    parser.add_argument("--dimension", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", default=["exact", "ivfpq", "hnsw"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(heading())
    if args.rounds:
        print(f"\n{args.documents:,} passages, {args.anchors:,} anchors")
        print(f"{'':<22} {'CPU s':>7} {'peak MB':>8} {'rows':>7}")
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, part in (
                ("mine_hard_negatives", lambda: theirs(args.documents, args.anchors)),
                ("ours", lambda folder=folder: ours(args.documents, args.anchors, folder)),
                ("ours, second run", lambda folder=folder: ours(args.documents, args.anchors, folder)),
            ):
                found = cost(part)
                print(f"{name:<22} {found.cpu:7.1f} {found.megabytes:8.0f} {found.result:>7}", flush=True)
    if args.scale:
        print(
            f"\n{args.scale:,} passages, {args.scale_anchors:,} anchors, the best 50 of each, vectors of {args.dimension} dimensions on disk"
        )
        print(f"{'':<10} {'build s':>9} {'search s':>9} {'recall@50':>9} {'peak MB':>8}")
        with tempfile.TemporaryDirectory() as folder:
            for kind in args.kinds:
                found = cost(
                    lambda kind=kind: at_scale(args.scale, args.scale_anchors, args.dimension, kind, Path(folder))
                )
                print(f"{kind:<10} {found.result} {found.megabytes:8.0f}", flush=True)


if __name__ == "__main__":
    main()
