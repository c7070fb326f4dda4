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
    """Raises UserError if a source is a file or folder that does not exist, or a pattern that nothing matches."""
    path = local_path(source.path)
    if not source.is_dataset and not path.exists() and next(glob.iglob(str(path), recursive=True), None) is None:
        remedy = f"; a data set of the Hub is written {HUB_PREFIX}owner/name" if source.path.count("/") == 1 else ""
        raise UserError(f"no such file or folder: {source.path}{remedy}")


def source_files(source: Source, report: ReadReport) -> Iterator[Path]:
    """Yield the files of a source that is not a data set. A file that is named explicitly is never skipped."""
    path = local_path(source.path)
    if path.is_dir() and (corpus := _beir_corpus(path)):
        report.skipped["with queries or judgements"] += sum(1 for file in sorted(path.rglob("*")) if file.is_file()) - 1
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


def _matches(pattern: Path, source: Source, report: ReadReport) -> Iterator[Path]:
    # The folder that the pattern names without wildcards, and what it names below it, is read.
    explicit = next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))
    seen: set[str] = set()
    for file in sorted(map(Path, glob.glob(str(pattern), recursive=True)), key=str):
        below = file.relative_to(explicit)
        parts = [explicit / Path(*below.parts[:end]) for end in range(1, len(below.parts) + 1)]
        unnamed = [part for part in parts if part.name not in pattern.parts]
        skipped = any(_skipped(part, part.relative_to(explicit), source, report) for part in unnamed)
        if not skipped and file.is_file() and (place := os.path.realpath(file)) not in seen:  # links may form loops
            seen.add(place)
            yield file


def _beir_corpus(folder: Path) -> Path | None:
    """Return the passages of a BEIR folder; None for other folders."""
    names = (
        {name.removesuffix(".gz"): name for name in sorted(os.listdir(folder))} if os.access(folder, os.R_OK) else {}
    )
    return folder / names["corpus.jsonl"] if {"corpus.jsonl", "queries.jsonl", "qrels"} <= names.keys() else None


def _skipped(path: Path, relative: Path, source: Source, report: ReadReport) -> bool:
    if patterns := source.excluding(path, relative):
        reason = "excluded"
        report.patterns.update(patterns)
    elif path.name.startswith("."):
        reason = "hidden"
    elif is_ours(path) and not os.path.isfile(path / Path(source.path).name):  # synthetic-*/pairs.jsonl
        reason = "written by revela-hub"
    elif (path.name in GENERATED_FOLDERS and os.path.isdir(path)) or os.path.isfile(path / "pyvenv.cfg"):
        reason = "generated"
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
        if _skipped(path, path.relative_to(root), source, report):
            continue
        # os.path: Path.is_dir raises for a folder that may be listed but not entered.
        if os.path.isdir(path):
            yield from _walk(path, root, source, report, seen)
        elif os.path.isfile(path):
            yield path
        else:  # a broken link, a socket
            report.skipped["unreadable"] += 1
