"""Combining chunks into groups, the training rows of in-batch attention (arXiv 2506.16552).

A row is a whole group, so shuffling, gradient accumulation and several GPUs never split one. Chunks are in the order of the
documents (d11, d12, ..., d1m, d21, ...), and a group consists of `group_size` consecutive chunks. In a small corpus of long
documents, each group would contain one document only; with `run_length`, a group is built from shorter runs of consecutive
chunks drawn from a shuffle buffer, and so mixes documents.

The rows are cached for later runs with the same settings and sources, see `revela_hub.data.row_cache`.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revela_hub.data.row_cache import RowMaker, Types, cached_rows, document_rows, features, rows_fingerprint
from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.rows import read_rows
from revela_hub.data.sources.source import Document, Source, SourceLike
from revela_hub.data.text.chunks import Chunk, chunk_document
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


SHUFFLE_BUFFER_RUNS = 16_384
"""Runs held in memory when `run_length` is given: about 45 MB for runs of four chunks."""


@dataclass(frozen=True)
class GroupSettings:
    """The settings of chunks and groups.

    Attributes:
        group_size: Chunks per group.
        run_length: Consecutive chunks per run, from which groups are built; must divide `group_size`. None: the whole group.
        max_words: Maximum number of words in a chunk.
        language: ISO 639-1 code, for sentence segmentation.
        max_groups: Stop after this many groups.
        seed: The seed for the order of runs.
    """

    group_size: int = 16
    run_length: int | None = None
    max_words: int = 120
    language: str = "en"
    max_groups: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises UserError for invalid settings."""
        if self.group_size < 2:
            raise UserError(f"group_size is {self.group_size}; a group needs at least 2 chunks")
        if self.run_length is not None and (self.run_length < 1 or self.group_size % self.run_length):
            raise UserError(f"run_length is {self.run_length}; it must divide group_size ({self.group_size})")


COLUMNS: Types = {"group": "int64", "document": ["string"], "text": ["string"]}


def build_groups(
    sources: Iterable[SourceLike] | SourceLike,
    settings: GroupSettings | None = None,
    **options: Any,
) -> "Dataset | IterableDataset":
    """Build groups from the sources' documents, or read them from the cache.

    Args:
        sources: As for `read_documents`; together they form one stream of documents.
        settings: The settings of chunks and groups; default: those of the paper.
        **options: `cache_dir` (default: the cache of `datasets`), `report` (its counts are updated),
            `streaming` (return an `IterableDataset`, whose rows are made while they are read and not cached) and `num_proc` (processes
            that make the rows, which do not depend on their number).

    Returns:
        A data set with one row per group: `group` (int64, its number), `document` and `text` (lists of `group_size`
        strings: the id of each chunk's document, and the chunk). The last group may be incomplete, as that of every 64 million
        characters: it is padded with `""`, which the collator turns into absent rows. A single leftover chunk has nothing to attend to
        and is dropped.

    Raises:
        UserError: As `read_documents`; fewer than two chunks in total.
    """
    settings = settings or GroupSettings()
    if settings.run_length in (None, settings.group_size):
        settings = replace(settings, run_length=None, seed=0)  # nothing is drawn
    made_with = {"sentencex": version("sentencex")} | asdict(settings)
    few = "training needs at least 2 chunks of text: add more text"
    maker = RowMaker("groups", COLUMNS, made_with, partial(_rows, settings), few, max_rows=settings.max_groups)
    return document_rows(maker, sources, **options)


def stored_groups(
    sources: Sequence[Source],
    column: str,
    group_size: int,
    *,
    cache_dir: str | Path | None = None,
    streaming: bool = False,
) -> "Dataset | IterableDataset":
    """Read groups that were made before, such as the corpora of Revela's authors: the texts in a list in a column of each row.

    Longer groups are cut to `group_size`, shorter ones get absent chunks. Returned are the columns of `build_groups`; all chunks of a
    group have the location of the row as their document, because the rows do not name their documents.
    """
    import datasets

    def groups() -> Iterator[dict[str, Any]]:
        for number, row in enumerate(chain.from_iterable(map(read_rows, sources))):
            if not isinstance(row.value(column), list):
                raise UserError(f"{row.where}: the column {column!r} is not a list of texts")
            texts = row.texts(column)[:group_size]
            absent = [""] * (group_size - len(texts))
            yield {"group": number, "document": [row.where] * len(texts) + absent, "text": texts + absent}

    if streaming:
        return datasets.IterableDataset.from_generator(groups, features=features(COLUMNS))
    name = f"stored-groups-{rows_fingerprint({'column': column, 'size': group_size}, sources)}"
    return cached_rows(name, COLUMNS, groups, cache_dir=cache_dir)[0]


def mix_groups(
    groups: Sequence["Dataset"],
    weights: Sequence[float],
    *,
    seed: int = 0,
) -> "Dataset":
    """Interleave several data sets of groups at random, with probabilities proportional to their weights.

    Args:
        groups: The data sets.
        weights: One positive number per data set; they need not sum to 1.
        seed: The seed of the draws.

    Returns:
        A data set with the same columns, which ends when the first data set is used up; `group` is the number of the group
        within its source.
    """
    import datasets

    probabilities = [weight / sum(weights) for weight in weights]
    return datasets.interleave_datasets(list(groups), probabilities=probabilities, seed=seed)


def groups_needed(weight: float, max_groups: int) -> int:
    """Return how many groups of a source with this proportion a mixture of `max_groups` can use at most.

    The number of draws from a source is binomial; this is its mean plus six standard deviations.
    """
    return min(max_groups, math.ceil(max_groups * weight + 6 * math.sqrt(max_groups * weight * (1 - weight)) + 1))


def _chunks(documents: Iterable[Document], settings: GroupSettings, report: ReadReport) -> Iterator[Chunk]:
    for document in documents:
        yield from chunk_document(document, settings.max_words, language=settings.language, report=report)


def _rows(settings: GroupSettings, documents: Iterable[Document], report: ReadReport) -> Iterator[dict[str, Any]]:
    size, chunks = settings.group_size, _chunks(documents, settings, report)
    if settings.run_length is not None:
        chunks = chain.from_iterable(_shuffled_runs(chunks, settings.run_length, settings.seed))
    while True:
        group = list(islice(chunks, size))
        if len(group) < 2:
            report.dropped += len(group)
            return
        absent = size - len(group)
        report.absent += absent
        report.groups += 1
        yield {
            "document": [chunk.document for chunk in group] + [""] * absent,
            "text": [chunk.text for chunk in group] + [""] * absent,
        }


def _shuffled_runs(chunks: Iterator[Chunk], length: int, seed: int) -> Iterator[list[Chunk]]:
    """Yield runs of consecutive chunks, drawn from a buffer at random; an incomplete run comes last."""
    generator = random.Random(seed)
    buffer: list[list[Chunk]] = []
    short: list[Chunk] = []
    while run := list(islice(chunks, length)):
        if len(run) < length:
            short = run
        elif len(buffer) < SHUFFLE_BUFFER_RUNS:
            buffer.append(run)
        else:
            index = generator.randrange(len(buffer))
            yield buffer[index]
            buffer[index] = run
    generator.shuffle(buffer)
    yield from buffer
    if short:
        yield short
