"""The files of a source: a file, everything below a folder, or the matches of a glob pattern, in the order of their names.

In folders and patterns these are skipped, and counted in the report under these words: `hidden` files and folders (`.git`),
`generated` folders (`__pycache__`, `node_modules`, virtual environments), `excluded` ones, folders `written by revela-hub`,
`unreadable` files and folders, links to a folder that was `already read`, and the files `with queries or judgements` of a BEIR folder.
"""

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import HUB_PREFIX, Source
from revela_hub.errors import UserError
from revela_hub.files import is_ours, local_path

GENERATED_FOLDERS = frozenset({"__pycache__", "node_modules"})


def check_exists(source: Source) -> None:
    """Raise a `UserError` if a source is a file or folder that does not exist, or a pattern that nothing matches."""
    path = local_path(source.path)
    if not source.is_dataset and not path.exists() and next(glob.iglob(str(path), recursive=True), None) is None:
        remedy = f"; a data set of the Hub is written {HUB_PREFIX}owner/name" if source.path.count("/") == 1 else ""
        raise UserError(f"no such file or folder: {source.path}{remedy}")


def source_files(source: Source, report: ReadReport) -> Iterator[Path]:
    """Yield the files of a source that is not a data set. A file that is named explicitly is never skipped."""
    path = local_path(source.path)
    if path.is_dir() and (corpus := _beir_corpus(path)):
        report.skipped["with queries or judgements"] += sum(file.is_file() for file in path.rglob("*")) - 1
        yield corpus
    elif path.is_dir():
        yield from _walk(path, path, source, report, set())
    elif path.exists():
        yield path
    else:
        yield from _matches(path, source, report)


def local_files(source: Source) -> Iterator[Path]:
    """Yield the files on this machine that a source reads, including those of a local data set."""
    if source.rows is not None:
        return
    if not source.is_dataset:
        yield from source_files(source, ReadReport())
        return
    given = source.data_files or ()
    several = given.values() if isinstance(given, Mapping) else [given]
    paths = [path for files in several for path in ([files] if isinstance(files, str) else files)]
    for path in (source.path.removeprefix(HUB_PREFIX), *paths):
        if "://" not in path and not path.startswith("~") and (glob.has_magic(path) or Path(path).exists()):
            yield from source_files(Source(path=path), ReadReport())


def _beir_corpus(folder: Path) -> Path | None:
    """Return the passages of a BEIR folder; None for other folders."""
    names = sorted(os.listdir(folder)) if os.access(folder, os.R_OK) else []
    plain = {name.removesuffix(".gz"): name for name in names}
    return folder / plain["corpus.jsonl"] if {"corpus.jsonl", "queries.jsonl", "qrels"} <= plain.keys() else None


def _reason_to_skip(path: Path, root: Path, source: Source) -> str | None:
    if source.excludes(path, path.relative_to(root)):
        return "excluded"
    if path.name.startswith("."):
        return "hidden"
    if is_ours(path) and not os.path.isfile(path / Path(source.path).name):  # synthetic-*/pairs.jsonl
        return "written by revela-hub"
    if (path.name in GENERATED_FOLDERS and os.path.isdir(path)) or os.path.isfile(path / "pyvenv.cfg"):
        return "generated"
    return None


def _matches(pattern: Path, source: Source, report: ReadReport) -> Iterator[Path]:
    # The folder that the pattern names without wildcards, and what it names below it, is read.
    root = next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))
    files: dict[str, Path] = {}  # by their real paths, because links may form loops
    for file in sorted(map(Path, glob.glob(str(pattern), recursive=True)), key=str):
        below = file.relative_to(root).parts
        parts = [root.joinpath(*below[:end]) for end in range(1, len(below) + 1)]
        reasons = (_reason_to_skip(part, root, source) for part in parts if part.name not in pattern.parts)
        if reason := next(filter(None, reasons), None):
            report.skipped[reason] += 1
        elif file.is_file():
            files.setdefault(os.path.realpath(file), file)
    yield from files.values()


def _walk(folder: Path, root: Path, source: Source, report: ReadReport, seen: set[str]) -> Iterator[Path]:
    if (place := os.path.realpath(folder)) in seen:
        report.skipped["already read"] += 1
        return
    seen.add(place)
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        report.skipped["unreadable"] += 1
        return
    for name in names:
        path = folder / name
        if reason := _reason_to_skip(path, root, source):
            report.skipped[reason] += 1
        elif os.path.isdir(path):  # not Path.is_dir, which raises for a folder that may be listed but not entered
            yield from _walk(path, root, source, report, seen)
        elif os.path.isfile(path):
            yield path
        else:  # a broken link, a socket
            report.skipped["unreadable"] += 1
