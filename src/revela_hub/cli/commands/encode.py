"""Encodes a corpus into the folder of an index: whole, or one shard of it for each job of a cluster.

Texts are cut into passages, sorted by length and encoded in batches of about equally many tokens. The first file of vectors is
written within seconds; run an interrupted command again and it goes on, a passage that has a vector is not encoded again. When
all shards are there, `revela-hub index` with the same model, passages and output reads them and makes the index.

Examples:
  revela-hub encode my-retriever --corpus wiki.jsonl --output_dir wiki-index --num_processes 4
  revela-hub encode my-retriever --corpus wiki.jsonl --output_dir wiki-index --num_shards 64 --shard 7
  revela-hub index my-retriever --corpus wiki.jsonl --output_dir wiki-index
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from annotated_types import Interval

from revela_hub.cli.passage_options import PassageOptions, check_output, load_passage_encoder
from revela_hub.cli.processes import run_in_processes
from revela_hub.errors import UserError
from revela_hub.ranges import NonNegativeInt, PositiveInt, check_ranges
from revela_hub.retrieval.index_options import IndexOptions

POSITIONALS = ("model",)


@dataclass(kw_only=True)
class Arguments(PassageOptions):
    """Arguments of `revela-hub encode`."""

    num_shards: PositiveInt = field(
        default=1, metadata={"help": "Number of shards that the passages are divided into."}
    )
    shard: NonNegativeInt = field(default=0, metadata={"help": "Number of the shard to encode, counted from 0."})
    num_processes: Annotated[int, Interval(ge=1, le=256)] = field(
        default=1,
        metadata={"help": "Number of processes on this machine; without --device, each uses the next GPU."},
    )

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: for a value out of range.
        """
        check_ranges(self)


def run(arguments: Arguments) -> None:
    """Encodes the shard's passages that have no vector yet."""
    from revela_hub.retrieval.disk import claim_folder
    from revela_hub.retrieval.ranking import document_vectors
    from revela_hub.retrieval.texts import Rows

    if arguments.shard >= arguments.num_shards:
        raise UserError(f"--shard {arguments.shard}: the shards are 0 to {arguments.num_shards - 1}")
    check_output(arguments)
    if arguments.num_processes > 1:
        run_in_processes(__name__, parts_of(arguments))
        return
    loaded = load_passage_encoder(arguments, IndexOptions(dtype=arguments.dtype))
    folder = claim_folder(Path(arguments.output_dir).expanduser(), "--output_dir")
    texts = loaded.write(folder).texts
    # Whole blocks, not every n-th: what stands together in the corpus is read together later.
    start, stop = (len(texts) * (arguments.shard + end) // arguments.num_shards for end in (0, 1))
    vectors = document_vectors(Rows(texts, start, stop), loaded.encoder, loaded.settings, folder, option="--output_dir")
    print(f"{len(vectors):,} passages of {len(texts):,} have their vectors in {folder}")


def parts_of(arguments: Arguments) -> list[Arguments]:
    """What each of the processes is to do: a part of the shard, on a GPU of its own where there are several."""
    processes, shards = arguments.num_processes, arguments.num_shards * arguments.num_processes
    first = arguments.shard * processes
    devices = [arguments.device] if arguments.device else _devices()
    return [
        replace(arguments, num_processes=1, num_shards=shards, shard=first + part, device=devices[part % len(devices)])
        for part in range(processes)
    ]


def _devices() -> list[str | None]:
    """One for each GPU; the model's own choice where there are not several."""
    import torch

    count = torch.cuda.device_count()
    return [f"cuda:{number}" for number in range(count)] if count > 1 else [None]
