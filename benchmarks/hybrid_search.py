"""CPU time and peak memory of dense, sparse, BM25 and hybrid search on 100,000 passages.

Passages are 60 words drawn by Zipf's law. Dense vectors have 384 dimensions, sparse ones 128 terms of 30,000; both are
random, since neither time nor memory depends on a trained model. Times are CPU seconds, which other programs hardly
affect. Encoding the query takes almost no time.

    python benchmarks/hybrid_search.py                       # about two minutes on one CPU core
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from retrieval_common import VOCABULARY, cost, heading, texts

from revela_hub.retrieval import IndexOptions, RankerSettings, TextList, build_ranker

DIMENSION, TERMS = 384, 128
MODES: dict[str, dict[str, Any]] = {
    "dense (exact)": {"mode": "dense"},
    "dense (flat)": {"mode": "dense", "index": IndexOptions("flat")},
    "dense (hnsw)": {"mode": "dense", "index": IndexOptions("hnsw")},
    "dense (ivfpq)": {"mode": "dense", "index": IndexOptions("ivfpq")},
    "sparse": {"mode": "sparse"},
    "bm25": {"mode": "bm25"},
    "dense + bm25": {"mode": "hybrid"},
    "dense + sparse + bm25": {"mode": "hybrid", "parts": ("dense", "sparse", "bm25")},
}


class Random:
    """Encoder that returns random vectors or weighted terms, the same for the same text."""

    def __init__(self, *, sparse: bool) -> None:
        self.sparse = sparse

    def encode_document(self, inputs: list[str], /, **options: Any) -> Any:
        """Return vectors (N, D) or a sparse tensor (N, V)."""
        random = np.random.default_rng(len(inputs[0]))
        if not self.sparse:
            return random.normal(size=(len(inputs), DIMENSION)).astype(np.float32)
        # As in real text, some terms occur in very many passages.
        terms = np.minimum(random.zipf(1.2, size=(len(inputs), TERMS)), VOCABULARY) - 1
        rows = np.repeat(np.arange(len(inputs)), TERMS)
        values = torch.from_numpy(random.random(rows.size).astype(np.float32))
        indices = torch.from_numpy(np.stack([rows, terms.reshape(-1)]))
        return torch.sparse_coo_tensor(indices, values, (len(inputs), VOCABULARY))

    encode_query = encode_document

    def get_embedding_dimension(self) -> int:
        """Return the number of terms."""
        return VOCABULARY


def measure(settings: RankerSettings, passages: int, queries: int) -> str:
    source = TextList(list(texts(passages, 60)))
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        ranker = build_ranker(source, settings, Path(folder), dense=Random(sparse=False), sparse=Random(sparse=True))
        built = time.process_time() - began
        asked = list(texts(queries, 6, seed=1))
        ranker.search(asked[:1], 100)  # warm-up: files that are read once
        times = []
        for query in asked:
            began = time.process_time()
            ranker.search([query], 100)
            times.append(time.process_time() - began)
        began = time.process_time()
        ranker.search(asked, 100)
        together = (time.process_time() - began) / queries
    return (
        f"{built:8.1f} {1000 * np.median(times):10.1f} {1000 * np.quantile(times, 0.95):8.1f} {1000 * together:10.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(heading())
    base = cost(lambda: str(len(TextList(list(texts(args.passages, 60)))))).megabytes
    print(f"{args.passages:,} passages ({base:.0f} MB of texts, not counted below), the best 100 for a query\n")
    print(f"{'':<22} {'build s':>8} {'ms/query':>10} {'95%':>8} {'ms of ' + str(args.queries):>10} {'peak MB':>8}")
    for name in args.modes:
        settings = RankerSettings(**MODES[name], identity="random", sparse_identity="random")
        found = cost(lambda settings=settings: measure(settings, args.passages, args.queries))
        print(f"{name:<22} {found.result} {max(0, found.megabytes - base):8.0f}", flush=True)


if __name__ == "__main__":
    main()
