"""Hybrid search with both lists from a Milvus server, against the hybrid on this machine: the ten best passages and nDCG@10.

    milvus-lite server --data-dir milvus --host 127.0.0.1 --port 19530
    python benchmarks/milvus_hybrid.py --data path/to/beir/scifact
    python benchmarks/milvus_hybrid.py --data path/to/beir/scifact --mode dense     # for servers before 2.4: no sparse vectors

The vectors and the BM25 weights of all passages are inserted into one collection, which is deleted afterwards. Times are
wall-clock milliseconds of one search for all queries, without encoding them.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from retrieval_common import heading

from revela_hub.data.sources.beir import read_beir
from revela_hub.data.text.chunks import Chunk
from revela_hub.evaluation.retrieval import score_run
from revela_hub.retrieval import (
    IndexOptions,
    RankerSettings,
    build_ranker,
    build_store,
    load_encoder,
    model_identity,
    write_passages,
)
from revela_hub.retrieval.milvus import MilvusIndex

K = 10


def main() -> None:
    """Print one row per place of the search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="BEIR folder")
    parser.add_argument("--model", default=str(Path(__file__).parents[1] / "examples/quickstart/retriever"))
    parser.add_argument("--uri", default="http://127.0.0.1:19530")
    parser.add_argument("--mode", choices=["hybrid", "dense"], default="hybrid")
    parser.add_argument("--folder", help="folder of an index, to resume (default: a temporary one)")
    args = parser.parse_args()
    print(heading())
    task, encoder = read_beir(args.data), load_encoder(args.model, device="cpu")
    chunks = [Chunk(name, text, None, 1, 1) for name, text in task.corpus.items()]
    options = IndexOptions("milvus", milvus_uri=args.uri, milvus_bm25=args.mode == "hybrid")
    there = RankerSettings(identity=model_identity(args.model), index=options, mode=args.mode)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or temporary
        began = time.monotonic()
        store = build_store(lambda place: write_passages(chunks, place), encoder, folder, there, model=args.model)
        assert isinstance(store.index, MilvusIndex)
        print(f"{len(store):,} passages encoded and inserted after {time.monotonic() - began:.0f} s")
        texts, given = store.passages.texts, {"dense": encoder, "vectors": store.vectors}
        here = replace(there, index=IndexOptions())
        rankers = {
            "this machine": build_ranker(texts, here, store.folder, **given),
            "Milvus": build_ranker(texts, there, store.folder, milvus=store.index, **given),
        }
        names = [store.passages.hit(row, 0.0).document for row in range(len(store))]
        print("\n| lists from | same ten best in the same order | nDCG@10 | ms per query |\n|---|---|---|---|")
        first = None
        for place, ranker in rankers.items():
            queries = ranker.encode(list(task.queries.values()))
            began = time.monotonic()
            rows_QK = ranker.search(queries, K).rows_QK
            taken = 1000 * (time.monotonic() - began) / len(rows_QK)
            first = rows_QK if first is None else first
            run = {
                query: {names[row]: float(-rank) for rank, row in enumerate(rows) if row >= 0}
                for query, rows in zip(task.queries, rows_QK.tolist(), strict=True)
            }
            same = int((rows_QK == first).all(axis=1).sum())
            print(f"| {place} | {same} of {len(rows_QK)} | {score_run(run, task).ndcg_at_10:.4f} | {taken:.1f} |")
        store.index.drop()


if __name__ == "__main__":
    main()
