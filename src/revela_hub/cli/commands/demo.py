"""Open a page in the browser that searches with a model, and shows what training changed.

For the output folder of `revela-hub adapt`, the page compares the base model, the adapted retriever, BM25 and their
hybrid, with a slider for the weight of BM25. The hybrid includes late interaction if adapt exported it. If adapt
exported the base model unchanged, there is only one column for both. The page shows the verdict, the table of the
evaluation and the cost of training. For other retrievers, --base adds a column to compare with. With a model that
answers questions, the page shows its answers.

Without --corpus, it searches the passages of the adaptation's evaluation set, or a small built-in sample. Visitors can
paste or upload their own text. The page is served on this machine only, unless you set --host. Ctrl-C stops it.
`revela-hub publish --space` publishes the same page as a Space.

Examples:
  revela-hub demo outputs/adapted
  revela-hub demo outputs/adapted --corpus path/to/text
  revela-hub demo sentence-transformers/all-MiniLM-L6-v2 --corpus docs --port 7861
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela_hub.adaptation import REPORT
from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError, require
from revela_hub.options import option, required
from revela_hub.output import note
from revela_hub.paths import local_path
from revela_hub.ranges import Port, PositiveInt, TextLength
from revela_hub.scratch import scratch_folder
from revela_hub.search.encoders import encoder_identity, load_dense
from revela_hub.search.ranker_options import given
from revela_hub.search.reading_options import ReadingOptions, refuse_reading_options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gradio import Blocks

    from revela_hub.data.sources.report import ReadReport
    from revela_hub.data.sources.source import Document
    from revela_hub.demo.report import Report
    from revela_hub.demo.search import LoadedRetriever

POSITIONALS = ("model",)
EXAMPLES, LONGEST_EXAMPLE = 6, 90
PROBE = Path("work", "probe")  # of an output folder of adapt


@dataclass(kw_only=True)
class Arguments(ReadingOptions):
    """Arguments of `revela-hub demo`."""

    model: str = required("Output folder of adapt, retriever, model that answers questions, or Hub id.")
    corpus: list[str] = option([], "Text to search: folders, files, glob patterns or data sets (hf:owner/name).")
    index: str | None = option(
        None, "Index of a model that answers questions (`revela-hub index`), instead of --corpus."
    )
    base: str | None = option(None, "Retriever to compare with: folder or Hub id (default: the base model of adapt).")
    report: str | None = option(None, "Report of adapt (adapt.json) to show (default: the one in the folder).")
    example_queries: str | None = option(None, "Queries to offer as examples, one per line.")
    host: str = option(
        "127.0.0.1", "Address to listen on; 0.0.0.0 makes the page available to other machines.", metavar="HOST"
    )
    port: Port | None = option(None, "Port to listen on (default: the first free one from 7860).")
    top_k: PositiveInt = option(5, "Number of passages per column.")
    max_words: PositiveInt = option(120, "Maximum number of words per passage.")
    max_new_tokens: PositiveInt = option(64, "Maximum number of tokens per answer of a model that answers questions.")
    max_length: TextLength | None = option(None, "Maximum number of tokens per text (default: the model's own limit).")
    cache_dir: str | None = option(
        None, "Cache folder for the vectors of --corpus (default: in the user's cache folder)."
    )
    device: str | None = option(None, "Device to run on, e.g. cpu, cuda:1 or mps (default: the fastest one).")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")


def run(arguments: Arguments) -> None:
    """Load the models, index the text, and serve the page until Ctrl-C."""
    with demo_page(arguments) as page:
        from revela_hub.demo.page import launch

        address = launch(page, arguments.host, arguments.port)
        print(f"demo of {arguments.model}: {address} (Ctrl-C stops it)", flush=True)
        page.block_thread()


@contextlib.contextmanager
def demo_page(arguments: Arguments) -> "Iterator[Blocks]":
    """Return the page; its temporary files are deleted at the end.

    Raises:
        UserError: gradio is not installed, or a model or text cannot be read.
    """
    require("gradio")
    from revela_hub.checkpoints import exported_retriever, method_of_model

    if arguments.model == "bm25":
        raise UserError("the demo needs a model besides BM25: give a folder or a Hub id")
    folder = local_path(arguments.model)
    place = str(exported_retriever(folder)) if folder.is_dir() else arguments.model
    method = method_of_model(place)
    with scratch_folder("demo") as temporary:
        if method is not None and method.answerer:
            yield _answer_page(arguments, place, method, temporary)
        else:
            yield _search_page(arguments, folder, place, temporary)


def _search_page(arguments: Arguments, folder: Path, place: str, temporary: Path) -> "Blocks":
    from revela_hub.demo.code import snippets
    from revela_hub.demo.page import Shown, search_page
    from revela_hub.demo.report import read_report
    from revela_hub.demo.search import Collection
    from revela_hub.demo.texts import MAX_PASSAGES
    from revela_hub.retrieval.disk import claim_folder, default_cache_folder
    from revela_hub.retrieval.hybrid import BM25_WEIGHT

    if arguments.index:
        raise UserError(f"--index is for models that answer questions, and {arguments.model} is not one: use --corpus")
    file = Path(arguments.report) if arguments.report else folder / REPORT
    report = read_report(file) if arguments.report or file.is_file() else None
    documents, corpus_name = _documents(arguments, folder)
    queries = _queries(arguments, folder)
    retrievers, notes = _retrievers(arguments, folder, place, report)
    encoder = retrievers[-1].encoder
    cache = claim_folder(local_path(arguments.cache_dir or default_cache_folder("passages")))
    tokens, bm25 = (report.token_weight, report.bm25) if report else (0.0, None)
    shared: dict[str, Any] = {"max_words": arguments.max_words, "bm25": bm25, "token_weight": tokens}
    collection = Collection(documents, retrievers, temporary, cache=cache, name=corpus_name, **shared)
    note(counted(len(collection), "passage"))
    weight = report.bm25_weight if report else BM25_WEIGHT
    collection.search("the first query takes longer", weight, 1)  # so that the times on the page are those of others

    def index(documents: "Iterable[Document]", folder: Path) -> Collection:
        return Collection(documents, retrievers, folder, most=MAX_PASSAGES, **shared)

    name = _name(folder, place)
    prompts, remote_code = getattr(encoder, "prompts", {}), arguments.trust_remote_code
    code = snippets(name, prompts, weight, tokens, bm25=bm25, remote_code=remote_code)
    shown = Shown(name, code, queries, report, **_card(place), notes=notes)
    return search_page(shown, collection, index, weight, arguments.top_k)


def _retrievers(
    arguments: Arguments, folder: Path, place: str, report: "Report | None"
) -> "tuple[list[LoadedRetriever], list[str]]":
    """Load the model and the one to compare with; return also notes for the page."""
    from revela_hub.demo.report import base_of
    from revela_hub.demo.search import LoadedRetriever

    def load(title: str, model: str) -> LoadedRetriever:
        encoder = load_dense(
            model,
            device=arguments.device,
            trust_remote_code=arguments.trust_remote_code,
            max_seq_length=arguments.max_length,
        )
        return LoadedRetriever(title, encoder, encoder_identity(encoder, model, arguments.max_length))

    adapted = load("adapted" if report and not report.is_base else "retriever", place)
    if arguments.base:
        return [load("base", arguments.base), adapted], []
    if report is None:
        return [adapted], []
    if report.is_base:
        return [adapted], ["The exported retriever is the base model, unchanged."]
    base = base_of(folder)
    if base is None:
        return [adapted], []
    try:
        return [load("base", base), adapted], []
    except UserError as error:
        note(f"the base model is not shown: {error}")
        return [adapted], ["The base model is not available on this machine, so it is not shown."]


def _documents(arguments: Arguments, folder: Path) -> "tuple[Iterable[Document], str]":
    """Return the text to search, and its name on the page."""
    from revela_hub.data.sources.documents import read_documents
    from revela_hub.data.sources.report import ReadReport
    from revela_hub.data.sources.source import parse_sources
    from revela_hub.demo.texts import sample_documents

    if arguments.corpus:
        sources, report = parse_sources(arguments.corpus, **arguments.reading()), ReadReport()
        names = [Path(source.path).name or source.path for source in sources[:3]]
        documents = _noted(read_documents(sources, report=report), report)
        return documents, ", ".join([*names, "..."] if len(sources) > 3 else names)
    if (probe := folder / PROBE / "corpus.jsonl").is_file():
        return read_documents([str(probe)]), "the passages of the evaluation set"
    if (folder / REPORT).is_file():
        note(
            f"{folder} has no evaluation set in {PROBE}: the page searches the built-in sample, or your text with --corpus"
        )
    return sample_documents(), "the built-in sample"


def _noted(documents: "Iterable[Document]", report: "ReadReport") -> "Iterator[Document]":
    """Yield the documents, and then print what was skipped."""
    yield from documents
    note("; ".join(report.remarks()))


def _queries(arguments: Arguments, folder: Path) -> list[str]:
    """Return queries to offer as examples; those of an evaluation set are short ones."""
    from revela_hub.data.sources.queries import read_queries
    from revela_hub.demo.texts import sample

    if arguments.example_queries:
        return list(read_queries(arguments.example_queries).values())[:EXAMPLES]
    if (folder / PROBE / "queries.jsonl").is_file():
        made = read_queries(folder / PROBE).values()
        return [query for query in made if len(query) <= LONGEST_EXAMPLE][:EXAMPLES]
    return [] if arguments.corpus or arguments.index else list(sample()["queries"])


def _answer_page(arguments: Arguments, place: str, method: Any, temporary: Path) -> "Blocks":
    from pkgutil import resolve_name

    from revela_hub.demo.answers import stream
    from revela_hub.demo.code import answer_snippets
    from revela_hub.demo.page import Shown, answer_page
    from revela_hub.retrieval import RankerSettings, build_store, read_passages

    for name in sorted({"base", "report", "max_length", "top_k", "cache_dir", "trust_remote_code"} & given(arguments)):
        raise UserError(f"--{name} is for retrievers, but {arguments.model} was trained with {method.title}")
    if arguments.corpus and arguments.index:
        raise UserError("give either --corpus PATH ... or --index FOLDER")
    if arguments.index:
        refuse_reading_options(arguments)
    index = arguments.index
    if index is None:
        documents, _ = _documents(arguments, temporary)
        encoder = load_dense(place, device=arguments.device, trust_remote_code=False, max_seq_length=None)
        settings = RankerSettings(identity=encoder_identity(encoder, place, None), device=encoder.device)
        words = arguments.max_words
        index = str(temporary / "index")
        build_store(
            lambda folder: read_passages(documents, folder, max_words=words), encoder, index, settings, model=place
        )
    answerer = resolve_name(method.answerer)(place, index, device=arguments.device)
    name = _name(local_path(arguments.model), place)
    shown = Shown(name, answer_snippets(name), _queries(arguments, Path(place)), **_card(place))
    return answer_page(shown, lambda question: stream(answerer, question, max_new_tokens=arguments.max_new_tokens))


def _name(folder: Path, place: str) -> str:
    """Return a name without the path of this machine: `adapted/retriever`, `my-retriever`, or a Hub id."""
    if not folder.is_dir():
        return place
    whole = local_path(place).resolve()
    return "/".join(whole.parts[-2:]) if whole.name in ("retriever", "model") else whole.name


def _card(place: str) -> dict[str, Any]:
    """Return the address of the model card on the Hub, or the text of the one in the folder."""
    from huggingface_hub import constants

    folder = local_path(place)
    if not folder.is_dir():
        return {"url": f"{constants.ENDPOINT}/{place if '/' in place else f'sentence-transformers/{place}'}"}
    from revela_hub.demo.texts import card_text

    file = folder / "README.md"
    return {"card": card_text(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else ""}
