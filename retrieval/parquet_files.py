"""Passages with their vectors in parquet files, which `datasets`, LanceDB and Qdrant read.

One row per passage: `id` (its number), `text`, `vector` (a list of fixed size, float32), `document`, `path`,
`start_line`, `end_line`. Memory holds one row group.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from revela_hub.errors import UserError
from revela_hub.retrieval.passages import PASSAGE, Passages
from revela_hub.retrieval.stored_vectors import Vectors
from revela_hub.whole_files import whole_file

ROWS = 8192
"""Passages per row group, which are in memory together."""
FILE_BYTES = 1 << 28
"""Bytes of text and vectors from which a new file is started."""
_SHARD = re.compile(r"passages-(\d{5})-of-(\d{5})-\d{5}\.parquet")
_SOURCE = b"revela_hub.source"


class WrittenFile(NamedTuple):
    """A parquet file and the number of its rows."""

    path: Path
    rows: int


def write_groups(
    groups: Iterable[pa.RecordBatch], path: Callable[[int], Path], option: str, max_bytes: int
) -> list[WrittenFile]:
    """Write row groups to parquet files named by their number, and return these; from `max_bytes` on a new one is started.

    The files get their names at the end: after an error or Ctrl-C, earlier files with these names are unchanged.
    """
    files: list[WrittenFile] = []
    source = iter(groups)
    with ExitStack() as stack:
        while (group := next(source, None)) is not None:
            place, rows, size = path(len(files)), 0, 0
            compression = {name: "none" if name == "vector" else "zstd" for name in group.schema.names}
            options: dict[str, Any] = {"compression": compression, "use_dictionary": ["document", "path"]}
            stream = stack.enter_context(whole_file(place, option))
            with stream, pq.ParquetWriter(stream, group.schema, **options) as writer:
                while group is not None:
                    writer.write_batch(group)
                    rows, size = rows + len(group), size + group.nbytes
                    group = next(source, None) if size < max_bytes else None
            files.append(WrittenFile(place, rows))
    return files


def check_parquet_folder(folder: Path, num_shards: int) -> None:
    """Check before long work whether `write_passages_as_parquet` can write passages to a folder."""
    for file in sorted(folder.glob("*.parquet")):
        found = _SHARD.fullmatch(file.name)
        if found is None or int(found[2]) != num_shards:
            raise UserError(
                f"--parquet_dir {folder} holds {file.name}, which is not one of {num_shards} shards: delete it, or choose another"
                " folder"
            )


def check_other_shards(folder: Path, source: str, shard: int, num_shards: int) -> None:
    """Check before long work that the files of the other shards have the same source as `write_passages_as_parquet` gets."""
    for file in sorted(folder.glob("*.parquet")):
        other = int(_SHARD.fullmatch(file.name)[1])  # type: ignore[index]  # after `check_parquet_folder`
        if other != shard and (pq.read_schema(file).metadata or {}).get(_SOURCE) != source.encode():
            raise UserError(
                f"{file} was written from another version of the corpus, or with another model, --max_length or --document_prompt:"
                f" delete it, and encode it again with --shard {other}/{num_shards}"
            )


def write_passages_as_parquet(
    passages: Passages,
    vectors: Vectors,
    folder: Path,
    *,
    source: str,
    start: int = 0,
    shard: int = 0,
    num_shards: int = 1,
) -> list[WrittenFile]:
    """Write passages and their vectors as the model returns them to `passages-<shard>-of-<shards>-<number>.parquet`.

    Files of the same shard are replaced at the end. The vectors are those of its passages, which start at `start`. `source` changes
    with the passages of all shards and with the model, and is kept in the files.
    """
    check_parquet_folder(folder, num_shards)
    check_other_shards(folder, source, shard, num_shards)
    fields = [
        ("id", pa.int64()),
        ("text", pa.string()),
        *[(field.name, field.type) for field in list(PASSAGE)[1:]],
    ]
    names = [name for name, _ in fields] + ["vector"]
    vectors = replace(vectors, normalize=False)

    def groups() -> Iterator[pa.RecordBatch]:
        for first in range(0, len(vectors), ROWS):
            last = min(first + ROWS, len(vectors))
            rows = range(start + first, start + last)
            texts = passages.texts
            lines = [texts.lines_of(row)[0] for row in rows]
            columns: dict[str, Any] = {name: texts.column(name, lines) for name in PASSAGE.names} | {"id": rows}
            arrays = [pa.array(columns[name], kind) for name, kind in fields]
            vectors_RD = vectors.read(first, last)
            arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(vectors_RD.reshape(-1)), vectors_RD.shape[1]))
            yield pa.RecordBatch.from_arrays(arrays, names).replace_schema_metadata({_SOURCE: source})

    prefix = f"passages-{shard:05}-of-{num_shards:05}-"
    earlier = {*folder.glob(f"{prefix}*.parquet")}
    written = write_groups(
        groups(), lambda number: folder / f"{prefix}{number:05}.parquet", "--parquet_dir", FILE_BYTES
    )
    for file in sorted(earlier - {file.path for file in written}):
        file.unlink()
    return written
