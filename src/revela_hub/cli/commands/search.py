"""Search your files with a retriever, and print the best passages with file and line.

Of a long passage, the lines with most words of the query are printed; of a PDF, the page. Relative scores are scaled
to the best results of a query: compare them within one search only. The cosine is that of the retriever's vectors.

The model is a sentence-transformers folder, a Hub id, bm25, or the output folder of `revela-hub adapt`. A retriever is
combined with BM25 (--mode hybrid), with the weights that adapt has fitted, if any; --mode dense is the retriever alone.
Vectors are cached, so an interrupted search resumes, and later searches only encode new text.

With --index, the index of `revela-hub index` is searched instead of --corpus, from a folder or from the Hub
(hf:owner/name, hf:owner/name@revision); without BM25, unless adapt has fitted the model, or --mode hybrid is given.

Queries are read from standard input, one per line, if none is given. Progress is printed to standard error, results
to standard output; --json prints one object per query.

Examples:
  revela-hub search my-retriever "where is the timeout of a request set?" --corpus src docs
  revela-hub search my-retriever "where is the timeout of a request set?" --corpus src docs --mode dense
  revela-hub search bm25 "request timeout" --corpus src --top_k 3
  revela-hub search my-retriever --index my-index < queries.txt
"""

import json as json_format
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.options import option, values_of
from revela_hub.output import is_utf8, note, typed_lines
from revela_hub.ranges import PositiveInt
from revela_hub.search.searcher import Searcher, SearchOptions

if TYPE_CHECKING:
    from revela_hub.retrieval import Hit

POSITIONALS = ("model", "query")

NOTHING = "no passage has a word of the query (words such as 'the' do not count)"
SNIPPET_LINES = 5
SNIPPET_WIDTH = 116
SNIPPET_CHARACTERS = 10 * SNIPPET_LINES * SNIPPET_WIDTH  # wrapping a word takes the square of its length


@dataclass(kw_only=True)
class Arguments(SearchOptions):
    """Arguments of `revela-hub search`."""

    query: str | None = option(None, "Query (default: one per line of standard input).")
    top_k: PositiveInt = option(5, "Number of passages to print.")
    json: bool = option(False, "Print JSON.")


def run(arguments: Arguments) -> None:
    """Build or open the index, then search for the query, or for those on standard input."""
    from revela_hub.data.sources.unicode import without_surrogates

    last = arguments.corpus[-1] if len(arguments.corpus) > 1 and arguments.query is None else ""
    if last and not re.search(r"[*:\[]", last) and not local_path(last).exists():
        raise UserError(f"no such file or folder: {last}; if it is the query, write it before --corpus")
    with Searcher(**values_of(SearchOptions, arguments)) as searcher:
        queries = [arguments.query] if arguments.query is not None else _typed_queries()
        for text in map(without_surrogates, queries):
            hits = searcher.search(text, arguments.top_k)
            if arguments.json:
                record = {"query": text, "score_name": searcher.score_name, "hits": [hit.to_dict() for hit in hits]}
                record |= {} if hits else {"nothing_found": NOTHING}
                print(json_format.dumps(record, ensure_ascii=not is_utf8()), flush=True)
            else:
                print("\n".join(_lines(hits, text, searcher.score_name)) or f"nothing found: {NOTHING}", flush=True)


def _typed_queries() -> Iterator[str]:
    for number, query in typed_lines("query"):
        if "\ufffd" in query:
            note(f"warning: line {number} of standard input is not {sys.stdin.encoding}: {query}")
        yield query


def _lines(hits: "list[Hit]", query: str, score_name: str) -> Iterator[str]:
    # Words without their endings, of which `the` and `of` have none left.
    words = {word[:-2] if len(word) > 5 else word for word in re.findall(r"\w{4,}", query.lower())}
    for rank, hit in enumerate(hits, start=1):
        copies = f"  (and {len(hit.copies)} with the same text: {hit.copies[0]})" if hit.copies else ""
        cosine = "" if hit.cosine is None or score_name == "cosine" else f", cosine {hit.cosine:.3f}"
        yield f"{rank}. {score_name} {hit.score:.3f}{cosine}  {hit.location}{copies}"
        lines = [line.rstrip() for line in textwrap.dedent(hit.text).splitlines() if line.strip()]
        if len(lines) == 1:  # prose has long lines
            lines = textwrap.wrap(lines[0][:SNIPPET_CHARACTERS], SNIPPET_WIDTH)
        found = [{word for word in words if word in line.lower()} for line in lines]
        last = max(1, len(lines) - SNIPPET_LINES + 1)
        first = max(range(last), key=lambda start: len(set[str]().union(*found[start : start + SNIPPET_LINES])))
        if first:
            yield "      ..."
        for line in lines[first : first + SNIPPET_LINES]:
            yield f"      {line if len(line) <= SNIPPET_WIDTH else line[: SNIPPET_WIDTH - 3] + '...'}"
        if len(lines) > first + SNIPPET_LINES:
            yield "      ..."
        yield ""
