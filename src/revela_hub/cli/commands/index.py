"""Build a passage index on disk for `revela-hub search --index` and `revela-hub answer`.

An index can only be used with the model that made it. exact reads the vectors from disk in blocks and needs little
memory; hnsw and ivfpq (FAISS) are faster and approximate; milvus stores the vectors in a Milvus server or a local
file. Interrupted runs resume, and shards from `revela-hub encode` are used.

--truncate_dim searches with the first components of the vectors, --precision with int8 or binary vectors in memory
(FAISS); results of binary ones are rescored with the vectors on disk. With --probe, the command prints what that costs.

--push_to_hub publishes the index in a data set repository, as parquet files that `datasets` reads, too: the text of the
passages, their vectors and their places, without paths of this machine. Others search it with --index hf:owner/name.

For a model that answers questions and encodes passages independently, --states float16 also stores the keys and
values of the passages, so that `revela-hub answer` does not compute them again.

Examples:
  revela-hub index my-retriever --corpus docs --output_dir my-index
  revela-hub index my-retriever --corpus wiki.jsonl --output_dir wiki-index --index_type hnsw
  revela-hub index my-retriever --corpus wiki.jsonl --output_dir wiki-index --index_type milvus --milvus_uri http://db:19530
  revela-hub index my-retriever --corpus docs --output_dir my-index --truncate_dim 192 --precision int8 --probe my-probe
  revela-hub search my-retriever --index my-index "what is a shard?"
  revela-hub index my-name/my-retriever --corpus docs --output_dir my-index --push_to_hub my-name/my-index --private
  revela-hub index outputs/reader/model --corpus docs --output_dir my-index --states float16
"""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from revela_hub.cli.passage_options import PassageOptions, check_output, load_passage_encoder
from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.options import option
from revela_hub.output import note, shows_progress
from revela_hub.retrieval.index_options import IndexOptions, SmallVectorArguments

if TYPE_CHECKING:
    from revela_hub.data.sources.beir import RetrievalTask
    from revela_hub.hub_cards.index_repository import IndexDestination
    from revela_hub.retrieval import RankerSettings

POSITIONALS = ("model",)


@dataclass(kw_only=True)
class Arguments(PassageOptions, SmallVectorArguments):
    """Arguments of `revela-hub index`."""

    states: Literal["none", "float16"] = option(
        "none", "Models that answer: Also store the keys and values of the passages."
    )
    probe: str | None = option(
        None, "BEIR folder, e.g. of `revela-hub probe`, to measure --truncate_dim and --precision on.", metavar="FOLDER"
    )
    push_to_hub: str | None = option(
        None, "Data set repository to push the index to; the text is published.", metavar="REPO_ID"
    )
    private: bool = option(False, "Make a new repository private.")
    update: bool = option(False, "Replace the index in an existing repository.")


def run(arguments: Arguments) -> None:
    """Write the index and print its size."""
    from revela_hub.checkpoints import METHODS, method_of_model
    from revela_hub.data.sources.beir import read_beir
    from revela_hub.retrieval import build_store

    method, stores_states = method_of_model(arguments.model), arguments.states != "none"
    if stores_states and not (method and method.states):
        titles = ", ".join(each.title for each in METHODS.values() if each.states)
        raise UserError(f"--states requires a model of {titles}, but {arguments.model} is not one")
    if arguments.probe and arguments.truncate_dim is None and arguments.precision in (None, "float32"):
        raise UserError("--probe measures --truncate_dim and --precision: give one of them")
    if arguments.push_to_hub is None and (arguments.private or arguments.update):
        raise UserError(f"--{'private' if arguments.private else 'update'} requires --push_to_hub OWNER/NAME")
    destination = _destination(arguments)
    task = read_beir(arguments.probe, "test") if arguments.probe else None
    check_output(arguments.corpus, arguments.output_dir, exclude=arguments.exclude)
    options = arguments.index_options(arguments.dtype)
    loaded = load_passage_encoder(arguments, options)
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
        endpoint=getattr(loaded.encoder, "description", None),
    )
    options, dimension = store.metadata.options, store.metadata.dimension
    kind = options.type if options.precision == "float32" else options.precision
    print(f"{counted(len(store), 'passage')}, {dimension}-dimensional vectors ({kind}), in {store.folder}")
    if task is not None:
        print(_cost(loaded.encoder, loaded.settings, task, options))
    for line in loaded.encoder.warnings() if method and method.encoder else ():
        note(line)
    if states is not None:
        stored = states.store_index_states(
            loaded.encoder, store, batch_size=arguments.batch_size, show_progress_bar=shows_progress()
        )
        print(f"states of {counted(len(stored), 'passage')}, {stored.bytes / 1e6:,.1f} MB")
    if destination is not None:
        from revela_hub.data.sources.source import parse_sources
        from revela_hub.hub_cards.index_repository import push_index

        corpus = [source.path for source in parse_sources(arguments.corpus)]
        print(f"pushed to {push_index(store, destination, corpus, note)}")


def _destination(arguments: Arguments) -> "IndexDestination | None":
    """Return where to push the index, after the checks that need no index."""
    if arguments.push_to_hub is None:
        return None
    from revela_hub.hub_cards.index_repository import IndexDestination

    destination = IndexDestination(arguments.push_to_hub, arguments.private, arguments.update)
    destination.current()
    return destination


def _cost(encoder: Any, settings: "RankerSettings", task: "RetrievalTask", options: IndexOptions) -> str:
    """Return a line that compares an index with one of whole float32 vectors, on a probe."""
    from revela_hub.evaluation import compare_queries
    from revela_hub.evaluation.vector_sizes import VectorSize, evaluate_sizes

    sizes = [VectorSize(), VectorSize(options.truncate_dim, str(options.precision))]
    whole, small = evaluate_sizes(encoder, task, replace(settings, index=IndexOptions(dtype=options.dtype)), sizes)
    first, second = whole.scores, small.scores
    possible = first.queries > 1
    found = f": {compare_queries(first.per_query['ndcg_at_10'], second.per_query['ndcg_at_10'])}" if possible else ""
    return (
        f"on {first.name}, {counted(first.queries, 'query')}: nDCG@10 {first.ndcg_at_10:.4f} with {whole.bytes_per_passage:,} bytes per"
        f" passage, {second.ndcg_at_10:.4f} with {small.bytes_per_passage:,}{found}"
    )
