"""Documents from folders, files, patterns, JSON lines and data sets, one after another.

A generator: a file is opened when its first document is asked for, and JSON lines and data sets are streamed, so that
millions of documents never sit in memory.

Files are read in the order of their names. Not read, and counted in the report under these words: `hidden` files and
folders (`.git`), `generated` folders (`__pycache__`, `node_modules`), `excluded` ones, `binary` files (a NUL in the first
8 KiB, as git decides it), files that are `too large`, `unreadable` files, links to a folder that was `already read` (which
also ends loops), folders that are `written by revela-hub`, and documents that are `empty`. Bytes that are not UTF-8 are read
as U+FFFD: one bad byte in a file of text is no reason to lose the file, and the report says how many files have them.
"""

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from revela_hub.data.own_folder import is_ours
from revela_hub.data.sources.held_out import read_held_out, without_held_out
from revela_hub.data.sources.report import ReadReport, skips
from revela_hub.data.sources.rows import JSON_LINES, dataset_rows, json_lines_rows, row_documents
from revela_hub.data.sources.source import HUB_PREFIX, Document, Kind, Source, SourceLike, parse_sources
from revela_hub.data.sources.unicode import printable_name
from revela_hub.errors import UserError

# Text whose lines mean something: programs, and the data and markup that live beside them.
CODE_EXTENSIONS = frozenset(
    ".asm .awk .bash .bat .bzl .c .cc .cfg .clj .cljs .cmake .coffee .conf .cpp .cs .css .csv .cu .cuh .cxx .dart .diff .el "
    ".erl .ex .exs .f .f03 .f90 .f95 .fs .fsx .glsl .go .gradle .graphql .groovy .h .hcl .hh .hpp .hrl .hs .htm .html .hxx "
    ".ini .ipynb .java .jl .js .json .jsx .kt .kts .less .lisp .lua .m .mjs .ml .mli .mm .nim .nix .pas .patch .php .pl .pm "
    ".proto .ps1 .py .pyi .pyx .r .rb .rkt .rs .s .sass .scala .scm .scss .sh .sol .sql .sv .svelte .swift .tcl .tf .toml "
    ".ts .tsv .tsx .v .vb .vhd .vhdl .vim .vue .wgsl .xml .yaml .yml .zig .zsh".split()
)
CODE_NAMES = frozenset({"BUILD", "CMakeLists.txt", "Dockerfile", "Jenkinsfile", "Makefile", "Rakefile", "WORKSPACE"})
GENERATED_FOLDERS = frozenset({"__pycache__", "node_modules"})

_BINARY_PROBE = 8 * 1024
_MIB = 1024 * 1024


def read_documents(
    sources: Iterable[SourceLike] | SourceLike, *, report: ReadReport | None = None, **defaults: Any
) -> Iterator[Document]:
    """Reads the documents of all sources, in order, as they are asked for.

    Args:
        sources: Paths, patterns, `hf:` data sets, mappings or `Source`s; see `revela_hub.data.sources.source`.
        report: Is counted up while reading.
        defaults: Fields of `Source` for what a source itself does not say, for example `text_column="body"`.

    Raises:
        UserError: At once: a source that is not well written, or a file or folder that is not there. While reading: a
            source without any document, a broken line of JSON, a column that is not there.
    """
    parsed = parse_sources(sources, **defaults)
    for source in parsed:
        check_exists(source)
    return _read(parsed, ReadReport() if report is None else report)


def check_exists(source: Source) -> None:
    """Raises UserError where a source names a file or folder that is not there."""
    if not (source.is_dataset or Path(source.path).expanduser().exists() or glob.has_magic(source.path)):
        remedy = f"; a data set of the Hub is written {HUB_PREFIX}owner/name" if source.path.count("/") == 1 else ""
        raise UserError(f"no such file or folder: {source.path}{remedy}")


def _read(sources: list[Source], report: ReadReport) -> Iterator[Document]:
    for source in sources:
        skipped_before = report.skipped.copy()
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
                break
        if not found:
            raise UserError(_nothing_found(source, report.skipped - skipped_before))


