"""Makes a passage index on disk: texts, vectors, and what finds them, for `search --index`, `answer` and ImpRAG.

The index belongs to the model that made it: another one's vectors are refused. exact reads the vectors from disk block by
block and needs next to no memory; hnsw and ivfpq (FAISS) answer in milliseconds from millions of vectors and miss a few;
milvus keeps the vectors in a Milvus server (--milvus-uri http://host:19530), or in a file of the folder. An interrupted run
goes on; shards that `revela-hub encode` has written are read.

Examples:
  revela-hub index my-retriever --passages docs --output my-index
  revela-hub index my-retriever --passages wiki.jsonl --output wiki-index --index-type hnsw
  revela-hub index my-retriever --passages wiki.jsonl --output wiki-index --index-type milvus --milvus-uri http://db:19530
  revela-hub search my-retriever --index my-index "what is a shard?"
"""

from dataclasses import dataclass, field
from typing import Literal

from revela_hub.cli.passage_options import PassageOptions, load_passage_encoder

POSITIONALS = ("model",)


@dataclass(kw_only=True)
class Arguments(PassageOptions):
    """Arguments of `revela-hub index`."""

    index_type: Literal["exact", "flat", "hnsw", "ivfpq", "milvus"] = field(
        default="exact", metadata={"help": "How vectors are searched; hnsw and ivfpq are approximate."}
    )
    milvus_uri: str | None = field(
        default=None, metadata={"help": "Milvus server, for --index-type milvus; by default a file in the folder."}
    )


def run(arguments: Arguments) -> None:
    """Writes the index and says what is in it."""
    from revela_hub.retrieval import build_store

    loaded = load_passage_encoder(arguments, index=arguments.index_type, milvus_uri=arguments.milvus_uri)
    store = build_store(
        loaded.write,
        loaded.encoder,
        arguments.output,
        loaded.settings,
        model=arguments.model,
        max_length=arguments.max_seq_length,
    )
    print(
        f"{len(store):,} passages, vectors of {store.facts.dimension} numbers ({store.facts.index}), in {store.folder}"
    )
