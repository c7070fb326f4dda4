"""Splitting documents into chunks: at most 120 words, whole sentences of prose or whole lines of code.

Sentences are found by sentencex (Wikimedia; MIT), which needs no model and no download, has wheels for Linux and macOS on
x86-64 and arm64, and handles abbreviations, initials and quotations in about 300 languages. Speed on English Wikipedia, one
core, in millions of characters per second: sentencex 45, blingfire 9 with offsets (unmaintained since 2022), syntok 1.6, pysbd
0.3 (unmaintained since 2021). This module processes 25 on prose and 30 on code: the 13 GB of Wikipedia's 21 million passages
take ten minutes.

Words are separated by white space; in scripts without spaces, 1.5 or three characters count as a word (see
`revela_hub.data.text.words`). A chunk has at most 20 characters per word of its limit (prose averages six), which splits minified
code. Thai and Lao have no full stop, but spaces between sentences and clauses: each clause counts as a sentence.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sentencex import segment

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document
from revela_hub.data.text.words import count_words, word_places
from revela_hub.errors import UserError

CHARACTERS_PER_WORD = 20

_LONGEST_WORD = 100
"""Characters after which a word may be split: for minified code and base64."""
_LINE = re.compile(r"[^\n]*\n|[^\n]+")  # not splitlines(), which also ends lines at form feeds
_CLOSING = ")]}"
_QUOTES = "\"')]\u2019\u201d"
_GLUED = ".!?" + _QUOTES  # no sentence ends after these without white space
_LONGEST_GAP = 64
_BLOCK = 1 << 15
# Thai and Lao letters, except for the repetition marks, which have spaces around them.
_THAI_LAO = "\u0e00-\u0e45\u0e47-\u0ec5\u0ec7-\u0eff"
_WITH_CLAUSES = re.compile(f"[{_THAI_LAO}\u17d4\u17d5]")
# Spaces that sentencex does not split at: between Thai or Lao clauses, and after a Khmer full stop.
_CLAUSE_END = re.compile(rf"(?<=[{_THAI_LAO}])\s+(?=[{_THAI_LAO}])|(?<=[\u17d4\u17d5])\s+")
_LAST_SPACE = re.compile(r".*\s", re.DOTALL)
# For long quotations only, in which sentencex does not split sentences.
_QUOTED_SENTENCE = re.compile(r".*?[.!?][\"')\]\u2019\u201d]*\s+|.+", re.DOTALL)


@dataclass(frozen=True)
class Chunk:
    """A part of a document.

    Attributes:
        document: The document's id.
        text: The unchanged text: code with its indentation and line ends, prose without surrounding white space.
        path: The document's file, if it is one.
        start_line: The first line of the chunk, from 1; in a PDF, the first page.
        end_line: The last line of the chunk, or the last page.
    """

    document: str
    text: str
    path: str | None
    start_line: int
    end_line: int


class _Piece(NamedTuple):
    """An indivisible piece: a sentence, a line, or a part of one that was too long."""

    text: str
    words: int


def chunk_document(
    document: Document, max_words: int = 120, *, language: str = "en", report: ReadReport | None = None
) -> list[Chunk]:
    """Split a document into chunks.

    Prose: each chunk has as many whole sentences as fit. A longer sentence (a list, a table, a long quotation, a missing
    quotation mark) is split at its line ends, a line that is still too long at its full stops, and only then between words.
    Code: each chunk has as many whole lines as fit, unless there is a better boundary in its second half: before the least
    indented line, preferably after an empty line, so that functions tend to stay whole. Chunks of only white space are
    skipped; apart from these, the concatenated chunks of code are the document. A row with a title is not split if its text without
    the title fits: the passages of DPR, KILT and Atlas stay as they are.

    Args:
        document: The document.
        max_words: Maximum number of words in a chunk.
        language: ISO 639-1 code, for abbreviations in prose.
        report: Its counts `chunks` and `cut` are updated.

    Returns:
        The chunks in their order; empty for a document of white space.
    """
    report = ReadReport() if report is None else report
    body = document.text.removeprefix(document.title)
    is_passage = document.title and document.kind == "text" and _piece(body, max_words) is not None
    pieces = [_Piece(document.text, 0)] if is_passage else list(_document_pieces(document, max_words, language, report))
    chunks = []
    line, ending = document.first_line, "\f" if document.path is None and is_pdf(document.id) else "\n"
    for text in _runs(pieces, max_words, is_code=document.kind == "code"):
        following = line + text.count(ending)
        kept = text if document.kind == "code" else text.strip()
        if kept and not kept.isspace():
            start = line if kept is text else line + text.count(ending, 0, text.index(kept[0]))
            end = start + kept.count(ending) - kept.endswith(ending)
            chunks.append(Chunk(document.id, kept, document.path, start, end))
        line = following
    report.chunks += len(chunks)
    return chunks


def is_pdf(name: str) -> bool:
    """Whether a document is the text of a PDF, whose pages end with form feeds."""
    return name.lower().endswith(".pdf")


def document_pieces(
    document: Document, max_words: int, *, language: str = "en", report: ReadReport | None = None
) -> Iterator[str]:
    """Yield whole sentences of prose or whole lines of code; concatenated, they are the text.

    Pieces longer than `max_words` are split as in `chunk_document`.
    """
    pieces = _document_pieces(document, max_words, language, ReadReport() if report is None else report)
    return (piece.text for piece in pieces)


def _document_pieces(document: Document, max_words: int, language: str, report: ReadReport) -> Iterator[_Piece]:
    if document.kind == "code":
        return _pieces(_LINE.findall(document.text), max_words, report)
    return _sentences(document.text, max_words, language, report)


def _piece(text: str, max_words: int) -> _Piece | None:
    """Return the text as one piece, or None if it is larger than a chunk."""
    piece = _Piece(text, count_words(text))
    return piece if _fits(piece.words, len(text), max_words) else None


def _fits(words: int, characters: int, max_words: int) -> bool:
    return words <= max_words and characters <= max_words * CHARACTERS_PER_WORD


def _cut(text: str, max_words: int) -> Iterator[_Piece]:
    """Split a sentence or line that is larger than a chunk between words, into as few pieces as possible."""
    start = end = 0
    for first, last in word_places(text):
        for stop in [*range(first + _LONGEST_WORD, last, _LONGEST_WORD), last]:
            if end > start and _piece(text[start:stop], max_words) is None:
                yield _Piece(text[start:end], count_words(text[start:end]))
                start = end
            end = stop
    yield _Piece(text[start:], count_words(text[start:]))


def _segment(text: str, language: str) -> Iterator[str]:
    """Yield the sentences of a text; concatenated, they are the text.

    The text is processed in blocks that begin with a sentence, because the time of sentencex is quadratic in the length of a
    paragraph with many quotation marks.
    """
    has_clauses = not text.isascii() and _WITH_CLAUSES.search(text) is not None
    start = 0
    while start < len(text):
        sentences = list(_segment_block(text[start : start + _BLOCK], language))
        if start + _BLOCK < len(text):
            if len(sentences) > 1:
                sentences.pop()  # it may continue in the next block
            elif space := _LAST_SPACE.match(sentences[0]):
                sentences = [space[0]]
        for sentence in sentences:
            yield from _clauses(sentence) if has_clauses else (sentence,)
        start += sum(map(len, sentences))


def _clauses(sentence: str) -> Iterator[str]:
    start = 0
    for gap in _CLAUSE_END.finditer(sentence):
        yield sentence[start : gap.end()]
        start = gap.end()
    if start < len(sentence):
        yield sentence[start:]


def _segment_block(text: str, language: str) -> Iterator[str]:
    start = end = 0
    for sentence in segment(language, text):
        # In longer texts sentencex drops empty lines between paragraphs, so the sentence is searched for.
        found = text.find(sentence, end, end + len(sentence) + _LONGEST_GAP)
        end = end if found < 0 else found + len(sentence)
        stop = end
        if end < len(text) and text[end - 1] in _GLUED:
            # It may split before a closing quotation mark, or before a dash that continues the sentence.
            while stop < len(text) and text[stop] in _QUOTES:
                stop += 1
            if stop < len(text) and not text[stop].isspace():
                continue
        if stop > start:
            yield text[start:stop]
            start = stop
    if start < len(text):
        yield text[start:]


def _sentences(text: str, max_words: int, language: str, report: ReadReport) -> Iterator[_Piece]:
    if not re.fullmatch("[a-z]{2,3}", language):  # sentencex takes any other string for English
        raise UserError(f"language {language!r} is not an ISO 639 code, such as en")
    for sentence in _segment(text, language):
        if (whole := _piece(sentence, max_words)) is not None:
            yield whole
            continue
        lines = _LINE.findall(sentence)
        # Again, line by line: an unclosed quotation mark then only extends to the end of its line.
        again = (part for line in lines for part in _segment(line, language)) if len(lines) > 1 else lines
        for part in again:
            if (piece := _piece(part, max_words)) is not None:
                yield piece
            else:
                yield from _pieces(_QUOTED_SENTENCE.findall(part), max_words, report)


def _runs(pieces: list[_Piece], max_words: int, *, is_code: bool) -> Iterator[str]:
    """Yield runs of whole sentences or lines that are no larger than a chunk; concatenated, they are the text."""
    start = 0
    while start < len(pieces):
        end, words, characters, half = start, 0, 0, 0
        while end < len(pieces):
            piece = pieces[end]
            words += piece.words
            characters += len(piece.text)
            if end > start and not _fits(words, characters, max_words):
                break
            end += 1
            if _fits(2 * words, 2 * characters, max_words):
                half = end
        if is_code and end < len(pieces):
            end = _best_end(pieces, max(half, start + 1), end)
        yield "".join(piece.text for piece in pieces[start:end])
        start = end


def _pieces(parts: list[str], max_words: int, report: ReadReport) -> Iterator[_Piece]:
    """Yield lines or sentences, each as one piece, or split between words if it is larger than a chunk."""
    for part in parts:
        if (whole := _piece(part, max_words)) is not None:
            yield whole
        else:
            report.cut += 1
            yield from _cut(part, max_words)


def _best_end(pieces: list[_Piece], first: int, last: int) -> int:
    """Return which of the pieces from `first` to `last` begins the next chunk; see `chunk_document`."""
    best, best_rank = last, (1 << 30, False)
    for index in range(last, first - 1, -1):
        text, before = pieces[index].text, pieces[index - 1].text
        content = text.lstrip()
        # Not inside a line, not before an empty line (it stays with the line above), not before a closing bracket.
        if not before.endswith("\n") or not content or content[0] in _CLOSING:
            continue
        rank = (len(text) - len(content), not before.isspace())
        if rank < best_rank:
            best, best_rank = index, rank
    return best
