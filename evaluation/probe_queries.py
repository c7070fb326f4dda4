"""Candidate queries for a probe: parts of a text that describe a passage, and are removed from it.

    docstring  the first paragraph of a function's docstring, or of the comment above it -> the function without it
    title      the title of a document, the heading of a section -> its first passage (of every section with that heading)
    sentence   a sentence of a passage -> the rest of the passage (`query_shapes` shortens it)

A passage has a candidate of each applicable kind; at most one of them is used.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal, TypeAlias

from revela_hub.data.sources.source import Document
from revela_hub.data.text.chunks import chunk_document, document_pieces
from revela_hub.data.text.words import count_words
from revela_hub.evaluation.functions import SUFFIXES, commented_functions, documented_functions

ProbeKind: TypeAlias = Literal["docstring", "title", "sentence"]

MAX_WORDS = 120
MIN_TITLE_WORDS, MAX_TITLE_WORDS = 2, 25
MIN_SENTENCE_WORDS, MAX_SENTENCE_WORDS = 8, 40
MIN_PASSAGE_WORDS = 20
PYTHON = (".py", ".pyi", ".pyx")
# The end of a sentence in Latin, Cyrillic, Greek, Hindi, Arabic, Urdu, Khmer and Burmese; in Chinese and Japanese, with quotes and
# brackets after it; and in Thai and Lao, which have no full stop.
_SENTENCE_END = re.compile(
    "(?:[.?!\u0964\u061f\u06d4\u17d4\u17d5\u104b]|[\u3002\uff1f\uff01][\u2019\u201d\u300b\u300d\u300f\u3011\uff09]*|[\u0e00-\u0eff])$"
)

# The metadata of a page of Jekyll, Hugo, Docusaurus or MkDocs, in YAML (---) or TOML (+++), and its title.
_FRONT_MATTER = re.compile(
    r"\s*(?P<mark>---|\+{3})[ \t\r]*\n(?=[\w.\"-]+[ \t]*[:=])(?:.*\n)*?(?P=mark)[ \t\r]*(?:\n|\Z)"
)
_TITLE = re.compile(r"^title[ \t]*[:=](?![ \t]*[>|])(.*)", re.M)

# A block of code between ``` or ~~~, which may contain comments (# ...) and sentences.
_CODE = r"[ \t]*(?P<fence>`{3,}|~{3,})[^`\n]*\n(?:.*\n)*?(?:[ \t]*(?P=fence)[`~]*|.*\Z)"
_FENCED = re.compile(rf"^{_CODE}[ \t\r]*$", re.M)
# A heading in Markdown (# Title), or in reStructuredText (a line underlined with =, -, ~ or ^); or a block of code.
_HEADING = re.compile(
    rf"^(?:{_CODE}"
    r"|#{1,6}[ \t]+(?P<hash>\S.*)|(?P<under>\S.*)\n(?!~{3}\s)(?P<line>[=\-~^])(?P=line){2,})[ \t\r]*$",
    re.M,
)
# Text that queries do not contain: the number of a section (2.1, B.4.7.), the address of a link, bold text and code in Markdown.
_NUMBER = re.compile(r"^(?:[A-Z]\.\d+|\d+\.)[\d.]*\s+")
_MARKUP = re.compile(r"!?\[([^\[\]]*)\]\([^()\s]*(?:\s+\"[^\"]*\")?\)|\*\*|`")
# Files about the rights to a text and its versions, which searches rarely ask for.
_FORMALITIES = re.compile(
    r"(?:LICEN[CS]E|COPYING|COPYRIGHT|NOTICE|CHANGE(?:LOG|S)|HISTORY|NEWS|AUTHORS)(?:[-._].*)?"
    r"|(?i:licen[cs]e|copying|changelog)(?:\.(?:md|rst|txt))?"
)


@dataclass(frozen=True)
class Candidate:
    """A candidate query for a passage in one line, and the exact text to remove from the document."""

    text: str
    removed: str


@dataclass(frozen=True)
class Passage:
    """A passage with the id of its document and its candidate queries by kind; a sentence has not been removed from it yet."""

    document: str
    text: str
    candidates: Mapping[ProbeKind, Candidate] = field(default_factory=dict)


def passages_of_each(
    documents: Iterable[Document], random_of: Callable[[Document], Random]
) -> Iterator[tuple[Document, list[Passage]]]:
    """Yield documents, each with its passages."""
    for document in documents:
        found = _functions(document) if document.kind == "code" else _sections(document, random_of(document))
        yield document, list(found)


def _functions(document: Document) -> Iterator[Passage]:
    suffix = Path(document.path or "").suffix.lower()  # of a row, and of a file without one, the language is not known
    found = list(documented_functions(document.text)) if not suffix or suffix in PYTHON else []
    if suffix in SUFFIXES or (not suffix and not found):
        found = list(commented_functions(document.text))
    for function in found:
        yield Passage(document.id, function.code, {"docstring": Candidate(function.query, function.removed)})


def _sections(document: Document, random: Random) -> Iterator[Passage]:
    asked = document.path is None or not _FORMALITIES.fullmatch(Path(document.path).name)
    for heading, body in _split(document.text):
        chunks = chunk_document(Document(document.id, body, None, "text"), MAX_WORDS)
        title, prose = _query(_NUMBER.sub("", heading)), _FENCED.sub("", body)
        for number, chunk in enumerate(chunks):
            if count_words(chunk.text) < MIN_PASSAGE_WORDS:
                continue
            candidates: dict[ProbeKind, Candidate] = {}
            if asked and not number and MIN_TITLE_WORDS <= count_words(title) <= MAX_TITLE_WORDS:
                candidates["title"] = Candidate(title, heading)
            if asked and (sentence := _sentence(chunk.text, prose, random)):
                candidates["sentence"] = Candidate(_query(sentence), sentence)
            yield Passage(document.id, chunk.text, candidates)


def _split(text: str) -> Iterator[tuple[str, str]]:
    """Yield headings with the text below each, without front matter; "" for text without a heading."""
    heading, start = "", len(text) - len(text.lstrip("\n"))
    first, gap, rest = text[start:].partition("\n\n")
    # The title of a row is followed by an empty line; a short first line before an empty line also counts as a title.
    is_line = "\n" not in first.strip() and count_words(first) <= MAX_TITLE_WORDS
    if gap and rest.strip() and is_line and not _HEADING.search(first):
        heading, start = first.strip(), start + len(first)
    if metadata := _FRONT_MATTER.match(text, start):
        start = metadata.end()
        title = _TITLE.search(metadata[0])
        heading = heading or (title[1].strip(" \t\r\"'") if title else "")
    for match in _HEADING.finditer(text, start):
        if match["fence"]:
            continue
        yield heading, text[start : match.start()]
        # Without the closing sequence of Markdown (`# Title ##`).
        hashed = match["hash"] and match["hash"][0] + match["hash"][1:].rstrip(" \t").rstrip("#")
        heading, start = (match["under"] or hashed).strip(), match.end()
    yield heading, text[start:]


def _sentence(text: str, prose: str, random: Random) -> str | None:
    """Choose one of the sentences of prose that is no row of a table, if the rest is long enough to be a passage."""
    sentences = [piece.strip() for piece in document_pieces(Document("", text, None, "text"), MAX_WORDS)]
    fitting = [
        s
        for s in sentences
        if MIN_SENTENCE_WORDS <= count_words(s) <= MAX_SENTENCE_WORDS
        and _SENTENCE_END.search(s)
        and "|" not in s
        and s in prose
    ]
    if len(sentences) < 3 or not fitting:
        return None
    sentence = random.choice(fitting)
    return sentence if count_words(text) - count_words(sentence) >= MIN_PASSAGE_WORDS else None


def _query(text: str) -> str:
    """Return a text in one line, and without markup."""
    return " ".join(_MARKUP.sub(r"\1", text).split())
