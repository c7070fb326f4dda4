"""A cache of rows made from documents: Arrow files that are reused by later runs with the same settings and sources.

The file name is a hash of the settings and the sources (for files: path, size and modification time). A data set of the Hub
is identified by its name and revision: to follow its changes, set a revision or use another cache folder.

Text is cut into parts of 64 million characters, at the ends of documents, each of which becomes one file. Several processes may make
them: the rows do not depend on their number. A run that was killed reads the text again, but only makes the parts that are missing.

One process of a machine makes the rows of a name. The others wait at a file lock, in no collective of `torch.distributed`, which
would end after `--ddp_timeout`.
"""

import hashlib
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from revela_hub.data.sources.converted import SUFFIXES, converter_version
from revela_hub.data.sources.documents import read_documents, read_held_out
from revela_hub.data.sources.files import local_files
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document, Source, SourceLike, parse_sources
from revela_hub.errors import UserError
from revela_hub.files import claim, local_path, one_at_a_time, write_text
from revela_hub.internals import fingerprint

if TYPE_CHECKING:
    from datasets import Dataset, Features, IterableDataset

FORMAT = 15  # increase it when the same settings and sources produce different rows
PART_CHARACTERS = 1 << 26

Types: TypeAlias = Mapping[str, str | list[str]]
"""The columns and their types: `{"row": "int64", "texts": ["string"]}`, where `texts` is a list."""
Row: TypeAlias = Mapping[str, Any]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class RowMaker:
    """How documents become rows.

    Attributes:
        kind: The name of the rows.
        types: The columns. If the first one holds integers, it is the number of the row, which `rows` leaves out.
        made_with: Everything that the rows depend on besides the sources.
        rows: Makes the rows of the documents of a part, and counts; it can be pickled.
        few: The error if there are fewer rows than `least`.
        max_rows: Stop after this many rows.
    """

    kind: str
    types: Types
    made_with: Mapping[str, Any]
    rows: Callable[[Iterable[Document], ReadReport], Iterator[Row]]
    few: str
    least: int = 1
    max_rows: int | None = None

    def numbered(self, documents: Iterable[Document], report: ReadReport, first: int = 0) -> Iterator[dict[str, Any]]:
        """Make rows, the first of which has this number."""
        column, kind = next(iter(self.types.items()))
        for number, row in enumerate(islice(self.rows(documents, report), self.max_rows), start=first):
            yield {column: number, **row} if kind == "int64" else dict(row)

    def check(self, count: int, report: ReadReport) -> None:
        """Raise a `UserError` for too few rows."""
        if count < self.least:
            raise UserError(f"{self.few} (read: {report})")


def document_rows(
    maker: RowMaker,
    sources: Iterable[SourceLike] | SourceLike,
    *,
    cache_dir: str | Path | None = None,
    report: ReadReport | None = None,
    streaming: bool = False,
    num_proc: int = 1,
) -> "Dataset | IterableDataset":
    """Return the rows of the sources' documents, from the cache if possible, else made by `num_proc` processes.

    The counts are added to the report, for cached rows those of the run that wrote them. With `streaming`, the rows are made while the
    data set is read, without the cache and without counts.
    """
    import datasets

    parsed, counts = parse_sources(sources), ReadReport()
    documents = read_documents(parsed, report=counts)  # a missing folder is an error even if it is cached

    def streamed() -> Iterator[dict[str, Any]]:
        unread, made = ReadReport(), 0
        for row in maker.numbered(read_documents(parsed, report=unread), unread):
            yield {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
            made += 1
        maker.check(made, unread)

    if streaming:
        return datasets.IterableDataset.from_generator(streamed, features=features(maker.types))
    name = f"{maker.kind}-{rows_fingerprint({'max_rows': maker.max_rows, **maker.made_with}, parsed)}"
    whole, make = cached_file(name, cache_dir), partial(_make_part, maker, name, cache_dir)
    limit, made = maker.max_rows or sys.maxsize, 0
    with one_at_a_time(whole):
        if not whole.is_file():
            found = in_order(make, enumerate(_parts(documents, lazy=num_proc == 1)), num_proc)
            for number, (part, of_part) in enumerate(found, start=1):
                counts.add(ReadReport(**of_part))
                made += len(part)
                if made >= limit:
                    break
                if number > 1:
                    sys.stderr.write(f"{maker.kind}: {made:,} rows of {counts.documents:,} documents\n")
            maker.check(made, counts)
            write_text(whole, json.dumps([number, vars(counts)]))
    number, values = json.loads(whole.read_text(encoding="utf-8"))

    def lost() -> Document:
        whole.unlink(missing_ok=True)
        raise UserError(f"{whole.parent}: a part of the prepared rows was deleted; the same command makes it again")

    rows = datasets.concatenate_datasets([make((part, iter(lost, None)))[0] for part in range(number)])
    if report is not None:
        report.add(ReadReport(**values))
    return rows if len(rows) <= limit else rows.select(range(limit))


def _parts(documents: Iterator[Document], *, lazy: bool) -> Iterator[Iterable[Document]]:
    """Yield parts of the text: lists, or iterators that have to be used one after another."""

    def part(first: Document) -> Iterator[Document]:
        characters = 0
        for document in chain([first], documents):
            yield document
            characters += len(document.text)
            if characters >= PART_CHARACTERS:
                return

    for first in documents:
        yield (found := part(first) if lazy else list(part(first)))
        deque(found, maxlen=0)  # what the reader of an iterator left, such as all of a part that is cached


def _make_part(
    maker: RowMaker, name: str, cache_dir: str | Path | None, part: tuple[int, Iterable[Document]]
) -> "tuple[Dataset, dict[str, Any]]":
    (number, documents), report = part, ReadReport()
    rows = partial(maker.numbered, documents, report, number << 32)
    return cached_rows(f"{name}-{number:05}", maker.types, rows, lambda: vars(report), cache_dir)


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], processes: int, ahead: int | None = None
) -> Iterator[Result]:
    """Yield the results of the items in their order, from several processes; few items (`ahead`) wait in memory."""
    if processes == 1:
        yield from map(work, items)
        return
    pending: deque[Future[Result]] = deque()
    with ProcessPoolExecutor(processes, initializer=_start_worker) as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > (ahead or processes):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)  # without waiting, Python may never end after an error


def _start_worker() -> None:
    """Use one thread for tokenizers and no progress bars, and end with the main process, also if that is killed."""
    import datasets

    datasets.disable_progress_bars()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main: Any = parent_process()
    threading.Thread(target=lambda: (main.join(), os._exit(1)), daemon=True).start()


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

    report, kinds = cached_file(name, cache_dir), features(types)

    def made() -> Iterator[Row]:
        yield from rows()
        write_text(report, json.dumps(dict(counts())))

    try:
        with one_at_a_time(report):
            dataset = datasets.Dataset.from_generator(
                made, features=kinds, cache_dir=str(report.parent), fingerprint=name
            )
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None
    except ValueError as error:
        if "corresponds to no data" not in str(error):
            raise
        dataset = datasets.Dataset.from_dict({column: [] for column in types}, kinds)  # it opens no split without rows
    return dataset, json.loads(report.read_text(encoding="utf-8"))


def cached_file(name: str, cache_dir: str | Path | None = None) -> Path:
    """Return the JSON file of a cache entry; its folder, by default in the cache of `datasets`, is created."""
    import datasets

    return claim(local_path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "revela_hub") / f"{name}.json"


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
