"""Makes a passage index on disk: texts, vectors, and what finds them, for `search --index`, `answer` and ImpRAG.

The index belongs to the model that made it: another one's vectors are refused. exact reads the vectors from disk block by
block and needs next to no memory; hnsw and ivfpq (FAISS) answer in milliseconds from millions of vectors and miss a few;
milvus keeps the vectors in a Milvus server (--milvus-uri http://host:19530), or in a file of the folder. An interrupted run
goes on; shards that `revela-hub encode` has written are read.

For an ImpRAG model whose passages are encoded independently, --states also keeps what the model reads of each passage (keys
and values), so that `revela-hub answer` need not compute it: float16 as it is, pq compressed (FAISS OPQ and PQ); --keep 0.5
keeps the half of each passage's tokens that the others look at most.

Examples:
  revela-hub index my-retriever --passages docs --output my-index
  revela-hub index my-retriever --passages wiki.jsonl --output wiki-index --index-type hnsw
  revela-hub index my-retriever --passages wiki.jsonl --output wiki-index --index-type milvus --milvus-uri http://db:19530
  revela-hub search my-retriever --index my-index "what is a shard?"
  revela-hub index outputs/imprag/model --passages docs --output my-index --states pq
"""

from dataclasses import dataclass, field
from typing import Literal

from revela_hub.cli.output import note, shows_progress
from revela_hub.cli.passage_options import PassageOptions, load_passage_encoder
from revela_hub.errors import UserError
from revela_hub.ranges import PositiveInt, ShareOrAll

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
    states: Literal["none", "float16", "pq"] = field(
        default="none", metadata={"help": "ImpRAG: store the passages' keys and values too, as they are or compressed."}
    )
    pq: PositiveInt = field(default=8, metadata={"help": "--states pq: bytes of a compressed key or value of a head."})
    keep: ShareOrAll = field(default=1.0, metadata={"help": "--states: share of a passage's tokens to keep."})


def run(arguments: Arguments) -> None:
    """Writes the index and says what is in it."""
    from revela_hub.retrieval import build_store
    from revela_hub.trainers.imprag.answering import ImpRAGEncoder
    from revela_hub.trainers.imprag.checkpoint import is_imprag

    if arguments.states != "none" and not is_imprag(arguments.model):
        raise UserError(f"--states is for ImpRAG models, and {arguments.model} is none")
    if arguments.states == "none" and arguments.keep != 1:
        raise UserError("--keep says what is kept of --states: give float16 or pq")
    loaded = load_passage_encoder(arguments, index=arguments.index_type, milvus_uri=arguments.milvus_uri)
    if arguments.states != "none":
        from revela_hub.trainers.imprag.stored_states import check_states, store_index_states

        check_states(loaded.encoder.model, arguments.pq if arguments.states == "pq" else None)
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
    if isinstance(loaded.encoder, ImpRAGEncoder) and loaded.encoder.cut:
        l_max = loaded.encoder.model.config.l_max
        note(
            f"{loaded.encoder.cut:,} passages are longer than the model's l_max of {l_max} tokens and are cut: lower --max_words"
        )
    if arguments.states != "none":
        stored = store_index_states(
            loaded.encoder.model,
            loaded.encoder.tokenizer,
            store,
            compression=arguments.states,
            pq=arguments.pq,
            kept=arguments.keep,
            batch_size=arguments.batch_size,
            show_progress_bar=shows_progress(),
        )
        print(f"states of {len(stored.tokens):,} passages, {stored.tokens.bytes / 1e6:,.1f} MB")
