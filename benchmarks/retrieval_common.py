"""Helpers for the retrieval benchmarks: texts with natural word frequencies, tiny models, time and memory of a part."""

import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 30_000


class Cost(NamedTuple):
    """Time and memory of a part of a program."""

    seconds: float
    cpu: float
    megabytes: float
    """Peak memory of its process, minus the memory at its start."""
    result: str


def texts(number: int, words: int = 40, seed: int = 0, *, mixed: bool = False) -> Iterator[str]:
    """Yield texts of about `words` words drawn by Zipf's law, or of very different lengths if `mixed`."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, VOCABULARY + 1)
    names = np.array([f"w{number}" for number in range(VOCABULARY)])
    for start in range(0, number, 10_000):
        size = min(10_000, number - start)
        lengths = random.lognormal(np.log(words), 0.9, size).clip(3, 160) if mixed else np.full(size, words)
        drawn = names[random.choice(VOCABULARY, int(lengths.astype(int).sum()), p=weights / weights.sum())]
        end = 0
        for length in lengths.astype(int):
            yield " ".join(drawn[end : end + length])
            end += length


def static_model(dimension: int = 64) -> Any:
    """Return a SentenceTransformer of random word vectors. Encoding takes almost no time, so the rest dominates."""
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)} | {"[UNK]": VOCABULARY}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    weights = np.random.default_rng(0).normal(size=(VOCABULARY + 1, dimension)).astype(np.float32)
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)], device="cpu")


def cost(part: Callable[[], str]) -> Cost:
    """Run a part in a forked process to measure its memory separately. Call it before this process starts threads."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        result = part()
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        said = f"{time.monotonic() - began}|{cpu}|{(after.ru_maxrss - before.ru_maxrss) / 1024}|{result}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    if not said:
        raise RuntimeError("the part failed; its error message is above")
    seconds, cpu, megabytes, result = said.split("|", 3)
    return Cost(float(seconds), float(cpu), float(megabytes), result)


def heading() -> str:
    """Return lines with the command and the machine."""
    import torch

    model = next(
        (line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    return (
        f"command: python {' '.join(sys.argv)}\n"
        f"machine: {model}, {torch.get_num_threads()} thread(s), Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )
