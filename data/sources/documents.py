"""Reading documents from folders, files, patterns, JSON lines, parquet files, tables (CSV) and data sets.

For each source: list its files (`files.source_files`) or open its data set, read rows or text, make documents of them, remove
held-out text, and skip empty documents. Everything is a generator: a file is opened when its first document is requested, and
JSON lines, parquet files and data sets are streamed, so millions of documents never have to fit in memory.

Skipped documents are counted in the report under these words: `binary` files (with a NUL byte in their first 8 KiB, as UTF-16 has),
files that are `too large`, `unreadable` files, `PDF, Word, PowerPoint, EPUB, HTML or Jupyter` without the extra that reads them
(`converted`), `PDF without text`, and `empty` documents; `files` lists more. Text is UTF-8; other bytes are read as U+FFFD, and the
report counts the files that contain such bytes.
"""

import logging
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from operator import eq
from pathlib import Path
from typing import Any

from revela_hub.data.sources import converted
from revela_hub.data.sources.files import check_exists, source_files
from revela_hub.data.sources.report import ReadReport, skips
from revela_hub.data.sources.rows import (
    Row,
    column_text,
    column_value,
    dataset_rows,
    file_rows,
    has_rows,
    id_text,
    json_lines_rows,
)
from revela_hub.data.sources.source import Document, Source, SourceLike, parse_sources
from revela_hub.data.sources.unicode import decoded, printable_name
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
    whole = True
    for source in sources:
        skipped_before, endings_before = report.skipped.copy(), report.endings.copy()
        found = 0
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
                whole = False
                break
        if not found:
            raise UserError(_nothing_found(source, report.skipped - skipped_before, report.endings - endings_before))
    if whole:
        report.patterns.update({pattern: 0 for source in sources for pattern in source.exclude})
    if not report.held_out and (probes := {source.held_out for source in sources if source.held_out is not None}):
        read = ", ".join(source.path for source in sources)
        logger.warning(
            "%s: no text of the probe %s is in these documents, so nothing is held out", read, ", ".join(probes)
        )
    if given is None and (remarks := report.remarks()):
        logger.warning("%s: %s", ", ".join(source.path for source in sources), "; ".join(remarks))


def _nothing_found(source: Source, skipped: Counter[str], endings: Counter[str]) -> str:
    if not skipped:
        return f"no documents in {source.path}"
    remedy = f" (over {source.max_file_mib} MiB: set max_file_mib in a YAML file)" if skipped["too large"] else ""
    return f"no documents in {source.path}: skipped {skips(skipped, endings)}{remedy}"


def _documents(source: Source, report: ReadReport) -> Iterator[Document]:
    if source.is_dataset:
        yield from row_documents(dataset_rows(source), source)
        return
    for path in source_files(source, report):
        if has_rows(path, source):
            rows = file_rows(path, report)
            if path != local_path(source.path) and (first := next(rows, None)):
                if _is_mined(first, source):
                    report.skipped["written by revela-hub"] += 1
                    continue
                rows = chain([first], rows)
            yield from row_documents(rows, source)
        elif (document := _file_document(path, source, report)) is not None:
            yield document


def _is_mined(row: Row, source: Source) -> bool:
    """Return whether a row is of a file that `revela-hub mine` wrote, whose columns are not those of the text."""
    return {"anchor", "positive", "negative_1"} <= row.columns.keys() and not {
        *source.text_columns
    } & row.columns.keys()


def _file_document(path: Path, source: Source, report: ReadReport) -> Document | None:
    suffix, name = path.suffix.lower(), printable_name(path.as_posix())
    is_converted = source.kind != "code" and suffix in converted.SUFFIXES
    if is_converted and not converted.converter_version():
        report.skipped[converted.CONVERTED_FORMATS] += 1
        return None
    try:
        if path.stat().st_size > source.max_file_mib * _MIB:
            report.skipped["too large"] += 1
            return None
        content = path.read_bytes()
    except OSError:
        report.skipped["unreadable"] += 1
        return None
    if is_converted:
        return _converted_document(path, name, content, report)
    if b"\0" in content[:_PROBED_BYTES]:  # git's rule
        report.skipped["binary"] += 1
        report.endings[printable_name(suffix) or "no ending"] += 1
        return None
    text, is_valid = decoded(content)
    report.replaced += not is_valid
    is_code = suffix in CODE_EXTENSIONS or path.name in CODE_NAMES or (not suffix and text.startswith("#!"))
    return Document(name, text, name, source.kind or ("code" if is_code else "text"))


def _converted_document(path: Path, name: str, content: bytes, report: ReadReport) -> Document | None:
    try:
        text = converted.as_text(content, path)
    except Exception as error:  # of any of the libraries
        logger.warning("%s is skipped: it cannot be converted to text (%s)", name, first_line(error))
        report.skipped["unreadable"] += 1
        return None
    if not text and path.suffix.lower() == ".pdf":
        report.skipped[_SCANNED] += 1
        return None
    return Document(name, text, None, "text")


def row_documents(rows: Iterable[Row], source: Source) -> Iterator[Document]:
    """Make a document of each row, or of consecutive rows with the same value in `merge_column`."""
    if source.merge_column is None:
        for row in rows:
            yield _document(row, _text(row, source), source)
        return
    column = source.merge_column
    for _, parts in groupby(rows, key=lambda row: column_value(row, column, "choose with merge_column")):
        merged = list(parts)
        text = " ".join(text for row in merged if (text := _text(row, source)))
        yield _document(merged[0], text, source)


def _text(row: Row, source: Source) -> str:
    texts = [column_text(row, name, "choose with text_column") for name in source.text_columns]
    return "\n\n".join(filter(None, texts))


def _document(row: Row, text: str, source: Source) -> Document:
    if source.title_column is None:
        title = row.columns.get("title")
        title = title if isinstance(title, str) else ""
    else:
        title = column_text(row, source.title_column, "choose with title_column") if source.title_column else ""
    if source.id_column is None:
        name = row.columns.get("_id")
    else:
        name = column_value(row, source.id_column, "choose with id_column") if source.id_column else None
    # An empty line, so that the title does not become part of the first sentence.
    has_title = re.match(f"{re.escape(title)}(?!{LETTER})", text)  # "Go" is not the title of "Google"
    text = f"{title}\n\n{text}" if title and text and not has_title else text
    return Document(row.where if name is None else id_text(name), text, None, source.kind or "text")


def read_held_out(path: str | Path) -> dict[str, list[str]]:
    """Return the texts to remove by document id, from a file of JSON lines with `document` and `text` or its folder."""
    file = local_path(path)
    file = file / HELD_OUT if file.is_dir() else file
    if not file.is_file():
        raise UserError(f"no {file}: a probe's folder has one (revela-hub probe DATA --output_dir DIR)")
    held_out: dict[str, list[str]] = defaultdict(list)
    for row in json_lines_rows(file, ReadReport()):
        document, text = row.columns.get("document"), row.columns.get("text")
        if not isinstance(document, str) or not isinstance(text, str) or not text:
            raise UserError(f'{row.where}: expected an object with "document" and "text"')
        held_out[document].append(text)
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
