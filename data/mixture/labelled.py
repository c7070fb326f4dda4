"""Labelled pairs of a query and a passage, with or without hard negatives, from a file, a data set or a BEIR folder."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from revela_hub.data.row_cache import cached_rows, rows_fingerprint
from revela_hub.data.sources.beir import beir_files, is_beir, read_beir_pairs
from revela_hub.data.sources.report import counted
from revela_hub.data.sources.rows import read_rows
from revela_hub.data.sources.source import Source, SourceLike, parse_source
from revela_hub.data.text.same_text import text_hash
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

NEGATIVE = re.compile(r"negative(_\d+|s)?")
SYNTHETIC = "synthetic/"  # as in `data.synthesis.synthesis`


def read_labelled_pairs(
    source: SourceLike,
    *,
    anchor_column: str = "anchor",
    positive_column: str = "positive",
    split: str = "train",
    cache_dir: str | Path | None = None,
) -> tuple["Dataset", str]:
    """Read pairs from JSON lines, a data set or a BEIR folder.

    A positive may be a list of texts: each makes a pair. Columns named `negative`, `negative_1`, `negative_2`, ... hold hard
    negatives, as `revela-hub mine` writes them. Skipped are repeated pairs (by `text_hash`), pairs with a hard negative that is a
    positive of the same query, and the examples of kind "other" of `revela-hub synthesize`, whose positives are labels.

    `split` selects the qrels of a BEIR folder. Return the rows (`anchor`, `positive`, `negative_1`, ...) and a line such as
    `2,000 pairs with 3 hard negatives each; skipped: 12 empty, 3 repeated`.

    Raises:
        UserError: A column is missing, a value is not text, a negative is missing, or there are fewer than two pairs.
    """
    parsed, skipped = parse_source(source), Counter[str]()
    files = [parsed]
    if not parsed.is_dataset and is_beir(parsed.path):
        files = [Source(str(file)) for file in beir_files(parsed.path, split)]
    read = partial(_texts, parsed, anchor_column, positive_column, split)
    negatives = len(next(read(Counter()), ("", ""))) - 2
    names = ["anchor", "positive", *(f"negative_{number + 1}" for number in range(negatives))]

    def right() -> Iterator[dict[str, str]]:
        rows: dict[tuple[int, ...], tuple[str, ...]] = {}  # a pair in another spelling is a repetition
        for texts in read(skipped):
            if not all(text.strip() for text in texts[:2]):
                skipped["empty"] += 1
            elif (keys := tuple(map(text_hash, texts))) in rows:
                skipped["repeated"] += 1
            else:
                rows[keys] = texts
        known = {keys[:2] for keys in rows}
        for keys, row in rows.items():
            if any((keys[0], negative) in known for negative in keys[2:]):
                skipped["with a positive as a hard negative"] += 1
            else:
                yield dict(zip(names, row, strict=True))

    name = f"labelled-pairs-{rows_fingerprint({'columns': [anchor_column, positive_column], 'split': split}, files)}"
    rows, counts = cached_rows(name, dict.fromkeys(names, "string"), right, lambda: skipped, cache_dir)
    report = counted(len(rows), "pair") + (f" with {counted(negatives, 'hard negative')} each" if negatives else "")
    report += "; skipped: " * bool(counts) + ", ".join(f"{count:,} {why}" for why, count in counts.items())
    same = not negatives and any(len(set(map(text_hash, rows[column]))) == 1 for column in names)
    if len(rows) < 2 or same:
        raise UserError(f"{parsed.path}: {report}; training needs different queries and passages, or hard negatives")
    return rows, report


def _texts(
    source: Source, anchor_column: str, positive_column: str, split: str, skipped: Counter[str]
) -> Iterator[tuple[str, ...]]:
    """Yield anchor, positive and negatives."""
    if not source.is_dataset and is_beir(source.path):
        yield from read_beir_pairs(source.path, split)
        return
    expected: list[str] | None = None
    for row in read_rows(source):
        if row.columns.get("kind") == "other" and str(row.columns.get("task")).startswith(SYNTHETIC):
            skipped["with a label as the passage (kind: other)"] += 1
            continue
        names = [name for name in row.columns if NEGATIVE.fullmatch(name) and row.columns[name] is not None]
        expected = names if expected is None else expected
        if names != expected:
            number = counted(len(names), "negative")
            raise UserError(f"{row.where}: {number}, but {len(expected)} in the rows before: give each the same number")
        negatives = list(map(row.text, names))
        if not all(text.strip() for text in negatives):
            raise UserError(f"{row.where}: a hard negative is empty; remove the row, or give it a text")
        anchor = row.text(anchor_column)
        for positive in row.texts(positive_column) or [""]:
            yield anchor, positive, *negatives