def _nothing_found(source: Source, skipped: Counter[str]) -> str:
    what = (
        f"nothing matches the pattern {source.path}"
        if glob.has_magic(source.path)
        else f"no documents in {source.path}"
    )
    if not skipped:
        return what
    remedy = f" (over {source.max_file_mib} MiB: raise max_file_mib)" if skipped["too large"] else ""
    return f"no documents in {source.path}: skipped {skips(skipped)}{remedy}"


def _documents(source: Source, report: ReadReport) -> Iterator[Document]:
    if source.is_dataset:
        yield from row_documents(dataset_rows(source), source)
        return
    for path in source_files(source, report):
        if path.name.endswith(JSON_LINES):
            yield from row_documents(json_lines_rows(path, report), source)
        elif (document := _file_document(path, source, report)) is not None:
            yield document


def file_kind(path: Path) -> Kind:
    """Whether a file is cut at the ends of sentences or of lines, by its name."""
    return "code" if path.suffix.lower() in CODE_EXTENSIONS or path.name in CODE_NAMES else "text"


def _file_document(path: Path, source: Source, report: ReadReport) -> Document | None:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > source.max_file_mib * _MIB:
                report.skipped["too large"] += 1
                return None
            content = file.read(_BINARY_PROBE)
            if b"\0" in content:
                report.skipped["binary"] += 1
                return None
            content += file.read()
    except OSError:
        report.skipped["unreadable"] += 1
        return None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content.decode(errors="replace")
        report.replaced += 1
    name = printable_name(path.as_posix())
    return Document(name, text.removeprefix("\ufeff"), name, source.kind or file_kind(path))


def source_files(source: Source, report: ReadReport) -> Iterator[Path]:
    """Finds the files of a source that is not a data set, in the order of their names.

    A file that is named outright is read whatever its name is; what is found in a folder or by a pattern may be hidden,
    generated or excluded.
    """
    path = Path(source.path).expanduser()
    if path.is_dir():
        yield from _walk(path, path, source, report, set())
    elif path.exists():
        yield path
    else:
        yield from _matches(path, source, report)


def _matches(pattern: Path, source: Source, report: ReadReport) -> Iterator[Path]:
    # A folder of ours that the pattern names outright is read.
    outright = next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))
    ours: dict[Path, bool] = {outright: False}

    def in_ours(folder: Path) -> bool:
        if folder not in ours:
            ours[folder] = in_ours(folder.parent) or is_ours(folder)
        return ours[folder]

    for file in map(Path, sorted(glob.glob(str(pattern), recursive=True))):
        if not file.is_file() or _passed_over(file, file, source, report):
            continue
        if in_ours(file.parent):
            report.skipped["written by revela-hub"] += 1
        else:
            yield file


def _passed_over(path: Path, relative: Path, source: Source, report: ReadReport) -> bool:
    if path.name.startswith("."):
        reason = "hidden"
    elif is_ours(path):
        reason = "written by revela-hub"
    elif path.name in GENERATED_FOLDERS and os.path.isdir(path):
        reason = "generated"
    elif any(fnmatch(path.name, pattern) or fnmatch(relative.as_posix(), pattern) for pattern in source.exclude):
        reason = "excluded"
    else:
        return False
    report.skipped[reason] += 1
    return True


def _walk(folder: Path, root: Path, source: Source, report: ReadReport, seen: set[tuple[int, int]]) -> Iterator[Path]:
    try:
        status = folder.stat()
        names = sorted(os.listdir(folder))
    except OSError:
        report.skipped["unreadable"] += 1
        return
    if (status.st_dev, status.st_ino) in seen:
        report.skipped["already read"] += 1
        return
    seen.add((status.st_dev, status.st_ino))
    for name in names:
        path = folder / name
        if _passed_over(path, path.relative_to(root), source, report):
            continue
        # os.path: Path.is_dir raises where the folder may be listed, but not entered.
        if os.path.isdir(path):
            yield from _walk(path, root, source, report, seen)
        elif os.path.isfile(path):
            yield path
        else:  # a link to nowhere, a socket
            report.skipped["unreadable"] += 1
