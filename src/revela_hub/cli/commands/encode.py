"""Encode a corpus into an index folder, as a whole or one shard per job.

Texts are split into passages and encoded in batches of similar length. An interrupted command resumes when it is run
again: existing vectors are reused. When all shards are done, run `revela-hub index` with the same model, corpus, output
folder, --dtype, --document_prompt, --max_words, --max_length, --kind, --text_column, --exclude and --max_documents.

Examples:
  revela-hub encode my-retriever --corpus wiki.jsonl --output_dir wiki-index --device cuda:0,cuda:1
  revela-hub encode my-retriever --corpus wiki.jsonl --output_dir wiki-index --shard 7/64
  revela-hub encode my-retriever --corpus wiki.jsonl --output_dir /shared/wiki-index --ray auto
  revela-hub index my-retriever --corpus wiki.jsonl --output_dir wiki-index
"""

from dataclasses import dataclass
from functools import partial

from revela_hub.cli.commands.index import PassageOptions, load
from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.options import option
from revela_hub.ranges import PositiveInt
from revela_hub.retrieval.index_options import IndexOptions, Precision
from revela_hub.search.models import load_dense

POSITIONALS = ("model",)


@dataclass(kw_only=True)
class Arguments(PassageOptions):
    """Arguments of `revela-hub encode`."""

    dtype: Precision = option("float32", "Type of the stored vectors.")
    shard: str = option("0/1", "Part of the passages to encode, e.g. 7/64, counted from 0.", metavar="I/N")
    ray: str | None = option(
        None, "Ray cluster to encode on: its address, auto, or local (this machine's cores).", metavar="ADDRESS"
    )
    num_actors: PositiveInt | None = option(
        None, "Ray: Number of actors (default: one per GPU of the cluster, or per CPU core without GPUs)."
    )


def run(arguments: Arguments) -> None:
    """Encode the passages of the shard that have no vector yet."""
    from revela_hub.data.sources.report import counted
    from revela_hub.files import claim
    from revela_hub.retrieval.ranking import document_store, fill_store
    from revela_hub.retrieval.ray_engine import connect, encode_on_ray

    shard, shards = map(int, arguments.shard.split("/"))
    if shard not in range(shards):
        raise UserError(f"--shard {arguments.shard} must be I/N with I from 0 to N - 1, e.g. 0/64 to 63/64")
    if arguments.ray is not None:
        connect(arguments.ray)
    encoder, settings, write = load(arguments, IndexOptions(dtype=arguments.dtype))
    folder, prompt = claim(local_path(arguments.output_dir)), arguments.document_prompt
    passages = write(folder)
    # Consecutive passages, not every n-th one, because they are read in order later.
    part = slice(*(len(passages) * number // shards for number in (shard, shard + 1)))
    store = document_store(folder, settings.identity, prompt, arguments.dtype)
    if arguments.ray is None:
        fill_store(store, passages, encoder, settings, part)
    else:
        place = local_path(arguments.model)
        model = str(place.resolve()) if place.exists() else arguments.model  # actors have their own working directory
        load_model = partial(load_dense, model, arguments, prompt=prompt, server=arguments)
        how = {"batch_size": arguments.batch_size, "prompt": prompt}
        encode_on_ray(load_model, store, passages, part, num_actors=arguments.num_actors, **how)
    which = f" (shard {shard} of 0 to {shards - 1})" if shards > 1 else ""
    print(f"encoded {part.stop - part.start:,} of {counted(len(passages), 'passage')} in {folder}{which}")
