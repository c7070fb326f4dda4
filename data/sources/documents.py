"""Reading documents from folders, files, patterns, JSON lines, parquet files, tables (CSV) and data sets.

For each source: list its files (`files.source_files`) or open its data set, read rows or text, make documents of them, remove
held-out text, and skip empty documents. Everything is a generator: a file is opened when its first document is requested, and
rows are streamed, so millions of documents never have to fit in memory.

Skipped documents are counted in the report under these words: `binary` files (with a NUL byte in their first 8 KiB, as UTF-16 has, and
`.svg`), files that are `too large`, `unreadable` files, `PDF, Word, PowerPoint, EPUB, HTML or Jupyter` without the extra that reads them
(`converted`), `PDF without text`, and `empty` documents; `files` lists more. Text is UTF-8; other bytes are read as U+FFFD, and the
report counts the files that contain such bytes.
"""

import gzip
import logging
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from operator import eq
from pathlib import Path
from typing import Any

from revela_hub.data.sources import converted
from revela_hub.data.sources.files import check_exists, source_files
from revela_hub.data.sources.report import ReadReport, skips
from revela_hub.data.sources.rows import Row, dataset_rows, file_rows, has_rows, id_text
from revela_hub.data.sources.source import Document, Source, SourceLike, parse_sources
from revela_hub.data.sources.unicode import printable_name
from revela_hub.data.text.same_text import without_part
from revela_hub.data.text.words import LETTER
from revela_hub.errors import UserError, first_line
from revela_hub.files import local_path

logger = logging.getLogger(__name__)

HELD_OUT = "held_out.jsonl"

# Text in which line breaks matter: programs, data and markup.
CODE_EXTENSIONS = frozenset(
    ".asm .awk .bash .bat .bzl .c .cc .cfg .clj .cljs .cmake .coffee .conf .cpp .cs .css .csv .cu .cuh .cxx .dart .diff .el "
    ".erl .ex .exs .f .f03 .f90 .f95 .fs .fsx .glsl .go .gradle .graphql .groovy .h .hcl .hh .hpp .hrl .hs .htm .html .hxx "
    ".ini .ipynb .java .jl .js .json .jsx .kt .kts .less .lisp .lua .m .mjs .ml .mli .mm .nim .nix .pas .patch .php .pl .pm "
    ".proto .ps1 .py .pyi .pyx .r .rb .rkt .rs .s .sass .scala .scm .scss .sh .sol .sql .sv .svelte .swift .tcl .tf .toml "
    ".ts .tsv .tsx .v .vb .vhd .vhdl .vim .vue .wgsl .xml .yaml .yml .zig .zsh".split()
)
CODE_NAMES = frozenset({"BUILD", "CMakeLists.txt", "Dockerfile", "Jenkinsfile", "Makefile", "Rakefile", "WORKSPACE"})

# The beginning of a function or class in a row, which has no ending of a file that names a language.
_FUNCTION = re.compile(
    r"(?:\s*@\w[^\n]*\n)*\s*(?:(?:async )?def \w+\s*\(|class \w+[^\n.]*[:{]\s*\n|func (?:\([^)\n]*\) )?\w+\(|(?:pub )?fn \w+[(<]"
    r"|(?:async )?function\*? ?\w*\s*\(|(?:public|private|protected|static)\b[^\n.]*\([^\n]*\n?[^\n]*\{)"
)
_LETTER = re.compile(LETTER)
_MIB = 1024 * 1024
_PROBED_BYTES = 8 * 1024
_SCANNED = "PDF without text (needs OCR)"


def read_documents(
    sources: Iterable[SourceLike] | SourceLike, *, report: ReadReport | None = None, **defaults: Any
) -> Iterator[Document]:
    """Read the documents of all sources, in order, one at a time.

    Args:
        sources: Paths, patterns, `hf:` data sets, mappings or `Source`s; see `revela_hub.data.sources.source`.
        report: Its counts are updated while reading. Without one, a warning at the end says what was skipped.
        defaults: Default values for fields of `Source`, for example `text_column="body"`.

    Raises:
        UserError: Immediately: an invalid source, or a missing file or folder. While reading: a source without any
            document, invalid JSON, a missing column.
    """
    parsed = parse_sources(sources, **defaults)
    for source in parsed:
        check_exists(source)
    return _read(parsed, report)


def _read(sources: list[Source], given: ReadReport | None) -> Iterator[Document]:
    report = ReadReport() if given is None else given
    names = ", ".join(source.path for source in sources)
    for source in sources:
        skipped, found = report.skipped.copy(), 0
        documents = _documents(source, report)
        if source.held_out is not None:
            documents = without_held_out(documents, read_held_out(source.held_out), report)
        for document in documents:
            if not document.text or document.text.isspace():
                report.skipped["empty"] += 1
                continue
            found += 1
            report.documents += 1
            yield document
            if found == source.max_documents:
                break
        if not found:
            reasons = skips(report.skipped - skipped, report.endings)
            raise UserError(f"no documents in {source.path}{reasons and f': skipped {reasons}'}")
    probes = ", ".join({source.held_out for source in sources if source.held_out is not None})
    if probes and not report.held_out:
        logger.warning("%s: no text of the probe %s is in these documents: nothing is held out", names, probes)
    if given is None and (remarks := report.remarks()):
        logger.warning("%s: %s", names, "; ".join(remarks))


