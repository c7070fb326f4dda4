"""An index in a data set repository on the Hub: parquet files that `datasets` reads, too.

    index.json                    the metadata of `retrieval.store`, with the rows and the SHA-256 of each parquet file
    canary-<hash>.json            16 passages with their vectors (`retrieval.canary`)
    data/passages-00000.parquet   id, text, vector, document, path, start_line, end_line, copies
    README.md                     the card

To search it, the files are downloaded and turned into a local index once, row group by row group. Paths of this machine and
addresses of servers are not published.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.utils.sha import sha_fileobj
from numpy.typing import NDArray

from revela_hub.data.sources.report import counted
from revela_hub.data.sources.source import HUB_PREFIX
from revela_hub.data.text.chunks import Chunk
from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.hub_cards.metadata import _check_types as check_types
from revela_hub.output import note
from revela_hub.retrieval.canary import Canary
from revela_hub.retrieval.disk import claim_folder, default_cache_folder, key_of
from revela_hub.retrieval.encoder import SERVED_PREFIX
from revela_hub.retrieval.index_metadata import METADATA, IndexMetadata, read_metadata
from revela_hub.retrieval.parquet_files import FILE_BYTES, ROWS, write_groups
from revela_hub.retrieval.passages import PASSAGE, write_passages
from revela_hub.retrieval.store import PassageStore
from revela_hub.retrieval.vectors import VectorStore
from revela_hub.whole_files import write_text

_PLACE = pa.struct([(name, PASSAGE.field(name).type) for name in PASSAGE.names[1:]])
_FAULTS = (OSError, ValueError, KeyError, TypeError, pa.ArrowException)


def write_files(
    store: PassageStore, folder: Path, corpus: Sequence[str]
) -> tuple[IndexMetadata, dict[str, dict[str, Any]]]:
    """Write the files of an index, all but the card, to an empty folder; return the same as `read_index`.

    `corpus` are the paths that the passages were read from; they are shortened to their last part.

    Raises:
        UserError: The disk is full.
    """
    (folder / "data").mkdir(parents=True)
    half = store.metadata.options.dtype == "float16"
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("text", pa.large_string()),
            ("vector", pa.list_(pa.float16() if half else pa.float32())),
            *[(field.name, field.type) for field in _PLACE],
            ("copies", pa.list_(_PLACE)),
        ]
    )
    public = public_names(corpus)
    groups = (
        _rows(store, start, min(start + ROWS, len(store)), schema, public) for start in range(0, len(store), ROWS)
    )
    written = write_groups(
        groups, lambda number: folder / f"data/passages-{number:05}.parquet", "--output_dir", FILE_BYTES
    )
    files = {f"data/{path.name}": {"rows": rows, "sha256": sha256(path)} for path, rows in written}
    metadata = replace(public_metadata(store.metadata), canary=store.canary().write(folder))
    values = json.loads(metadata.to_json()) | {"files": files}
    (folder / METADATA).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return metadata, files


def _rows(
    store: PassageStore, start: int, stop: int, schema: pa.Schema, public: Callable[[str | None], str | None]
) -> pa.RecordBatch:
    texts = store.passages.texts
    lines = [texts.lines_of(row) for row in range(start, stop)]
    first = [each[0] for each in lines]
    columns: dict[str, Any] = {name: texts.column(name, first) for name in PASSAGE.names}
    columns |= {name: [public(value) for value in columns[name]] for name in ("document", "path")}
    vectors_ND = replace(store.vectors, normalize=False).read(start, stop).astype(store.metadata.options.dtype)
    offsets = np.arange(0, vectors_ND.size + 1, vectors_ND.shape[1], dtype=np.int32)
    columns["id"] = np.arange(start, stop)
    columns["vector"] = pa.ListArray.from_arrays(offsets, pa.array(vectors_ND.reshape(-1)))
    columns["copies"] = [_copies(texts, each[1:], public) for each in lines]
    return pa.RecordBatch.from_arrays([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def _copies(texts: Any, lines: list[int], public: Callable[[str | None], str | None]) -> list[dict[str, Any]]:
    places = {name: texts.column(name, lines) for name in PASSAGE.names[1:]} if lines else {}
    for name in places and ("document", "path"):
        places[name] = [public(value) for value in places[name]]
    return [dict(zip(places, values, strict=True)) for values in zip(*places.values(), strict=True)]


def public_names(corpus: Sequence[str]) -> Callable[[str | None], str | None]:
    """Return a function that shortens paths of this machine: `/home/me/docs/a.md` of the corpus `/home/me/docs` is `docs/a.md`.

    >>> name = public_names(["/home/me/docs", "wiki.jsonl"])
    >>> name("/home/me/docs/part/a.md"), name("wiki.jsonl:3"), name("../b.md"), name("Q42"), name(None)
    ('docs/part/a.md', 'wiki.jsonl:3', 'b.md', 'Q42', None)
    """
    given = [str(Path(path)) for path in corpus if not path.startswith(HUB_PREFIX)]
    roots = sorted({*given, *(str(local_path(path)) for path in given)}, key=len, reverse=True)

    def public(value: str | None) -> str | None:
        for root in roots if value is not None else ():
            if value == root or (value or "").startswith((f"{root}/", f"{root}:")):
                return f"{Path(root).name}{(value or '')[len(root) :]}".lstrip("/")
        if value is None or not (value.startswith("..") or os.path.isabs(value)):
            return value
        local = value.startswith("..") or os.path.exists(re.sub(r":\d+$", "", value))
        return value.rpartition("/")[2] if local else value

    return public


def public_metadata(metadata: IndexMetadata) -> IndexMetadata:
    """Return the metadata without paths of this machine and addresses of servers; a Milvus index becomes an exact one."""
    options = metadata.options
    if options.type == "milvus":
        options = replace(options, type="exact", milvus_uri=None)
    server = metadata.endpoint and re.sub(r" at [^\s,]+", "", metadata.endpoint)
    path = local_path(metadata.model)
    local = path.is_dir() or path.is_absolute() or metadata.model.startswith((".", "~"))
    model, served, named = metadata.fingerprint.partition(SERVED_PREFIX)
    return replace(
        metadata,
        model=path.resolve().name if local else metadata.model,
        fingerprint=model + served + _last_parts(named),
        options=options,
        endpoint=server and _last_parts(server),
    )


def _last_parts(text: str) -> str:
    """Replace absolute paths by their last part."""
    return re.sub(r"(?<![\w./])/(?:[^\s/,:]+/)*([^\s/,:]+)", r"\1", text)


def open_downloaded(snapshot: Path, name: str) -> Path:
    """Return the folder of a local index made of a repository's snapshot, which is named after the commit; makes it once.

    Raises:
        UserError: A file is missing or damaged; the disk is full.
    """
    folder = default_cache_folder("indexes") / key_of(name, snapshot.name)
    with contextlib.suppress(UserError):  # not made yet, or damaged
        read_metadata(folder)
        return folder
    metadata, files = read_index(snapshot, name)
    for file, known in files.items():
        if not (snapshot / file).is_file() or sha256(snapshot / file) != known["sha256"]:
            raise _damaged(name, file, "its SHA-256 differs from index.json's")
    try:
        canary = Canary.read(snapshot, metadata.canary)
    except UserError as error:
        raise _damaged(name, f"canary-{metadata.canary}.json", "it is missing, or has other content") from error
    note(f"making a local index of {counted(metadata.passages, 'passage')}, once, in {claim_folder(folder)}")
    passages = write_passages(_chunks(snapshot, files, name), folder)
    if len(passages) != metadata.passages:
        raise _damaged(name, METADATA, f"it names {metadata.passages:,} passages, but there are {len(passages):,}")
    options = metadata.options
    store = VectorStore(folder, metadata.store_name, dtype=options.dtype)
    store.fill(passages.texts, _reader(snapshot, files, name, metadata.dimension))
    how: dict[str, Any] = {"normalize": metadata.similarity == "cosine", "truncate_dim": options.truncate_dim}
    store.vectors(passages.texts, **how).write_layout(passages.texts.fingerprint)
    canary.write(folder)
    write_text(folder / METADATA, replace(metadata, texts=passages.texts.fingerprint).to_json())
    return folder


def sha256(file: Path) -> str:
    """Return the hash of a file."""
    with file.open("rb") as stream:
        return sha_fileobj(stream).hex()


def read_index(snapshot: Path, name: str) -> tuple[IndexMetadata, dict[str, dict[str, Any]]]:
    """Read `index.json` of a repository: the published metadata, and parquet file -> rows and SHA-256.

    Raises:
        UserError: It is damaged.
    """
    try:
        values = json.loads((snapshot / METADATA).read_text(encoding="utf-8"))
        files = {
            str(file): {"rows": int(e["rows"]), "sha256": str(e["sha256"])} for file, e in values.pop("files").items()
        }
        if not files or not all(re.fullmatch(r"data/passages-\d+\.parquet", file) for file in files):
            raise ValueError("unexpected names of files")
        return _checked(IndexMetadata.from_json(json.dumps(values))), files
    except (*_FAULTS, AttributeError, UserError) as error:
        raise _damaged(name, METADATA, error) from error


def _checked(metadata: IndexMetadata) -> IndexMetadata:
    """Return the metadata if it can be that of a published index: it must not choose a server, to which a token would be sent."""
    check_types(metadata)
    check_types(metadata.options)
    if metadata.options.type == "milvus":
        raise ValueError("a published index is not stored in Milvus")
    if metadata.similarity not in ("cosine", "dot"):
        raise ValueError(f"unknown similarity {metadata.similarity!r}")
    if not re.fullmatch(r"[0-9a-f]{32}", metadata.canary):
        raise ValueError("unexpected name of the canary")
    return metadata


def _chunks(snapshot: Path, files: Mapping[str, Any], name: str) -> Iterator[Chunk]:
    for group in _groups(snapshot, files, name, [*PASSAGE.names, "copies"]):
        for row in group.to_pylist():
            text, copies = row.pop("text"), row.pop("copies") or ()
            for place in (row, *copies):
                yield Chunk(text=text, **place)


def _reader(
    snapshot: Path, files: Mapping[str, Any], name: str, dimension: int
) -> Callable[[list[str], Callable[[int], object]], NDArray[np.float32]]:
    """Return a function that looks up the vectors of texts, which have to come in the order of the files."""

    def rows() -> Iterator[tuple[str, NDArray[np.float32]]]:
        for group in _groups(snapshot, files, name, ["text", "vector"]):
            column = group.column("vector")
            flat = column.flatten().to_numpy(zero_copy_only=False)
            if len(flat) != len(group) * dimension or not np.isfinite(flat).all():
                raise _damaged(name, "data", f"its vectors are not {dimension} finite numbers each")
            yield from zip(group.column("text").to_pylist(), flat.reshape(-1, dimension), strict=True)

    source = rows()

    def read(texts: list[str], progress: Callable[[int], object]) -> NDArray[np.float32]:
        found = [next(vector for text, vector in source if text == wanted) for wanted in texts]
        progress(len(texts))
        return np.array(found, dtype=np.float32)

    return read


def _groups(snapshot: Path, files: Mapping[str, Any], name: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
    for file, known in files.items():
        try:
            with pq.ParquetFile(snapshot / file) as parquet:
                if parquet.metadata.num_rows != known["rows"]:
                    raise ValueError(f"it has {parquet.metadata.num_rows:,} rows, not {known['rows']:,}")
                yield from parquet.iter_batches(ROWS, columns=columns)
        except _FAULTS as error:
            raise _damaged(name, file, error) from error


def _damaged(name: str, file: str, error: object) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(f"{name}: {file} is damaged ({reason}): download it again, or push the index again")
