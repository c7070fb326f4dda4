"""Search your files with a retriever, and print the best passages with file and line.

The model is a sentence-transformers folder, a Hub id, bm25, or the output folder of `revela-hub adapt`, which is
searched in hybrid with BM25. For other models, --mode hybrid adds BM25 (recommended for most texts), and --mode sparse
needs a SparseEncoder. Vectors are cached, so an interrupted search resumes, and later searches only encode new text.

With --index, the index of `revela-hub index` is searched instead of --corpus, from a folder or from the Hub
(hf:owner/name, hf:owner/name@revision). --filter restricts the search to passages whose metadata match; it needs an
index in Milvus, on a server or in a local file.

Queries are read from standard input, one per line, if none is given. Progress is printed to standard error, results
to standard output; --json prints one object per query.

Examples:
  revela-hub search my-retriever "where is the timeout of a request set?" --corpus src docs
  revela-hub search my-retriever "where is the timeout of a request set?" --corpus src docs --mode hybrid
  revela-hub search bm25 "request timeout" --corpus src --top_k 3
  revela-hub search my-retriever --index my-index < queries.txt
  revela-hub search my-name/my-retriever "what is a shard?" --index hf:my-name/my-index
  revela-hub search my-retriever "flood" --index news-index --filter 'year >= 2020 and lang == "en"'
"""

import contextlib
import json as json_format
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from revela_hub.adaptation import HYBRID
from revela_hub.cli.passage_options import ReadingOptions, refuse_reading_options
from revela_hub.cli.ranker_options import RankerOptions, check_used, given, load_models
from revela_hub.errors import UserError
from revela_hub.options import option
from revela_hub.output import is_utf8, note, shows_progress, typed_lines
from revela_hub.paths import local_path
from revela_hub.ranges import PositiveInt
from revela_hub.retrieval.index_options import SmallVectorArguments
from revela_hub.scratch import scratch_folder

if TYPE_CHECKING:
    from revela_hub.retrieval import Hit, Passages, PassageStore, Ranker
    from revela_hub.retrieval.milvus import MilvusIndex

POSITIONALS = ("model", "query")

SNIPPET_LINES = 5
SNIPPET_WIDTH = 116
SNIPPET_CHARACTERS = 10 * SNIPPET_LINES * SNIPPET_WIDTH  # wrapping a word takes the square of its length


@dataclass(kw_only=True)
class Arguments(SmallVectorArguments, ReadingOptions, RankerOptions):
    """Arguments of `revela-hub search`."""

    basic_options = ("corpus", "index", "mode", "top_k", "json")

    model: str = field(metadata={"help": "Sentence-transformers folder or Hub id, output folder of adapt, or bm25."})
    corpus: list[str] = option([], "Text to search: folders, files, glob patterns or data sets (hf:owner/name).")
    index: str | None = option(
        None, "Index that `revela-hub index` made (folder, or hf:owner/name[@revision]), instead of --corpus."
    )
    filter: str | None = option(
        None, "Milvus: Search only passages whose metadata match, e.g. 'year >= 2020'.", metavar="EXPRESSION"
    )
    query: str | None = option(None, "Query (default: one per line of standard input).")
    mode: Literal["dense", "sparse", "bm25", "hybrid"] | None = option(
        None, "How to rank (default: dense; bm25 for bm25; hybrid for an output folder of adapt)."
    )
    top_k: PositiveInt = option(5, "Number of passages to print.")
    max_words: PositiveInt = option(120, "Maximum number of words per passage.")
    json: bool = option(False, "Print JSON.")


def run(arguments: Arguments) -> None:
    """Build or open the index, then search for the query, or for those on standard input."""
    from revela_hub.data.sources.unicode import without_surrogates

    if bool(arguments.corpus) == bool(arguments.index):
        raise UserError("give either --corpus PATH ... or --index FOLDER (see revela-hub search --help)")
    if arguments.filter is not None and not arguments.index:
        raise UserError(
            "--filter requires --index FOLDER, built with --index_type milvus --metadata_columns COLUMN ..."
        )
    if arguments.index:
        refuse_reading_options(arguments)
    _check_corpus(arguments)
    if arguments.mode is None and (local_path(arguments.model) / HYBRID).is_file():
        arguments.mode = "hybrid"
    check_used(arguments, [arguments.mode])
    if arguments.query is not None and not arguments.query.strip():
        raise UserError("the query is empty")
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(scratch_folder("search"))
        passages = None if arguments.index else _read(arguments, temporary)
        ranker, passages = _ranker(arguments, passages, temporary)
        queries = [arguments.query] if arguments.query is not None else _typed_queries()
        for text in map(without_surrogates, queries):
            encoded = ranker.encode([text])
            [hits] = passages.found(ranker.search(encoded, arguments.top_k))
            unmatched = "no passage matches --filter, or none of these has a term of the query"
            unmatched = unmatched if arguments.filter else "no passage has a term of the query"
            nothing = "" if hits else ranker.why_nothing(encoded)[0] or unmatched
            if arguments.json:
                record = {"query": text, "hits": [hit.to_dict() for hit in hits]}
                record |= {"nothing_found": nothing} if nothing else {}
                print(json_format.dumps(record, ensure_ascii=not is_utf8()), flush=True)
            else:
                print("\n".join(_lines(hits)) or f"nothing found: {nothing}", flush=True)


