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
from typing import TYPE_CHECKING, Any, TypeAlias

from revela_hub.data.sources.converted import SUFFIXES, converter_version
from revela_hub.data.sources.documents import read_documents, read_held_out
from revela_hub.data.sources.files import local_files
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document, Source, SourceLike, parse_sources
from revela_hub.files import claim, local_path, write_text
from revela_hub.internals import fingerprint

if TYPE_CHECKING:
    from datasets import Dataset, Features, IterableDataset

FORMAT = 14  # increase it when the same settings and sources produce different rows

Types: TypeAlias = Mapping[str, str | list[str]]
"""The columns and their types: `{"row": "int64", "texts": ["string"]}`, where `texts` is a list."""
Row: TypeAlias = Mapping[str, Any]


def document_rows(
    kind: str,
    sources: Iterable[SourceLike] | SourceLike,
    types: Types,
    made_with: Mapping[str, Any],
    rows: Callable[[Iterator[Document], ReadReport], Iterator[Row]],
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
        return datasets.IterableDataset.from_generator(streamed, features=features(types))
    name = f"{kind}-{rows_fingerprint(made_with, parsed)}"
    dataset, counts = cached_rows(name, types, lambda: rows(documents, fresh), lambda: vars(fresh), cache_dir)
    if report is not None:
        report.add(ReadReport(**counts))
    return dataset


def cached_rows(
    name: str,
    types: Types,
    rows: Callable[[], Iterator[Row]],
    counts: Callable[[], Mapping[str, Any]] = dict,
    cache_dir: str | Path | None = None,
) -> "tuple[Dataset, dict[str, Any]]":
    """Return the rows, memory-mapped, and the counts of the cache entry of this name, which contains a fingerprint; or make them.

    `counts` is called after the last row; its values are stored as JSON. The default folder is the cache of `datasets`.
    """
    import datasets

    folder = claim(local_path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "revela_hub")
    report, kinds = folder / f"{name}.json", features(types)

    def made() -> Iterator[Row]:
        yield from rows()
        write_text(report, json.dumps(dict(counts())))

    try:  # waits for other processes of this machine that write the same entry
        dataset = datasets.Dataset.from_generator(made, features=kinds, cache_dir=str(folder), fingerprint=name)
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None
    except ValueError as error:
        if "corresponds to no data" not in str(error):
            raise
        dataset = datasets.Dataset.from_dict({column: [] for column in types}, kinds)  # it opens no split without rows
    return dataset, json.loads(report.read_text(encoding="utf-8"))


def features(types: Types) -> "Features":
    """Return the features of a data set with these columns."""
    from datasets import Features, List, Value

    values = {name: List(Value(kind[0])) if isinstance(kind, list) else Value(kind) for name, kind in types.items()}
    return Features(values)


def rows_fingerprint(made_with: Mapping[str, Any], sources: Sequence[Source]) -> str:
    """Return a hash of the settings and the sources (files: path, size and modification time)."""
    digest = hashlib.sha256(json.dumps([FORMAT, made_with], default=str).encode())
    for source in sources:
        values = asdict(replace(source, rows=None))
        if source.held_out:  # its content, not its path, which differs between runs
            values["held_out"] = read_held_out(source.held_out)
        digest.update(json.dumps(values).encode())
        digest.update(fingerprint(source.rows).encode() if source.rows is not None else b"")
        for file in local_files(source):
            status = file.stat()
            converter = converter_version() if file.suffix.lower() in SUFFIXES else ""
            digest.update(os.fsencode(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0{converter}\n"))
    return digest.hexdigest()[:32]
