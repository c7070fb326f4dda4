"""Rows made of documents, written to an Arrow file as they come and read back by later runs with the same settings.

The file's name is made from the settings and from what the sources are (for files: path, size and time of change). A data
set of the Hub is what its name and revision say: give a revision, or another cache folder, to follow its changes.
"""

import errno
import hashlib
import json
import logging
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela_hub.data.own_folder import claim
from revela_hub.data.sources.documents import read_documents, source_files
from revela_hub.data.sources.held_out import read_held_out
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import HUB_PREFIX, Document, Source, SourceLike, parse_sources
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

# By this an unmarked cache of an earlier version is known.
ROWS, REPORT = "rows.arrow", "report.json"


def document_rows(
    kind: str,
    sources: Iterable[SourceLike] | SourceLike,
    features: "Mapping[str, Any]",
    made_with: Mapping[str, Any],
    rows: Callable[[Iterator[Document], ReadReport], Iterator[Mapping[str, Any]]],
    cache_dir: str | Path | None,
    report: ReadReport | None,
) -> "Dataset":
    """The rows that `rows` makes of the sources' documents, or those of an earlier run; what was read is counted up.

    Args:
        kind: How the name of the rows' folder begins.
        sources: As for `read_documents`.
        features: Of the data set.
        made_with: All that the rows depend on besides the sources.
        rows: Makes rows of documents, and counts into the report.
        cache_dir: As for `cached_rows`.
        report: Is counted up.
    """
    parsed, fresh = parse_sources(sources), ReadReport()
    documents = read_documents(parsed, report=fresh)  # here, so that a missing folder is not found to have been cached
    name = f"{kind}-{rows_fingerprint(made_with, parsed)}"
    dataset, counts = cached_rows(name, features, lambda: rows(documents, fresh), fresh.to_dict, cache_dir=cache_dir)
    if report is not None:
        report.add(ReadReport.from_dict(counts))
    return dataset


def cached_rows(
    name: str,
    features: "Mapping[str, Any]",
    rows: Callable[[], Iterator[Mapping[str, Any]]],
    counts: Callable[[], Mapping[str, Any]],
    *,
    cache_dir: str | Path | None = None,
) -> "tuple[Dataset, dict[str, Any]]":
    """Writes the rows, or takes them from the cache; a damaged entry is made again.

    Args:
        name: Of their folder: what they are and their fingerprint.
        features: Of the data set.
        rows: Makes them; called only if they are not in the cache.
        counts: What to keep with them, as JSON; called after the last row.
        cache_dir: Where they are kept; by default in the cache of `datasets`.

    Returns:
        The data set, memory-mapped, and the counts of the run that wrote it.

    Raises:
        UserError: One that `rows` raised; a folder that cannot be written to.
    """
    from filelock import FileLock

    folder = cache_folder(cache_dir) / name
    with FileLock(f"{folder}.lock"):  # one process writes, the others of the machine wait for it
        if (kept := _kept(folder)) is not None:
            return kept
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was ended half-way
        try:
            folder.mkdir()
            dataset = write_rows(rows(), features, folder / ROWS)
            # Written last: it says that the rows are all there.
            entry: dict[str, Any] = {"crc32": _checksum(folder / ROWS), "counts": dict(counts())}
            (folder / REPORT).write_text(json.dumps(entry), encoding="utf-8")
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(
                    f"no room to write {folder}: make some", cache_dir="or give another --cache_dir"
                ) from error
            raise
    return dataset, entry["counts"]


def _kept(folder: Path) -> "tuple[Dataset, dict[str, Any]] | None":
    """What is in the cache, or None if nothing is, or not what was written."""
    import datasets

    try:
        entry = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        if _checksum(folder / ROWS) != entry["crc32"]:
            raise ValueError("the rows are not those that were written")
        return datasets.Dataset.from_file(str(folder / ROWS)), entry["counts"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged (%s): making it again", folder, error)
        return None


def _checksum(path: Path) -> int:
    """CRC-32 of a file: a gigabyte or two a second, less than the first epoch's reading."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def write_rows(rows: Iterable[Mapping[str, Any]], features: "Mapping[str, Any]", path: Path) -> "Dataset":
    """Writes rows to an Arrow file as they come, and opens it memory-mapped."""
    import datasets
    from datasets.arrow_writer import ArrowWriter
    from tqdm import tqdm

    bar = tqdm(rows, desc=path.parent.name.partition("-")[0], unit=" rows", disable=None, leave=False)
    with ArrowWriter(path=str(path), features=datasets.Features(features)) as writer:
        for row in bar:
            writer.write(row)
        writer.finalize()
    return datasets.Dataset.from_file(str(path))


def rows_fingerprint(made_with: Mapping[str, Any], sources: Sequence[Source]) -> str:
    """Names the rows: by what they are made with, and what the sources are (files: path, size and time of change)."""
    digest = hashlib.sha256(json.dumps(made_with, default=str).encode())
    for source in sources:
        # By what is held out, not by where it is written: the next run's folder is another one.
        held_out = read_held_out(source.held_out) if source.held_out else None
        said = asdict(replace(source, rows=None)) | ({"held_out": held_out} if held_out else {})
        del said["rows"]
        digest.update(json.dumps(said).encode())
        digest.update(source.rows._fingerprint.encode() if source.rows is not None else b"")
        for file in _local_files(source):
            status = file.stat()
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def cache_folder(cache_dir: str | Path | None) -> Path:
    """The folder that rows are kept in, made if it is missing: `revela_hub` in the cache of `datasets`, or in `cache_dir`.

    Raises:
        UserError: It cannot be made.
    """
    import datasets

    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE).expanduser() / "revela_hub"
    try:
        claim(folder, "cache_dir", known=lambda _: True)
    except OSError as error:
        raise UserError(
            f"cannot write to the cache folder {folder}: {error.strerror}", cache_dir="give another --cache_dir"
        ) from error
    return folder


def _local_files(source: Source) -> Iterator[Path]:
    """The files on this machine that the source's documents come from."""
    if source.rows is not None:
        return
    if not source.is_dataset:
        yield from source_files(source, ReadReport())
        return
    folder = source.path.removeprefix(HUB_PREFIX)
    data_files = source.data_files or ()
    for path in [folder, *([data_files] if isinstance(data_files, str) else data_files)]:
        if "://" not in path and not path.startswith("~") and Path(path).exists():
            yield from source_files(Source(path=path), ReadReport())