def _check_corpus(arguments: Arguments) -> None:
    """Reject paths that do not exist; a query after `--corpus` is parsed as one more path."""
    from revela_hub.data.sources.files import check_exists
    from revela_hub.data.sources.source import parse_source

    for source in map(parse_source, arguments.corpus):
        try:
            check_exists(source)
        except UserError as error:
            raise UserError(
                f"--corpus: {source.path!r} does not exist (put a query before --corpus, or use --query)"
            ) from error


def _read(arguments: Arguments, folder: Path) -> "Passages":
    from revela_hub.data.sources.documents import read_documents
    from revela_hub.data.sources.report import ReadReport
    from revela_hub.retrieval import read_passages

    report = ReadReport()
    documents = read_documents(arguments.corpus, report=report, **arguments.reading())
    passages = read_passages(
        documents, folder, max_words=arguments.max_words, report=report, show_progress_bar=shows_progress()
    )
    note(report)
    return passages


def _ranker(arguments: Arguments, passages: "Passages | None", temporary: Path) -> "tuple[Ranker, Passages]":
    from revela_hub.data.sources.report import counted
    from revela_hub.retrieval import build_ranker, default_cache_folder
    from revela_hub.retrieval.disk import claim_folder
    from revela_hub.retrieval.encoder import document_identity
    from revela_hub.retrieval.index_metadata import with_index_settings
    from revela_hub.retrieval.ranking import VectorRanker
    from revela_hub.retrieval.rerank import RerankedRanker

    models = load_models(arguments, arguments.model, arguments.mode)
    settings = models.settings
    folder = local_path(arguments.cache_dir or default_cache_folder("passages"))
    loaded: dict[str, Any] = {"dense": models.dense, "sparse": models.sparse, "reranker": models.reranker}
    if passages is None:
        from revela_hub.hub_cards.index_repository import open_index_of

        documents = document_identity(arguments.model, arguments.max_length) if settings.identity else None
        identity = settings.identity or None
        store, warning = open_index_of(arguments.index or "", models.dense, identity, arguments.model, documents)
        if warning:
            note(f"warning: {warning}")
        passages, settings = store.passages, with_index_settings(settings, store.metadata)
        if arguments.cache_dir is None and os.access(store.folder, os.W_OK):
            folder = store.folder
        else:
            claim_folder(folder)
        milvus = _milvus(store, settings.used, arguments.filter)
        if (
            arguments.filter
            and milvus
            and milvus.bm25
            and not any(name.startswith("bm25") for name in given(arguments))
        ):
            settings = replace(settings, bm25=milvus.bm25.settings)  # adapt may have fitted others
        loaded |= {"vectors": store.vectors if "dense" in settings.used else None, "milvus": milvus}
    elif "dense" not in settings.used and "sparse" not in settings.used:
        folder = temporary  # BM25 statistics are computed from the current files
    else:
        claim_folder(folder)
    ranker = build_ranker(passages.texts, settings, folder, **loaded)
    first = ranker.ranker if isinstance(ranker, RerankedRanker) else ranker
    vectors = [part.vectors for part in getattr(first, "parts", [first]) if isinstance(part, VectorRanker)]
    reused = f", {vectors[0].reused:,} of them from the cache" if vectors and vectors[0].reused else ""
    note(f"{counted(len(passages), 'passage')}{reused}")
    return ranker, passages


def _milvus(store: "PassageStore", used: tuple[str, ...], expression: str | None) -> "MilvusIndex | None":
    """Return the open index of a store in Milvus, restricted by --filter; None if it is not needed."""
    from revela_hub.retrieval.milvus import MilvusIndex

    options = store.metadata.options
    if options.type != "milvus" and expression is not None:
        raise UserError(
            f"--filter needs an index of the type milvus, not {options.type}: build it with --index_type milvus"
            " --metadata_columns COLUMN ... (a local file, without a server)"
        )
    searched = expression is not None or "dense" in used or ("bm25" in used and options.milvus_bm25)
    if options.type != "milvus" or not searched:
        return None
    index = store.index
    assert isinstance(index, MilvusIndex)
    return index if expression is None else index.where(expression)


def _typed_queries() -> Iterator[str]:
    for number, query in typed_lines("query"):
        if "\ufffd" in query:
            note(f"warning: line {number} of standard input is not {sys.stdin.encoding}: {query}")
        yield query


def _lines(hits: "list[Hit]") -> Iterator[str]:
    for rank, hit in enumerate(hits, start=1):
        copies = f"  (and {len(hit.copies)} with the same text: {hit.copies[0]})" if hit.copies else ""
        yield f"{rank}. {hit.score:.3f}  {hit.location}{copies}"
        lines = [line.rstrip() for line in textwrap.dedent(hit.text).splitlines() if line.strip()]
        if len(lines) == 1:  # prose has long lines
            lines = textwrap.wrap(lines[0][:SNIPPET_CHARACTERS], SNIPPET_WIDTH)
        for line in lines[:SNIPPET_LINES]:
            yield f"      {line if len(line) <= SNIPPET_WIDTH else line[: SNIPPET_WIDTH - 3] + '...'}"
        if len(lines) > SNIPPET_LINES:
            yield "      ..."
        yield ""
