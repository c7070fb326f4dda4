"""Documents to chunks: at most 120 words, whole sentences of prose, whole lines of code, as Revela is trained on.

Sentences are found by sentencex (Wikimedia; MIT). It needs no model and no download, has wheels for Linux and macOS on
x86-64 and arm64, and handles abbreviations, initials and quotations in some 300 languages. Measured
on English Wikipedia, one core, in millions of characters a second: sentencex 45, blingfire 9 with offsets (not maintained
since 2022), syntok 1.6, pysbd 0.3 (since 2021). The whole of this module does 25 on prose and 30 on code, so that the
13 GB of Wikipedia's 21 million passages take ten minutes.

A word is what stands between white space. Two guards keep chunks within reason where that means little: in scripts written
without spaces every character counts as a word, and a chunk has at most 20 characters for each of its words (prose has
six), which is what cuts minified code.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from sentencex import segment

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document

CHARACTERS_PER_WORD = 20

_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana and Han
UNSPACED_CHARACTER = re.compile(f"[{_UNSPACED}]")
# Where a piece that is too long may be cut; the limit of 100 is for the words of minified code and base64.
_WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]{{1,100}}")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")  # not splitlines(), which also ends lines at form feeds
_CLOSING = ")]}"
_QUOTES = "\"')]\u2019\u201d"
_GLUED = ".!?" + _QUOTES  # no sentence ends after these without white space
_LONGEST_GAP = 64
_BLOCK = 1 << 15
_LAST_SPACE = re.compile(r".*\s", re.DOTALL)
# For long quotations only, inside which sentencex finds no ends.
_QUOTED_SENTENCE = re.compile(r".*?[.!?][\"')\]\u2019\u201d]*\s+|.+", re.DOTALL)


@dataclass(frozen=True)
class Chunk:
    """A part of a document.

    Attributes:
        document: The document's id.
        text: Exactly the document's characters: code with its indentation and line ends, prose without the white space
            around it.
        path: The document's file, if it is one.
        start_line: The line on which the chunk begins, from 1.
        end_line: The line on which it ends.
    """

    document: str
    text: str
    path: str | None
    start_line: int
    end_line: int


@dataclass(frozen=True)
class _Piece:
    """What is not cut any further: a sentence, a line, or a part of one that was too long."""

    text: str
    words: int


def chunk_document(
    document: Document, max_words: int = 120, *, language: str = "en", report: ReadReport | None = None
) -> list[Chunk]:
    """Cuts a document into chunks.

    Prose: as many whole sentences as fit. What is longer than a chunk without an end of sentence (a list, a table, a
    long quotation, one with a quotation mark missing) is cut at its line ends, a line of it that is still too long at
    its full stops, and only then between words. Code: as many whole lines as fit, but if there is a
    better place in the second half of the chunk it ends there: before the line that is indented least, and best after an
    empty line, so that functions tend to stay whole. Chunks of nothing but white space are left out; apart from those, the
    chunks of code joined together are the document.

    Args:
        document: What to cut.
        max_words: The largest number of words in a chunk.
        language: ISO 639-1 code, for the abbreviations of prose.
        report: Its `chunks` and `cut` are counted up.

    Returns:
        The chunks in their order; none for a document of white space.
    """
    if max_words < 1:
        raise ValueError(f"max_words is {max_words}; it must be at least 1")
    report = ReadReport() if report is None else report
    split = _code if document.kind == "code" else _prose
    chunks = []
    line = document.first_line
    for text in split(document.text, max_words, language, report):
        following = line + text.count("\n")
        kept = text if document.kind == "code" else text.strip()
        if kept and not kept.isspace():
            start = line if kept is text else line + text.count("\n", 0, text.index(kept[0]))
            end = start + kept.count("\n") - kept.endswith("\n")
            chunks.append(Chunk(document.id, kept, document.path, start, end))
        line = following
    report.chunks += len(chunks)
    return chunks


def document_pieces(
    document: Document, max_words: int, *, language: str = "en", report: ReadReport | None = None
) -> Iterator[str]:
    """Yields what is not cut any further: whole sentences of prose, whole lines of code; joined they are the text.

    What is longer than `max_words` is cut as for chunks; see there.
    """
    report = ReadReport() if report is None else report
    if document.kind == "code":
        pieces = _lines(document.text, max_words, report)
    else:
        pieces = _sentences(document.text, max_words, language, report)
    return (piece.text for piece in pieces)


def count_words(text: str) -> int:
    """The number of words as the size of a chunk counts them."""
    words = len(text.split())
    return words if text.isascii() else words + len(UNSPACED_CHARACTER.findall(text))


def _piece(text: str, max_words: int) -> _Piece | None:
    """The text as one piece, or None if it is larger than a chunk."""
    words = count_words(text)
    return _Piece(text, words) if words <= max_words and len(text) <= max_words * CHARACTERS_PER_WORD else None


def _cut(text: str, max_words: int) -> Iterator[_Piece]:
    """Cuts a sentence or line that is larger than a chunk between words, into as few pieces as will do."""
    start = end = words = 0
    for match in _WORD.finditer(text):
        if words and (words == max_words or match.end() - start > max_words * CHARACTERS_PER_WORD):
            yield _Piece(text[start:end], words)
            start, words = end, 0
        end = match.end()
        words += 1
    yield _Piece(text[start:], words)


def _prose(text: str, max_words: int, language: str, report: ReadReport) -> Iterator[str]:
    """Yields the text in runs of whole sentences; joined they are the text."""
    start = end = words = 0
    for piece in _sentences(text, max_words, language, report):
        if words and (
            words + piece.words > max_words or end + len(piece.text) - start > max_words * CHARACTERS_PER_WORD
        ):
            yield text[start:end]
            start, words = end, 0
        end += len(piece.text)
        words += piece.words
    yield text[start:]


def _segment(text: str, language: str) -> Iterator[str]:
    """The sentences of a text; joined they are the text.

    In blocks, each from the beginning of a sentence: the time that sentencex takes for many quotation marks in one
    paragraph grows with the square of its length.
    """
    start = 0
    while start < len(text):
        sentences = list(_segment_block(text[start : start + _BLOCK], language))
        if start + _BLOCK < len(text):
            if len(sentences) > 1:
                sentences.pop()  # it may go on in the next block
            elif space := _LAST_SPACE.match(sentences[0]):
                sentences = [space[0]]
        yield from sentences
        start += sum(map(len, sentences))


def _segment_block(text: str, language: str) -> Iterator[str]:
    start = end = 0
    for sentence in segment(language, text):
        # In longer texts sentencex leaves out the empty lines between paragraphs: the sentence is looked for.
        found = text.find(sentence, end, end + len(sentence) + _LONGEST_GAP)
        end = end if found < 0 else found + len(sentence)
        stop = end
        if end < len(text) and text[end - 1] in _GLUED:
            # It may see an end before the quotation mark that closes a sentence, or before a dash that carries it on.
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
    for sentence in _segment(text, language):
        if (whole := _piece(sentence, max_words)) is not None:
            yield whole
            continue
        lines = _LINE.findall(sentence)
        # Once more, line by line: an unclosed quotation mark holds only to the end of its line.
        again = (part for line in lines for part in _segment(line, language)) if len(lines) > 1 else lines
        for part in again:
            if (piece := _piece(part, max_words)) is not None:
                yield piece
            else:
                yield from _quotation(part, max_words, report)


def _quotation(text: str, max_words: int, report: ReadReport) -> Iterator[_Piece]:
    for sentence in _QUOTED_SENTENCE.findall(text):
        if (piece := _piece(sentence, max_words)) is not None:
            yield piece
        else:
            report.cut += 1
            yield from _cut(sentence, max_words)


def _code(text: str, max_words: int, language: str, report: ReadReport) -> Iterator[str]:
    """Yields the text in runs of whole lines; joined they are the text (`language` is for prose)."""
    pieces = list(_lines(text, max_words, report))
    start = 0
    while start < len(pieces):
        end, words, characters, half = start, 0, 0, 0
        while end < len(pieces):
            piece = pieces[end]
            words += piece.words
            characters += len(piece.text)
            if end > start and (words > max_words or characters > max_words * CHARACTERS_PER_WORD):
                break
            end += 1
            if 2 * words <= max_words and 2 * characters <= max_words * CHARACTERS_PER_WORD:
                half = end
        if end < len(pieces):
            end = _best_end(pieces, max(half, start + 1), end)
        yield "".join(piece.text for piece in pieces[start:end])
        start = end


def _lines(text: str, max_words: int, report: ReadReport) -> Iterator[_Piece]:
    for line in _LINE.findall(text):
        if (whole := _piece(line, max_words)) is not None:
            yield whole
        else:
            report.cut += 1
            yield from _cut(line, max_words)


def _best_end(pieces: list[_Piece], first: int, last: int) -> int:
    """Which of the pieces from `first` to `last` should begin the next chunk: see `chunk_document`."""
    best, best_rank = last, (1 << 30, False)
    for index in range(last, first - 1, -1):
        text, before = pieces[index].text, pieces[index - 1].text
        content = text.lstrip()
        # Not inside a line, not before an empty line (it stays with what it follows), nor before a closing bracket.
        if not before.endswith("\n") or not content or content[0] in _CLOSING:
            continue
        rank = (len(text) - len(content), not before.isspace())
        if rank < best_rank:
            best, best_rank = index, rank
    return best
