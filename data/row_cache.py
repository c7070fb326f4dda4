"""A cache of rows made from documents: an Arrow file that is reused by later runs with the same settings and sources.

The file name is a hash of the settings and the sources (for files: path, size and modification time). A data set of the Hub
is identified by its name and revision: to follow its changes, set a revision or use another cache folder.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela_hub.data.sources.converted import SUFFIXES, converter_version
from revela_hub.data.sources.documents import read_documents, read_held_out
from revela_hub.data.sources.files import local_files
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document, Source, SourceLike, parse_sources
from revela_hub.files import claim, local_path, write_text
from revela_hub.internals import fingerprint

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

FORMAT = 11  # increase it when the same settings and sources produce different rows


def document_rows(
    kind: str,
    sources: Iterable[SourceLike] | SourceLike,
    features: "Mapping[str, Any]",
    made_with: Mapping[str, Any],
    rows: Callable[[Iterator[Document], ReadReport], Iterator[Mapping[str, Any]]],
    cache_dir: str | Path | None,
    report: ReadReport | None,
    *,
    streaming: bool = False,
) -> "Dataset | IterableDataset":
    """Return the rows that `rows` makes of the sources' documents, from the cache entry of a kind if possible.

    `made_with` is everything that the rows depend on besides the sources. With `streaming`, the rows are made while the data set
    is read, without the cache and without counts.
    """
    import datasets

    parsed, fresh = parse_sources(sources), ReadReport()
    documents = read_documents(parsed, report=fresh)  # first, so that a missing folder is an error even if it is cached

    def streamed() -> Iterator[dict[str, Any]]:
        unread = ReadReport()
        for row in rows(read_documents(parsed, report=unread), unread):
            yield {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}

    if streaming:
        return datasets.IterableDataset.from_generator(streamed, features=datasets.Features(features))
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
    """Return the rows and counts of a cache entry, or make and write them.

    Args:
        name: The name of the cache entry, with its fingerprint.
        features: The features of the data set, which is memory-mapped.
        rows: Makes the rows; called only if they are not cached.
        counts: Returns values to store with the rows, as JSON; called after the last row.
        cache_dir: The cache folder; default: the cache of `datasets`.
    """
    import datasets

    folder = cache_folder(cache_dir)
    report = folder / f"{name}.json"

    def made() -> Iterator[Mapping[str, Any]]:
        yield from rows()
        write_text(report, json.dumps(dict(counts())))

    try:  # waits for other processes of this machine that write the same entry
        dataset = datasets.Dataset.from_generator(
            made, features=datasets.Features(features), cache_dir=str(folder), fingerprint=name
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None
    except ValueError as error:
        if "corresponds to no data" not in str(error):
            raise
        empty: dict[str, list[Any]] = {column: [] for column in features}  # datasets opens no split without rows
        dataset = datasets.Dataset.from_dict(empty, features=datasets.Features(features))
    return dataset, json.loads(report.read_text(encoding="utf-8"))


def write_rows(rows: Iterable[Mapping[str, Any]], features: "Mapping[str, Any] | None", path: Path) -> "Dataset":
    """Write rows to an Arrow file one by one, and open it memory-mapped; without features, the first rows determine them."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    with ArrowWriter(path=str(path), features=datasets.Features(features) if features else None) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    return datasets.Dataset.from_file(str(path))


def rows_fingerprint(made_with: Mapping[str, Any], sources: Sequence[Source]) -> str:
    """Return a hash of the settings and the sources (files: path, size and modification time)."""
    digest = hashlib.sha256(json.dumps([FORMAT, made_with], default=str).encode())
    for source in sources:
        # The content of held_out, not its path, which differs between runs.
        held_out = read_held_out(source.held_out) if source.held_out else None
        values = asdict(replace(source, rows=None)) | ({"held_out": held_out} if held_out else {})
        del values["rows"]
        digest.update(json.dumps(values).encode())
        digest.update(fingerprint(source.rows).encode() if source.rows is not None else b"")
        for file in local_files(source):
            status = file.stat()
            converter = f"\0{converter_version()}" if file.suffix.lower() in SUFFIXES else ""
            digest.update(os.fsencode(f"{file}\0{status.st_size}\0{status.st_mtime_ns}{converter}\n"))
    return digest.hexdigest()[:32]


def cache_folder(cache_dir: str | Path | None) -> Path:
    """Return the cache folder, created if needed: `revela_hub` in the cache of `datasets`, or in `cache_dir`."""
    import datasets

    return claim(local_path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "revela_hub")
