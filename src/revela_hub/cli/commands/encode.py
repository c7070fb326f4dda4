"""Encodes a corpus into the folder of an index: whole, or one shard of it for each job of a cluster.

Texts are cut into passages, sorted by length and encoded in batches of about equally many tokens. The first file of vectors is
written within seconds; run an interrupted command again and it goes on, a passage that has a vector is not encoded again. When
all shards are there, `revela-hub index` with the same model, passages and output reads them and makes the index.

Examples:
  revela-hub encode my-retriever --passages wiki.jsonl --output wiki-index --num-processes 4
  revela-hub encode my-retriever --passages wiki.jsonl --output wiki-index --num-shards 64 --shard 7
  revela-hub index my-retriever --passages wiki.jsonl --output wiki-index
"""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from revela_hub.cli.passage_options import PassageOptions, load_passage_encoder
from revela_hub.errors import UserError
from revela_hub.ranges import NonNegativeInt, PositiveInt

POSITIONALS = ("model",)


@dataclass(kw_only=True)
class Arguments(PassageOptions):
    """Arguments of `revela-hub encode`."""

    num_shards: PositiveInt = field(default=1, metadata={"help": "Into how many shards the passages are divided."})
    shard: NonNegativeInt = field(default=0, metadata={"help": "Which of them to encode, counted from 0."})
    num_processes: PositiveInt = field(
        default=1, metadata={"help": "Processes of this machine, each with a model and a part of the shard."}
    )


def run(arguments: Arguments) -> None:
    """Encodes the shard's passages that have no vector yet."""
    from revela_hub.retrieval.disk import make_folder
    from revela_hub.retrieval.ranking import document_vectors
    from revela_hub.retrieval.texts import Rows

    if arguments.shard >= arguments.num_shards:
        raise UserError(f"--shard {arguments.shard}: the shards are 0 to {arguments.num_shards - 1}")
    folder = make_folder(Path(arguments.output).expanduser(), "--output")
    if arguments.num_processes > 1:
        _in_processes(arguments.num_processes, arguments.num_shards, arguments.shard)
        return
    loaded = load_passage_encoder(arguments)
    texts = loaded.write(folder).texts
    # Whole blocks, not every n-th: what stands together in the corpus is read together later.
    start, stop = (len(texts) * (arguments.shard + end) // arguments.num_shards for end in (0, 1))
    vectors = document_vectors(Rows(texts, start, stop), loaded.encoder, loaded.settings, folder, option="--output")
    print(f"{len(vectors):,} passages of {len(texts):,} have their vectors in {folder}")


def _in_processes(processes: int, num_shards: int, shard: int) -> None:
    """Runs this command once for each part of the shard."""
    words = sys.argv[1:]
    for name in ("num-shards", "shard", "num-processes"):
        words = _without(words, (f"--{name}", f"--{name.replace('-', '_')}"))
    command = [sys.executable, "-m", "revela_hub", *words, "--num-shards", str(num_shards * processes)]
    running = [subprocess.Popen([*command, "--shard", str(shard * processes + part)]) for part in range(processes)]
    failed = [process.wait() for process in running]
    if any(failed):
        raise UserError(
            f"{sum(map(bool, failed))} of {processes} processes failed, their messages are above; run again to continue"
        )


def _without(words: list[str], names: tuple[str, ...]) -> list[str]:
    """The words without an option and its value."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip or word.startswith(tuple(f"{name}=" for name in names)):
            skip = False
        elif word in names:
            skip = True
        else:
            kept.append(word)
    return kept
