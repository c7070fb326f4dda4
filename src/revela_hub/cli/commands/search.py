"""Finds passages in your files with a retriever, and prints them with file and line, best first.

The files are cut into passages, and each passage is encoded once: its vector is kept in a cache, so that the next search
starts at once, one that was interrupted goes on where it stopped, and after a change only what changed is encoded.
Without a query, queries are read from standard input, one per line.

The model is a sentence-transformers folder, a Hub id, or the word bm25 (which needs no cache). A corpus is a folder, a
file, a pattern, JSON lines, or a data set written hf:owner/name. Progress goes to standard error, results to standard
output; with --json one object per query on a line of its own.

Examples:
  revela-hub search my-retriever "where is the timeout of a request set?" --corpus src docs
  revela-hub search my-retriever --corpus src docs --query "where is the timeout of a request set?"
  revela-hub search bm25 --corpus src --top-k 3 "request timeout"
  revela-hub search sentence-transformers/all-MiniLM-L6-v2 --corpus notes < queries.txt
"""

import glob
import json as json_format
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from revela_hub.errors import UserError
from revela_hub.ranges import PositiveInt

if TYPE_CHECKING:
    from revela_hub.retrieval import BM25Index, Hit, PassageIndex, Passages

POSITIONALS = ("model", "query")

SNIPPET_LINES = 5
SNIPPET_WIDTH = 116


@dataclass
class Arguments:
    """Arguments of `revela-hub search`."""

    model: str = field(metadata={"help": "Sentence-transformers folder, Hub id, or bm25."})
    corpus: list[str] = field(metadata={"help": "Folders, files, patterns or data sets (hf:owner/name) to search."})
    query: str | None = field(default=None, metadata={"help": "What to look for; without it, lines of standard input."})
    top_k: PositiveInt = field(default=5, metadata={"help": "How many passages to print."})
    max_words: PositiveInt = field(default=120, metadata={"help": "The largest number of words in a passage."})
    json: bool = field(default=False, metadata={"help": "Print JSON instead of text."})
    cache_dir: str | None = field(
        default=None, metadata={"help": "Where vectors are kept; by default the user's cache folder."}
    )
    batch_size: PositiveInt = field(default=32, metadata={"help": "Passages per forward pass."})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, mps; by default the fastest there is."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with a model."})
    max_seq_length: PositiveInt | None = field(default=None, metadata={"help": "Cut passages at this many tokens."})


def run(arguments: Arguments) -> None:
    """Builds or reads the index, then answers the query, or those of standard input."""
    _check_corpus(arguments)
    passages = _read(arguments.corpus, arguments.max_words)
    index = _index(arguments, passages)
    for text in [arguments.query] if arguments.query is not None else _typed_queries():
        if not text.strip():
            raise UserError("the query is empty")
        [hits] = index.search([text], arguments.top_k)
        if arguments.json:
            record = {"query": text, "hits": [hit.to_dict() for hit in hits]}
            print(json_format.dumps(record, ensure_ascii=False), flush=True)
        else:
            print("\n".join(_lines(hits)), flush=True)


def _check_corpus(arguments: Arguments) -> None:
    """A query after `--corpus` is one more path to the parser, as a mistyped path is: neither is taken for the other."""
    for path in arguments.corpus:
        if not (path.startswith("hf:") or Path(path).expanduser().exists() or glob.glob(path, recursive=True)):
            raise UserError(f"--corpus: there is no {path!r} (a query goes before --corpus, or is named: --query TEXT)")


def _read(corpus: list[str], max_words: int) -> "Passages":
    from revela_hub.data.sources.documents import read_documents
    from revela_hub.data.sources.report import ReadReport
    from revela_hub.retrieval import read_passages

    report = ReadReport()
    documents = read_documents(corpus, report=report)
    passages = read_passages(documents, max_words=max_words, report=report, show_progress_bar=True)
    print(report, file=sys.stderr)
    return passages


def _index(arguments: Arguments, passages: "Passages") -> "BM25Index | PassageIndex":
    from revela_hub.retrieval import BM25Index, PassageIndex, VectorCache, default_cache_folder
    from revela_hub.retrieval.encoder import load_encoder, model_identity, similarity_of

    if arguments.model == "bm25":
        return BM25Index(passages, show_progress_bar=False)
    model = load_encoder(
        arguments.model,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
        max_seq_length=arguments.max_seq_length,
    )
    identity = model_identity(arguments.model, arguments.max_seq_length)
    index = PassageIndex(
        model,
        passages,
        VectorCache(arguments.cache_dir or default_cache_folder(), identity),
        similarity=similarity_of(model, arguments.model),
        batch_size=arguments.batch_size,
        show_progress_bar=True,
    )
    print(f"{len(passages.texts):,} passages, {index.reused:,} of them from the cache", file=sys.stderr)
    return index


def _typed_queries() -> Iterator[str]:
    """The lines of standard input that are not empty, with a prompt where a person types them."""
    prompt = sys.stdin.isatty()
    while True:
        if prompt:
            print("query> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _lines(hits: "list[Hit]") -> Iterator[str]:
    if not hits:
        yield "nothing found"
    for rank, hit in enumerate(hits, start=1):
        copies = f"  (and {len(hit.copies)} with the same text: {hit.copies[0]})" if hit.copies else ""
        yield f"{rank}. {hit.score:.3f}  {hit.location}{copies}"
        lines = [line.rstrip() for line in textwrap.dedent(hit.text).splitlines() if line.strip()]
        if len(lines) == 1:  # prose has long lines
            lines = textwrap.wrap(lines[0], SNIPPET_WIDTH)
        for line in lines[:SNIPPET_LINES]:
            yield f"      {line if len(line) <= SNIPPET_WIDTH else line[: SNIPPET_WIDTH - 3] + '...'}"
        if len(lines) > SNIPPET_LINES:
            yield "      ..."
        yield ""
