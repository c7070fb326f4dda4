"""Build a passage index on disk for `revela-hub search --index` and `revela-hub answer`.

An index can only be used with the model that made it. exact reads the vectors from disk in blocks and needs little
memory; hnsw and ivfpq (FAISS) are faster and approximate; milvus stores the vectors in a Milvus server or a local
file. Interrupted runs resume, and shards from `revela-hub encode` are used.

For an ImpRAG model with independent passage encoding, --states float16 also stores the keys and values of the
passages, so that `revela-hub answer` does not compute them again.

Examples:
  revela-hub index my-retriever --corpus docs --output_dir my-index
  revela-hub index my-retriever --corpus wiki.jsonl --output_dir wiki-index --index_type hnsw
  revela-hub index my-retriever --corpus wiki.jsonl --output_dir wiki-index --index_type milvus --milvus_uri http://db:19530
  revela-hub search my-retriever --index my-index "what is a shard?"
  revela-hub index outputs/imprag/model --corpus docs --output_dir my-index --states float16
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal

from revela_hub.cli.passage_options import PassageOptions, check_output, load_passage_encoder
from revela_hub.errors import UserError
from revela_hub.output import note, shows_progress
from revela_hub.retrieval.index_options import IndexArguments

POSITIONALS = ("model",)


@dataclass(kw_only=True)
class Arguments(PassageOptions, IndexArguments):
    """Arguments of `revela-hub index`."""

    states: Literal["none", "float16"] = field(
        default="none", metadata={"help": "ImpRAG: Also store the keys and values of the passages."}
    )


def run(arguments: Arguments) -> None:
    """Write the index and print its size."""
    from revela_hub.checkpoints import METHODS, method_of_model
    from revela_hub.retrieval import build_store

    method, stores_states = method_of_model(arguments.model), arguments.states != "none"
    if stores_states and not (method and method.states):
        titles = ", ".join(each.title for each in METHODS.values() if each.states)
        raise UserError(f"--states requires a model of {titles}, but {arguments.model} is not one")
    check_output(arguments)
    loaded = load_passage_encoder(arguments, arguments.index_options(arguments.dtype))
    states = import_module(method.states) if method and stores_states else None
    if states is not None:
        states.check_states(loaded.encoder)
    store = build_store(
        loaded.write,
        loaded.encoder,
        arguments.output_dir,
        loaded.settings,
        model=arguments.model,
        max_length=arguments.max_length,
        endpoint=getattr(getattr(loaded.encoder, "server", None), "description", None),
    )
    print(
        f"{len(store):,} passages, {store.metadata.dimension}-dimensional vectors ({store.metadata.options.type}),"
        f" in {store.folder}"
    )
    for line in loaded.encoder.warnings() if method and method.encoder else ():
        note(line)
    if states is not None:
        stored = states.store_index_states(
            loaded.encoder, store, batch_size=arguments.batch_size, show_progress_bar=shows_progress()
        )
        print(f"states of {len(stored):,} passages, {stored.bytes / 1e6:,.1f} MB")