def _documents(source: Source, report: ReadReport) -> Iterator[Document]:
    if source.is_dataset:
        yield from row_documents(dataset_rows(source), source)
        return
    for path in source_files(source, report):
        if has_rows(path, source):
            yield from row_documents(file_rows(path), source)
        elif isinstance(document := _file_document(path, source, report), Document):
            yield document
        else:
            report.skipped[document] += 1


def _file_document(path: Path, source: Source, report: ReadReport) -> Document | str:
    """Return a file of text as a document, or the reason to skip it."""
    suffix, name = path.suffix.lower(), printable_name(path.as_posix())
    is_converted = source.kind != "code" and suffix in converted.SUFFIXES
    if is_converted and not converted.converter_version():
        return converted.CONVERTED_FORMATS
    try:
        if path.stat().st_size > source.max_file_mib * _MIB:
            return "too large"
        content = gzip.decompress(path.read_bytes()) if path.name.endswith(".txt.gz") else path.read_bytes()
        if is_converted:
            text = converted.as_text(content, suffix)
            return Document(name, text, None, "text") if text else _SCANNED if suffix == ".pdf" else "empty"
    except Exception as error:  # of any of the libraries
        logger.warning("%s is skipped: it cannot be read (%s)", name, first_line(error))
        return "unreadable"
    if b"\0" in content[:_PROBED_BYTES] or suffix == ".svg":  # git's rule, and drawings
        report.endings[printable_name(suffix) or "no ending"] += 1
        return "binary"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("utf-8-sig", errors="replace")
        report.replaced += 1
    is_code = suffix in CODE_EXTENSIONS or path.name in CODE_NAMES or (not suffix and text.startswith("#!"))
    return Document(name, text, name, source.kind or ("code" if is_code else "text"))


def row_documents(rows: Iterable[Row], source: Source) -> Iterator[Document]:
    """Make a document of each row, of `merge_rows` rows, or of consecutive rows with the same value in `merge_column`."""
    column, rows = source.merge_column, iter(rows)
    groups = iter(lambda: list(islice(rows, source.merge_rows or 1)), [])
    if column is not None:
        groups = (list(parts) for _, parts in groupby(rows, key=lambda row: row.value(column)))
    for merged in groups:
        yield _document(merged[0], " ".join(filter(None, (_text(row, source) for row in merged))), source)


def _text(row: Row, source: Source) -> str:
    return "\n\n".join(filter(None, map(row.text, source.text_columns)))


def _document(row: Row, text: str, source: Source) -> Document:
    if source.title_column is None:
        title = row.columns.get("title")
        title = title if isinstance(title, str) else ""
    else:
        title = row.text(source.title_column) if source.title_column else ""
    name = row.columns.get("_id") if source.id_column is None else None
    name = row.value(source.id_column) if source.id_column else name
    # An empty line, so that the title does not become part of the first sentence.
    has_title = text.startswith(title) and not _LETTER.match(text, len(title))  # "Go" is not the title of "Google"
    text = f"{title}\n\n{text}" if title and text and not has_title else text
    kind = source.kind or ("code" if _FUNCTION.match(text) else "text")
    return Document(row.where if name is None else id_text(name), text, None, kind, title=title)


def read_held_out(path: str | Path) -> dict[str, list[str]]:
    """Return the texts to remove by document id, from a file of JSON lines with `document` and `text` or its folder."""
    file = local_path(path)
    file = file / HELD_OUT if file.is_dir() else file
    held_out: dict[str, list[str]] = defaultdict(list)
    for row in file_rows(file):
        held_out[row.text("document")].append(row.text("text"))
    return dict(held_out)


def without_held_out(
    documents: Iterator[Document], held_out: Mapping[str, Sequence[str]], report: ReadReport
) -> Iterator[Document]:
    """Remove held-out texts from documents, and count them in `report.held_out`.

    The ids of the same document may differ, because several paths lead to a file: one then ends with the other.
    """
    by_name: dict[str, list[tuple[list[str], Sequence[str]]]] = defaultdict(list)
    for name, texts in held_out.items():
        by_name[(parts := _parts(name))[-1]].append((parts, texts))
    for document in documents:
        text, parts = document.text, _parts(document.id)
        same = (texts for other, texts in by_name.get(parts[-1], ()) if all(map(eq, reversed(other), reversed(parts))))
        for removed in chain.from_iterable(same):
            lines = re.sub(r"[^\n]", "", removed)  # keep the line numbers below it
            if removed in text:
                text, found = text.replace(removed, lines), 1
            else:  # perhaps in another Unicode form
                text, found = without_part(text, removed, lines)
            report.held_out += found > 0
        yield document if text is document.text else replace(document, text=text)


def _parts(name: str) -> list[str]:
    return [part for part in posixpath.normpath(name).split("/") if part not in ("", ".", "..")] or [name]
