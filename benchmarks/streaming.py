"""Memory while commands read parquet shards: does it grow with the size of the data?

python benchmarks/streaming.py                            # 0.05 and 0.25 GB for commands, 5 GB for reading: 10 minutes, 1 GB of disk
python benchmarks/streaming.py --read 1 --sizes 0.1 0.4

Shards of 50 MB of text (random words) are generated. Each row is a new process; its anonymous memory (what the kernel cannot drop,
unlike the pages of mapped files) is sampled every 50 ms. "groups" are the training rows of Revela, "stream" writes an
IterableDataset to the cache as the trainers do without `max_steps`, "train" trains a tiny BERT with Contriever and `--streaming true`,
"mine" searches the vectors of a model of word vectors for 2,000 pairs.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from retrieval_common import VOCABULARY, heading, static_model

SHARD = 50_000_000
STEPS = 500
"""Training steps of 64 passages."""
UNIQUE = 5
"""Shards that are generated; others are hard links to these."""
WORDS = 240
"""Words of a document: two passages."""


def generate(folder: Path, gigabytes: float) -> None:
    """Write shards until `folder` has this much text."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    names = np.array([f"w{number}" for number in range(VOCABULARY)])
    weights = 1 / np.arange(1, VOCABULARY + 1)
    drawn = names[random.choice(VOCABULARY, 2_000_000, p=weights / weights.sum())]
    for shard in range(round(gigabytes * 1e9 / SHARD)):
        file = folder / f"part-{shard:03}.parquet"
        if file.exists():
            continue
        if shard >= UNIQUE:
            os.link(folder / f"part-{shard % UNIQUE:03}.parquet", file)
            continue
        size, writer = 0, None
        while size < SHARD:
            starts = random.integers(0, len(drawn) - WORDS, 4000)
            texts = [". ".join(" ".join(drawn[s + n : s + n + 20]) for n in range(0, WORDS, 20)) + "." for s in starts]
            batch = pa.RecordBatch.from_pydict({"text": texts})
            writer = writer or pq.ParquetWriter(file, batch.schema, compression="zstd")
            writer.write_batch(batch)
            size += sum(map(len, texts))
        if writer is not None:
            writer.close()


def read(data: Path, work: Path) -> str:
    from revela_hub.data.sources.documents import read_documents

    return f"{sum(1 for _ in read_documents(str(data))):,} documents"


def groups(data: Path, work: Path) -> str:
    from revela_hub.data.text.groups import build_groups

    return f"{len(build_groups(str(data), cache_dir=work / 'cache')):,} groups"


def stream(data: Path, work: Path) -> str:
    from datasets import load_dataset

    from revela_hub.data.row_cache import stream_rows

    rows = load_dataset("parquet", data_files=str(data / "*.parquet"), split="train", streaming=True)
    return f"{len(stream_rows(rows, 'train_dataset', work / 'cache')):,} rows"


def train(data: Path, work: Path) -> str:
    import datasets

    from revela_hub.cli.main import main

    cache = work / "cache"
    datasets.config.HF_DATASETS_CACHE = str(cache)
    given = {"data": data, "retriever": tiny_bert(work / "bert"), "cache_dir": cache, "output_dir": work / "run"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    options = f"--streaming true --max_steps {STEPS} --save_strategy no --probe none --use_cpu true --bf16 false"
    main(["train", "contriever", *words, *options.split(), "--report_to", "none", "--quiet", "true"])
    size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    return f"{STEPS} steps, {size / 1e6:.1f} MB in the cache"


def tiny_bert(folder: Path) -> Path:
    """Write a random BERT with one layer for the generated words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {f"w{n}": n + 2 for n in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
    return folder


def mine(data: Path, work: Path) -> str:
    from revela_hub.cli.main import main

    first = next(pq.ParquetFile(data / "part-000.parquet").iter_batches(2000))
    texts = first.column("text").to_pylist()
    pq.write_table(pa.table({"anchor": [text[:60] for text in texts], "positive": texts}), work / "pairs.parquet")
    given = {
        "pairs": work / "pairs.parquet",
        "corpus": data,
        "cache_dir": work / "mining",
        "output": work / "mined.parquet",
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    main(["mine", str(work / "model"), *words, "--positive_aware", "false", "--device", "cpu", "--quiet"])
    return f"{pq.read_metadata(work / 'mined.parquet').num_rows:,} rows"


def probe(data: Path, work: Path) -> str:
    from revela_hub.cli.main import main

    main(["probe", str(data), "--output_dir", str(work / "probe"), "--quiet"])
    return "a probe"


PARTS: dict[str, Callable[[Path, Path], str]] = {
    each.__name__: each for each in (read, groups, stream, train, mine, probe)
}


def memory() -> float:
    """Return this process's anonymous memory in MB."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def measure(name: str, data: Path, work: Path) -> None:
    """Run a part and print its peak memory."""
    peak, ended = memory(), threading.Event()
    before = peak

    def sample() -> None:
        nonlocal peak
        while not ended.wait(0.05):
            peak = max(peak, memory())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    began = time.monotonic()
    result = PARTS[name](data, work)
    taken = time.monotonic() - began
    ended.set()
    thread.join()
    print(f"| {name} | {data.name} | {result} | {taken:,.0f} | {before:,.0f} | {peak:,.0f} |", flush=True)


def main() -> None:
    """Generate the data and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="*", default=[0.05, 0.25], help="GB of text for each part")
    parser.add_argument("--read", type=float, default=5.0, help="GB of text for reading alone")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument(
        "--folder", type=Path, default=Path("streaming"), help="for data and results; deleted afterwards"
    )
    parser.add_argument("--keep", action="store_true", help="keep the data")
    parser.add_argument("--part", nargs=3, help="for the child processes")
    args = parser.parse_args()
    if args.part is not None:
        return measure(args.part[0], Path(args.part[1]), Path(args.part[2]))
    print(
        heading(),
        "\n\n| part | text | result | seconds | MB at the start | peak MB |\n|---|---|---|---|---|---|",
        flush=True,
    )
    try:
        for size in (*args.sizes, *([args.read] if args.read else [])):
            data, work = args.folder / f"{size:g} GB", args.folder / "work"
            generate(data, size)
            for part in args.parts if size in args.sizes else ["read"]:
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
                static_model(32).save(str(work / "model"))
                subprocess.run([sys.executable, __file__, "--part", part, str(data), str(work)], check=True)
            if not args.keep:
                shutil.rmtree(data)
    finally:
        if not args.keep:
            shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
