"""Rows made of documents, written to an Arrow file as they come and read back by later runs with the same settings.

The file's name is made from the settings and from what the sources are (for files: path, size and time of change). A data
set of the Hub is what its name and revision say: give a revision, or another cache folder, to follow its changes.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela_hub.data.sources.documents import source_files
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import HUB_PREFIX, Source
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, Features


def cached_rows(
    kind: str,
    fingerprint: str,
    features: "Features",
    rows: Callable[[], Iterator[dict[str, Any]]],
    report: ReadReport,
    *,
    cache_dir: str | Path | None = None,
) -> "tuple[Dataset, ReadReport]":
    """Writes the rows, or takes them from the cache.

    Args:
        kind: What they are, for the name of their folder.
        fingerprint: See `rows_fingerprint`.
        features: Of the data set.
        rows: Makes them; called only if they are not in the cache.
        report: What `rows` counts up.
        cache_dir: Where they are kept; by default in the cache of `datasets`.

    Returns:
        The data set, and the report of the run that wrote it.

    Raises:
        UserError: One that `rows` raised; a folder that cannot be written to.
    """
    from filelock import FileLock

    folder = cache_folder(cache_dir) / f"{kind}-{fingerprint}"
    with FileLock(f"{folder}.lock"):  # one process writes, the others of the machine wait for it
        report_file = folder / "report.json"
        if not report_file.is_file():
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was ended half-way
        dataset = _from_generator(rows, features, folder, fingerprint)
        if report_file.is_file():
            report = ReadReport.from_dict(json.loads(report_file.read_text()))
        else:
            report_file.write_text(json.dumps(report.to_dict()))
    return dataset, report


def rows_fingerprint(made_with: Mapping[str, Any], sources: Sequence[Source]) -> str:
    """Names the rows: by what they are made with (anything JSON can hold), and what the sources are."""
    digest = hashlib.sha256(json.dumps(made_with).encode())
    for source in sources:
        digest.update(json.dumps(asdict(source)).encode())
        update_with_files(digest, _local_files(source))
    return digest.hexdigest()[:32]


def update_with_files(digest: "hashlib._Hash", files: Iterable[Path]) -> None:
    """Adds which files they are, how large, and when they were changed."""
    for file in files:
        status = file.stat()
        digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())


def cache_folder(cache_dir: str | Path | None) -> Path:
    """The folder that rows are kept in, made if it is not there; by default in the cache of `datasets`.

    Raises:
        UserError: It cannot be made.
    """
    import datasets

    folder = Path(cache_dir).expanduser() if cache_dir else Path(datasets.config.HF_DATASETS_CACHE) / "revela_hub"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to the cache folder {folder}: {error.strerror}; give another cache_dir"
        ) from error
    return folder


def _from_generator(
    rows: Callable[[], Iterator[dict[str, Any]]], features: "Features", folder: Path, fingerprint: str
) -> "Dataset":
    import datasets

    try:
        return datasets.Dataset.from_generator(rows, features, cache_dir=str(folder), fingerprint=fingerprint)
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def _local_files(source: Source) -> Iterator[Path]:
    """The files on this machine that the source's documents come from."""
    if not source.is_dataset:
        yield from source_files(source, ReadReport())
        return
    folder = source.path.removeprefix(HUB_PREFIX)
    data_files = source.data_files or ()
    for path in [folder, *([data_files] if isinstance(data_files, str) else data_files)]:
        if "://" not in path and not path.startswith("~") and Path(path).exists():
            yield from source_files(Source(path=path), ReadReport())
