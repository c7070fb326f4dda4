"""Rows of the trainers' data sets: raw text is prepared, labelled pairs are checked, streams are repeated."""

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from datasets import Dataset, IterableDataset

from revela_hub.data.sources.source import HUB_PREFIX, Source
from revela_hub.errors import UserError
from revela_hub.trainers.base.arguments import RunArguments

NEGATIVE = re.compile(r"negative(_[0-9]+)?")


def prepare_datasets(given: dict[str, Any], prepare: Callable[[Any], Any]) -> None:
    """Prepare the `train_dataset` and the `eval_dataset` (or each of a dict of them) in the arguments of a trainer."""
    given["train_dataset"] = prepare(given.get("train_dataset"))
    if (rows := given.get("eval_dataset")) is not None:
        several = isinstance(rows, dict)
        given["eval_dataset"] = {name: prepare(part) for name, part in rows.items()} if several else prepare(rows)


def prepared_rows(
    rows: Any, columns: Sequence[str], args: RunArguments, build: Callable[..., Dataset | IterableDataset]
) -> Any:
    """Return rows for the collator: rows with these columns unchanged, and raw text prepared with `build`.

    `build` is a function such as `build_passages`. A stream stays a stream if `max_steps` is set (`training_rows`).
    """
    rows = training_rows(rows, args)
    if rows is None or set(columns) <= set(rows.column_names):
        return rows
    check_columns(rows, ["text"], f"text (raw text), or {', '.join(columns)} (prepared rows)")
    source = Source(f"{HUB_PREFIX}train_dataset", rows=rows)
    return build(source, streaming=True) if isinstance(rows, IterableDataset) else build(source)


def training_rows(rows: Any, args: RunArguments) -> Any:
    """Return rows for trainers that need no length: a stream if `max_steps` is set, else as `as_dataset`."""
    if not isinstance(rows, IterableDataset) or args.max_steps <= 0:
        return as_dataset(rows)
    if rows.features is None:
        features = Dataset.from_list(list(rows.take(1))).features
        if any(getattr(kind, "dtype", None) != "string" for kind in features.values()):
            raise UserError("train_dataset is a stream without features, and not all of its columns are text")
        rows = rows.cast(features)
    # Every process reads the whole stream and trains on its own rows. By default, the first process would send batches to the
    # others, which have to be of the same length.
    config: Any = args.accelerator_config
    if config.dispatch_batches is None:
        config.dispatch_batches = False
    return rows


def as_dataset(rows: Any) -> Any:
    """Return rows with a length: those of a stream are written to the cache of `datasets`."""
    if isinstance(rows, IterableDataset):
        # Rows may come from files that change: never those of an earlier run.
        rows = Dataset.from_generator(lambda: iter(rows), features=rows.features, fingerprint=uuid.uuid4().hex)
    if isinstance(rows, Dataset) and not len(rows):
        raise UserError("train_dataset has no rows")
    return rows


def endless(rows: IterableDataset, seed: int, buffer_size: int) -> IterableDataset:
    """Return a stream without end: after the last row it is read again, in another order.

    If the first column is the number of the row, which seeds masks, crops and orders, it keeps counting, so that they differ.
    `buffer_size` rows are shuffled together; 1 keeps the order.
    """
    shuffled = rows.shuffle(seed=seed, buffer_size=buffer_size) if buffer_size > 1 else rows
    number = next(iter(rows.features))
    numbered = getattr(rows.features[number], "dtype", None) == "int64"

    def read() -> Iterator[dict[str, Any]]:
        total = 0
        for epoch in count():
            shuffled.set_epoch(epoch)
            earlier = total
            for row in shuffled:
                yield row | {number: row[number] + earlier} if numbered else row
                total += 1

    return IterableDataset.from_generator(read, features=rows.features)


def pair_columns(rows: Dataset | IterableDataset) -> list[str]:
    """Return the text columns of labelled pairs in order: anchor, positive, and negative, negative_1, ... if there are any."""
    check_columns(rows, ["anchor", "positive"], "anchor, positive, and for hard negatives negative_1, negative_2, ...")
    if other := [name for name in rows.column_names if name.startswith("negative") and not NEGATIVE.fullmatch(name)]:
        raise UserError(
            f"train_dataset: hard negatives are in columns negative_1, negative_2, ...: rename {other[0]!r}"
        )
    columns = in_order(rows.column_names)
    for batch in rows.select_columns(columns).iter(batch_size=1024) if isinstance(rows, Dataset) else ():
        if not all(isinstance(text, str) and text.strip() for texts in batch.values() for text in texts):
            raise UserError("train_dataset: a text is missing or empty, or is no text")
    return columns


def refuse_single_pair(rows: Dataset | IterableDataset) -> None:
    """Raise a `UserError` for one pair without hard negatives, whose loss is always 0."""
    if isinstance(rows, Dataset) and len(rows) == 1 and len(in_order(rows.column_names)) == 2:
        raise UserError("train_dataset has one pair: training needs at least 2, or hard negatives (negative_1, ...)")


def in_order(names: Iterable[str]) -> list[str]:
    """Return the text columns of labelled pairs among these columns: anchor, positive, and negative, negative_1, ...

    >>> in_order(["id", "negative_10", "negative_2", "positive", "anchor"])
    ['anchor', 'positive', 'negative_2', 'negative_10']
    """
    negatives = filter(NEGATIVE.fullmatch, names)
    return ["anchor", "positive", *sorted(negatives, key=lambda name: int(name.partition("_")[2] or 0))]


def check_columns(rows: Dataset | IterableDataset, needed: Iterable[str], wanted: str) -> None:
    """Raise a `UserError` that lists the columns of a data set if one is missing."""
    if not set(needed) <= set(rows.column_names):
        raise UserError(f"train_dataset has the columns {', '.join(rows.column_names)}; it needs {wanted}")
