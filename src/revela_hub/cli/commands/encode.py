"""Encode a corpus into an index folder, as a whole or one shard per job.

Texts are split into passages and encoded in batches of similar length. An interrupted command resumes when it is run
again: existing vectors are reused. When all shards are done, run `revela-hub index` with the same model, corpus, output
folder, --dtype, --document_prompt, --max_words, --max_length, --kind, --text_column, --exclude and --max_documents.

With --parquet_dir, the passages are also written as parquet files with the columns id, text, vector, document, path,
start_line and end_line. `datasets`, LanceDB and Qdrant read them.

Examples:
  revela-hub encode my-retriever --corpus wiki.jsonl --output_dir wiki-index --num_processes 4
  revela-hub encode my-retriever --corpus wiki.jsonl --output_dir wiki-index --num_shards 64 --shard 7
  revela-hub encode my-retriever --corpus wiki.jsonl --output_dir /shared/wiki-index --engine ray --address auto
  revela-hub encode my-retriever --corpus news.parquet --output_dir cache --parquet_dir vectors
  revela-hub index my-retriever --corpus wiki.jsonl --output_dir wiki-index
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from annotated_types import Interval

from revela_hub.cli.engine_options import EngineOptions, load_for_workers, ray_engine
from revela_hub.cli.passage_options import PassageOptions, check_output, load_passage_encoder
from revela_hub.cli.processes import run_in_processes
from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.options import option
from revela_hub.paths import local_path
from revela_hub.ranges import NonNegativeInt, PositiveInt
from revela_hub.retrieval.index_options import IndexOptions

POSITIONALS = ("model",)


@dataclass(kw_only=True)
class Arguments(PassageOptions, EngineOptions):
    """Arguments of `revela-hub encode`."""

    num_shards: PositiveInt = option(1, "Number of shards that the passages are divided into.")
    shard: NonNegativeInt = option(0, "Number of the shard to encode, counted from 0.")
    num_processes: Annotated[int, Interval(ge=1, le=256)] = option(
        1, "Number of processes on this machine; without --device, each uses the next GPU."
    )

    parquet_dir: str | None = option(None, "Folder to write the passages and their vectors to, as parquet files.")


def run(arguments: Arguments) -> None:
    """Encode the passages of the shard that have no vector yet."""
    from revela_hub.retrieval.disk import claim_folder, key_of
    from revela_hub.retrieval.parquet_files import check_other_shards, check_parquet_folder, write_passages_as_parquet
    from revela_hub.retrieval.ranking import document_store, document_vectors
    from revela_hub.retrieval.texts import TextRange

    if arguments.shard >= arguments.num_shards:
        raise UserError(f"--shard {arguments.shard} must be between 0 and {arguments.num_shards - 1}")
    check_output(arguments.corpus, arguments.output_dir, exclude=arguments.exclude)
    parquet = None if arguments.parquet_dir is None else local_path(arguments.parquet_dir)
    if parquet is not None:
        if parquet.resolve() == local_path(arguments.output_dir).resolve():
            raise UserError(f"--parquet_dir {parquet} is also --output_dir: choose another folder")
        check_output(arguments.corpus, str(parquet), "--parquet_dir", arguments.exclude)
        check_parquet_folder(parquet, arguments.num_shards * arguments.num_processes)
    if arguments.num_processes > 1 and arguments.engine == "ray":
        raise UserError("--num_processes starts processes on this machine: with --engine ray, set --num_actors")
    if arguments.num_processes > 1:
        run_in_processes(__name__, parts_of(arguments))
        return
    engine = ray_engine(arguments, partial(load_for_workers, arguments))
    loaded = load_passage_encoder(arguments, IndexOptions(dtype=arguments.dtype))
    settings = replace(loaded.settings, engine=engine)
    folder = claim_folder(local_path(arguments.output_dir), "--output_dir")
    passages = loaded.write(folder)
    texts = passages.texts
    source = key_of(document_store(settings.identity, settings.document_prompt), texts.fingerprint)
    if parquet is not None:
        check_other_shards(parquet, source, arguments.shard, arguments.num_shards)
    # Consecutive passages, not every n-th one, because they are read in order later.
    start, stop = (len(texts) * (arguments.shard + end) // arguments.num_shards for end in (0, 1))
    vectors = document_vectors(TextRange(texts, start, stop), loaded.encoder, settings, folder, option="--output_dir")
    if parquet is not None:
        claim_folder(parquet, "--parquet_dir")
        write_passages_as_parquet(
            passages,
            vectors,
            parquet,
            source=source,
            start=start,
            shard=arguments.shard,
            num_shards=arguments.num_shards,
        )
    last = arguments.num_shards - 1
    shard = f" (shard {arguments.shard} of 0 to {last})" if last else ""
    print(f"encoded {len(vectors):,} of {counted(len(texts), 'passage')} in {folder}{shard}")


def parts_of(arguments: Arguments) -> list[Arguments]:
    """Return the arguments of each process: a part of the shard, on the next GPU if there are several."""
    processes, shards = arguments.num_processes, arguments.num_shards * arguments.num_processes
    first = arguments.shard * processes
    devices = [arguments.device]
    if arguments.device is None:
        import torch

        if (gpus := torch.cuda.device_count()) > 1:
            devices = [f"cuda:{number}" for number in range(gpus)]
    return [
        replace(arguments, num_processes=1, num_shards=shards, shard=first + part, device=devices[part % len(devices)])
        for part in range(processes)
    ]
