"""Open a page in the browser that searches with a model, and shows what training changed.

The page compares the hybrid, the retriever and BM25, with a slider for the weight of BM25. For the output folder of
`revela-hub adapt`, it uses the fitted weights (with late interaction if adapt exported it), adds the base model, and
shows the verdict. For other retrievers, --base adds a model to compare with.

Without --corpus, it searches the passages of the adaptation's evaluation set. The page is served on this machine only,
unless you set --host. Ctrl-C stops it. `revela-hub publish --space` publishes the same page as a Space.

Examples:
  revela-hub demo outputs/adapted
  revela-hub demo outputs/adapted --corpus path/to/text
  revela-hub demo sentence-transformers/all-MiniLM-L6-v2 --corpus docs --port 7861
"""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela_hub.adaptation import SETTINGS
from revela_hub.data.sources.text_options import TextOptions
from revela_hub.errors import UserError, require
from revela_hub.files import local_path, scratch_folder
from revela_hub.options import option, required
from revela_hub.output import note
from revela_hub.ranges import Port, PositiveInt
from revela_hub.search.models import encoder_identity, fitted_settings, load_dense
from revela_hub.search.options import ModelOptions

if TYPE_CHECKING:
    from gradio import Blocks

    from revela_hub.demo.collection import Collection, LoadedRetriever

POSITIONALS = ("model",)
EXAMPLES, LONGEST_EXAMPLE = 6, 90
MARKUP = re.compile(r"[`*_<>{}\[\]\\|#]|:\w+:")
PROBE = Path("work", "probe")  # of an output folder of adapt


@dataclass(kw_only=True)
class Arguments(TextOptions, ModelOptions):
    """Arguments of `revela-hub demo`."""

    model: str = required("Output folder of adapt, retriever, or Hub id.")
    corpus: list[str] = option([], "Text to search: folders, files, glob patterns or data sets (hf:owner/name).")
    base: str | None = option(None, "Retriever to compare with: folder or Hub id (default: the base model of adapt).")
    example_queries: str | None = option(None, "Queries to offer as examples, one per line.")
    host: str = option(
        "127.0.0.1", "Address to listen on; 0.0.0.0 makes the page available to other machines.", metavar="HOST"
    )
    port: Port | None = option(None, "Port to listen on (default: the first free one from 7860).")
    top_k: PositiveInt = option(5, "Number of passages per column.")
    max_words: PositiveInt = option(120, "Maximum number of words per passage.")
    cache_dir: str | None = option(
        None, "Cache folder for the vectors of --corpus (default: in the user's cache folder)."
    )


def run(arguments: Arguments) -> None:
    """Load the models, index the text, and serve the page until Ctrl-C."""
    with demo_page(arguments) as page:
        from revela_hub.demo.page import launch

        address = launch(page, arguments.host, arguments.port)
        print(f"demo of {arguments.model}: {address} (Ctrl-C stops it)", flush=True)
        page.block_thread()


@contextlib.contextmanager
def demo_page(arguments: Arguments) -> "Iterator[Blocks]":
    """Return the page; its temporary files are deleted at the end."""
    require("gradio")
    from revela_hub.demo.page import search_page, usage
    from revela_hub.retrieval.encoder import model_in
    from revela_hub.retrieval.hybrid import BM25_WEIGHT

    folder, model, fitted = local_path(arguments.model), model_in(arguments.model), fitted_settings(arguments.model)
    retrievers, notes = _retrievers(arguments, folder, model, fitted)
    if d := fitted.get("difference"):
        found = f"{d['difference']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}] nDCG@10"
        compared = f"compared with the base retriever alone ({d['queries']} test queries)"
        notes.insert(0, f"{fitted['verdict'].capitalize()}: {found} {compared}.")
    parts = local_path(model).resolve().parts  # no path of this machine: `adapted/retriever` or `my-retriever`
    name = "/".join(parts[-2 if parts[-1] in ("retriever", "model") else -1 :]) if folder.is_dir() else model
    with scratch_folder("demo") as temporary:
        yield search_page(
            name,
            _collection(arguments, folder, retrievers, fitted, temporary),
            fitted.get("bm25_weight", BM25_WEIGHT),
            arguments.top_k,
            queries=_queries(arguments, folder),
            url=None if folder.is_dir() else f"https://huggingface.co/{model}",
            notes=notes,
            code=usage(name, remote_code=arguments.trust_remote_code),
        )


def _collection(
    arguments: Arguments, folder: Path, retrievers: "list[LoadedRetriever]", fitted: dict[str, Any], temporary: Path
) -> "Collection":
    """Index the text for the retrievers."""
    from revela_hub.data.sources.documents import read_documents
    from revela_hub.data.sources.report import ReadReport
    from revela_hub.data.sources.source import parse_sources
    from revela_hub.demo.collection import Collection
    from revela_hub.files import cache_folder, claim
    from revela_hub.retrieval.bm25 import BM25Settings

    if not arguments.corpus and not (folder / PROBE).is_dir():
        raise UserError("no text to search: give --corpus PATH")
    sources = parse_sources(arguments.corpus or [str(folder / PROBE / "corpus.jsonl")], **arguments.text_options())
    names = ", ".join(Path(source.path).name or source.path for source in sources[:3])
    read = ReadReport()
    collection = Collection(
        read_documents(sources, report=read),
        retrievers,
        temporary,
        cache=claim(local_path(arguments.cache_dir or cache_folder("passages"))),
        name=names if arguments.corpus else "the passages of the evaluation set",
        max_words=arguments.max_words,
        bm25=BM25Settings(**fitted.get("bm25", {})),
        token_weight=fitted.get("token_weight", 0.0),
    )
    note("; ".join([f"{len(collection.passages):,} passages", *read.remarks()]))
    return collection


def _retrievers(
    arguments: Arguments, folder: Path, model: str, fitted: dict[str, Any]
) -> "tuple[list[LoadedRetriever], list[str]]":
    """Load the base model, if there is one to compare with, and the model; return also notes for the page."""
    from revela_hub.demo.collection import LoadedRetriever

    def load(title: str, model: str) -> LoadedRetriever:
        encoder = load_dense(model, arguments)
        return LoadedRetriever(title, encoder, encoder_identity(encoder, model, arguments.max_length))

    trained = fitted.get("trained")
    if trained is False:
        return [load("retriever", model)], ["The retriever is the base model, unchanged."]
    adapted, base = load("adapted" if trained else "retriever", model), arguments.base or fitted.get("base")
    if base is None and trained and (folder / SETTINGS).is_file():
        base = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["retriever"]
    if base is None:
        return [adapted], []
    try:
        return [load("base", base), adapted], []
    except (UserError, OSError) as error:
        if arguments.base:
            raise
        note(f"the base model is not shown: {error}")
        return [adapted], ["The base model is not available on this machine, so it is not shown."]


def _queries(arguments: Arguments, folder: Path) -> list[str]:
    """Return queries to offer as examples; those of an evaluation set are short ones without markup."""
    from revela_hub.data.sources.beir import read_queries

    if arguments.example_queries:
        return list(read_queries(arguments.example_queries).values())[:EXAMPLES]
    if arguments.corpus:
        return []
    plain = (query for query in read_queries(folder / PROBE).values() if not MARKUP.search(query))
    return [query for query in plain if len(query) <= LONGEST_EXAMPLE][:EXAMPLES]
