"""Build a passage index on disk for `revela-hub search --index` and `revela-hub answer`.

An index can only be used with the model that made it. exact reads the vectors from disk in blocks and needs little
memory; hnsw and ivfpq (FAISS) are faster and approximate; milvus stores the vectors in a Milvus server or a local
file. Interrupted runs resume, and vectors of `revela-hub encode` are used. If the corpus has changed, only new passages
are encoded.

--truncate_dim searches with the first components of the vectors.

--push_to_hub publishes the index in a data set repository: the text of the passages, their vectors and their places,
without paths of this machine. Others search it with --index hf:owner/name.

Examples:
  revela-hub index my-retriever --corpus docs --output_dir my-index
  revela-hub index my-retriever --corpus wiki.jsonl --output_dir wiki-index --index_type hnsw
  revela-hub index my-retriever --corpus wiki.jsonl --output_dir wiki-index --index_type milvus --milvus_uri http://db:19530
  revela-hub search my-retriever --index my-index "what is a shard?"
  revela-hub index my-name/my-retriever --corpus docs --output_dir my-index --push_to_hub my-name/my-index --private
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from revela_hub.data.sources.text_options import TextOptions
from revela_hub.files import local_path
from revela_hub.options import option, required
from revela_hub.output import is_quiet, note
from revela_hub.ranges import PositiveInt
from revela_hub.retrieval.index_options import IndexOptions, IndexType, Precision
from revela_hub.search.models import encoder_identity, load_dense
from revela_hub.search.options import EndpointOptions, ModelOptions

if TYPE_CHECKING:
    from revela_hub.retrieval import Passages, RankerSettings

POSITIONALS = ("model",)


@dataclass(kw_only=True)
class PassageOptions(TextOptions, EndpointOptions, ModelOptions):
    """The passages, the model and the output folder, of `encode` and `index`."""

    option_group = "options"

    model: str = required("Sentence-transformers folder or Hub id.")
    corpus: list[str] = required(
        "Passages to encode: folders, files, glob patterns, JSON lines or data sets (hf:owner/name)."
    )
    output_dir: str = required("Folder of the index.")
    max_words: PositiveInt = option(120, "Maximum number of words per passage.")
    document_prompt: str | None = option(None, "Text to prepend to every passage (default: the model's own prompt).")
    batch_size: PositiveInt = option(32, "Number of passages per forward pass.")


@dataclass(kw_only=True)
class Arguments(PassageOptions):
    """Arguments of `revela-hub index`."""

    dtype: Precision = option("float32", "Type of the stored vectors.")
    index_type: IndexType = option("exact", "Index type; hnsw and ivfpq (FAISS) are approximate.")
    milvus_uri: str | None = option(
        None, "Milvus server, e.g. http://host:19530, for --index_type milvus (default: a local file)."
    )
    truncate_dim: PositiveInt | None = option(None, "Search with the first N components of each vector (default: all).")
    push_to_hub: str | None = option(None, "Data set repository to push the index to; the text is published.")
    private: bool = option(False, "Make a new repository private.")
    update: bool = option(False, "Replace the index in an existing repository.")


class Loaded(NamedTuple):
    """The encoder, its settings, and a function that writes the passages to a folder."""

    encoder: Any
    settings: "RankerSettings"
    write: "Callable[[Path], Passages]"


def run(arguments: Arguments) -> None:
    """Write the index and print its size."""
    from revela_hub.checkpoints import resolve
    from revela_hub.data.sources.report import counted
    from revela_hub.hub_cards.hub_index import push_index
    from revela_hub.hub_cards.repository import Destination, Repository
    from revela_hub.retrieval import build_store

    method = resolve(arguments.model).method
    repository = None
    if arguments.push_to_hub is not None:
        to = Destination(arguments.push_to_hub, private=arguments.private, update=arguments.update)
        repository = Repository(to, "dataset")
        repository.read()  # before the work, to report errors early
    uri = arguments.milvus_uri
    uri = str(local_path(uri).resolve()) if uri and uri.endswith(".db") else uri  # then found from another folder, too
    options = IndexOptions(arguments.index_type, arguments.dtype, uri, arguments.truncate_dim)
    encoder, settings, write = load(arguments, options)
    store = build_store(
        write,
        encoder,
        arguments.output_dir,
        settings,
        endpoint=getattr(encoder, "description", None),
        model=arguments.model,
        max_length=arguments.max_length,
    )
    vectors = f"{store.metadata.dimension}-dimensional vectors ({settings.index.type})"
    print(f"{counted(len(store), 'passage')}, {vectors}, in {store.folder}")
    for line in encoder.warnings() if method and method.encoder else ():
        note(line)
    if repository is not None:
        print(f"pushed to {push_index(store, repository)}")


def load(options: PassageOptions, index: IndexOptions) -> Loaded:
    """Check the paths, and load the model."""
    from revela_hub.data.sources.documents import read_documents
    from revela_hub.data.sources.report import ReadReport
    from revela_hub.data.sources.source import check_apart, parse_sources
    from revela_hub.files import claim
    from revela_hub.retrieval import RankerSettings, read_passages

    output = local_path(options.output_dir)
    check_apart(parse_sources(options.corpus, exclude=options.exclude), output)
    claim(output)
    report, show = ReadReport(), not is_quiet()
    encoder = load_dense(options.model, options, prompt=options.document_prompt, server=options)
    settings = RankerSettings(
        identity=encoder_identity(encoder, options.model, options.max_length),
        document_prompt=options.document_prompt,
        batch_size=options.batch_size,
        index=index,
        device=encoder.device,
        show_progress_bar=show,
    )

    def write(folder: Path) -> "Passages":
        documents = read_documents(options.corpus, report=report, **options.text_options())
        shared: dict[str, Any] = {"max_words": options.max_words, "corpus": options.corpus, "report": report}
        passages = read_passages(documents, folder, show_progress_bar=show, **shared)
        note("; ".join(report.remarks()))  # the index lacks what was not read
        return passages

    return Loaded(encoder, settings, write)
