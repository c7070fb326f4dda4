"""The passages of an index: chunks of documents, stored on disk without duplicates, and search results made from them.

The addresses of links in Markdown (`[1]: https://...`) and the licence at the top of a file of code are in no passage.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document
from revela_hub.data.text.chunks import Chunk, chunk_document, is_pdf
from revela_hub.output import progress_bar
from revela_hub.retrieval.hits import Hits
from revela_hub.retrieval.texts import TextFile, write_texts

PASSAGE = pa.schema(
    [
        ("text", pa.large_string()),
        ("document", pa.string()),
        ("path", pa.string()),
        ("start_line", pa.int32()),
        ("end_line", pa.int32()),
    ]
)
_LINK = re.compile(r"^ {0,3}\[[^\]\n^][^\]\n]*\]:[ \t]*(?:<[^>\n]*>|\S*[/#.]\S*)(?:[ \t]+[\"'(].*)?[ \t\r]*$", re.M)
_COMMENTS = re.compile(r"\s*/\*[\s\S]*?\*/|(?:[ \t]*(?:#|//|--|;|%).*\n?)+")
_NOTICE = re.compile(r"copyright|licen[cs]e|SPDX-|warrant(?:y|ies)|rights reserved|permission notice|redistribut", re.I)


@dataclass(frozen=True)
class Hit:
    """A retrieved passage.

    Attributes:
        score: Its score for the query; higher is better.
        text: The passage.
        document: The id of its document.
        path: The file of the document, or None if it is not a file.
        start_line: The first line in the file, counted from 1; in a PDF, the page.
        end_line: The last line.
        copies: Other locations of the same text, in the format of `location`.
        cosine: The cosine of the vectors of query and passage, if the search compares them.
    """

    score: float
    text: str
    document: str
    path: str | None
    start_line: int
    end_line: int
    copies: tuple[str, ...] = ()
    cosine: float | None = None

    @property
    def location(self) -> str:
        """``path/to/file.py:120-145``, or ``manual.pdf:page 3``."""
        if self.path is None and is_pdf(self.document):
            pages = {self.start_line, self.end_line}
            return f"{self.document}:page{'s' if len(pages) > 1 else ''} {'-'.join(map(str, sorted(pages)))}"
        return f"{self.document if self.path is None else self.path}:{self.start_line}-{self.end_line}"

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary, for JSON."""
        return vars(self) | {"copies": list(self.copies)}


class Passages(TextFile):
    """Distinct texts to search, each with its locations: a file with the columns of `PASSAGE`."""

    def hit(self, row: int, score: float, cosine: float | None = None) -> Hit:
        """Return text number `row` as a hit."""
        lines = [int(self._first_line_N[row]), *self._repeated_L[self.rows_L[self._repeated_L] == row].tolist()]
        columns = [self.column(name, lines) for name in PASSAGE.names[1:]]
        [text] = self.read([row])
        first, *copies = (Hit(score, text, *place) for place in zip(*columns, strict=True))
        return replace(first, copies=tuple(copy.location for copy in copies), cosine=cosine)

    def found(self, hits: Hits, cosines_QK: NDArray[np.float32] | None = None) -> list[list[Hit]]:
        """Return the retrieved passages of each query, best first."""
        cosines = np.full(hits.rows_QK.shape, None) if cosines_QK is None else cosines_QK
        queries = zip(hits.rows_QK.tolist(), hits.scores_QK.tolist(), cosines.tolist(), strict=True)
        return [[self.hit(*hit) for hit in zip(*query, strict=True) if hit[0] >= 0] for query in queries]

    @cached_property
    def _repeated_L(self) -> NDArray[np.int64]:
        """The lines that repeat an earlier text."""
        return np.delete(np.arange(len(self.rows_L)), self._first_line_N)


def write_passages(chunks: Iterable[Chunk], folder: Path) -> Passages:
    """Write chunks to a folder; chunks with the same text become one passage, which is encoded and returned once."""
    return Passages(write_texts(map(vars, chunks), folder, PASSAGE))


def read_passages(
    documents: Iterable[Document],
    folder: Path,
    *,
    max_words: int = 120,
    corpus: Sequence[str] | None = None,
    report: ReadReport | None = None,
    show_progress_bar: bool = False,
) -> Passages:
    """Cut documents into chunks, and write the distinct ones to a folder.

    Args:
        documents: The output of `read_documents`; a file that is listed twice (`src src/part`) is read once.
        folder: The folder of the passages.
        max_words: Maximum number of words in a chunk.
        corpus: The paths that the documents were read from: names of files are stored relative to them (`relative_name`).
        report: Its counts `chunks` and `cut` are updated.
        show_progress_bar: Whether to show a progress bar on standard error.
    """

    def chunks() -> Iterator[Chunk]:
        seen: set[Path] = set()
        for document in progress_bar(documents, desc="Reading", unit=" documents", show=show_progress_bar, leave=False):
            if document.path is not None:
                file = Path(document.path).resolve()
                if file in seen:
                    continue
                seen.add(file)
            if corpus is not None:
                path = None if document.path is None else relative_name(document.path, corpus)
                document = replace(document, id=relative_name(document.id, corpus), path=path)
            yield from chunk_document(without_notices(document), max_words, report=report)

    return write_passages(chunks(), folder)


def without_notices(document: Document) -> Document:
    """Return a document without the addresses of links in Markdown, or without the licence of code; lines keep their numbers."""
    if document.kind == "text":
        return replace(document, text=_LINK.sub("", document.text)) if document.path else document
    if not (header := _COMMENTS.match(document.text)) or not _NOTICE.search(header[0]):
        return document
    # The paragraphs of the comment: others may describe the file.
    parts = re.split(r"(?m)^(\W*\n)", header[0])
    kept = "".join(re.sub(r"[^\n]", "", part) if _NOTICE.search(part) else part for part in parts)
    text = kept + document.text[header.end() :]
    start = len(re.match(r"(?:[ \t]*(?:#+|//+|/?\*+/?|--|;+|%+)?[ \t\r]*\n)*", text)[0])  # type: ignore[index]
    return replace(document, text=text[start:], first_line=document.first_line + text.count("\n", 0, start))


def relative_name(name: str, corpus: Sequence[str]) -> str:
    """Return the name of a file, or of a row in it, without a path of this machine; relative paths are kept.

    >>> corpus = ["/home/me/docs", "part/wiki.jsonl", "../notes/*.md"]
    >>> [relative_name(name, corpus) for name in ("/home/me/docs/a/b.md", "part/wiki.jsonl:3", "../notes/b.md", "Q42")]
    ['docs/a/b.md', 'part/wiki.jsonl:3', 'b.md', 'Q42']
    """
    if not name.startswith(("/", "..", "~")):
        return name
    for root in sorted((path.rstrip("/") for path in corpus), key=len):
        if name.startswith((f"{root}/", f"{root}:")) or name == root:
            return f"{Path(root).name}{name[len(root) :]}"
    return Path(name).name
