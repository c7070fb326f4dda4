"""Labelled query-passage pairs, read into the columns that sentence-transformers' losses expect."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from revela_hub.data.mixture.pairs import KnownPairs
from revela_hub.data.sources.beir import is_beir, read_beir_pairs
from revela_hub.data.sources.report import counted
from revela_hub.data.sources.rows import Row, column_text, column_value, read_rows
from revela_hub.data.sources.source import SourceLike, parse_source
from revela_hub.data.text.same_text import text_key
from revela_hub.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

NEGATIVE = re.compile(r"negative(_\d+|s)?")
SYNTHETIC = "synthetic/"  # as in `data.synthesis.synthesis`


@dataclass
class PairReport:
    """Counts of the pairs; `str(report)` is the line that a run prints."""

    pairs: int = 0
    negatives: int = 0
    empty: int = 0
    repeated: int = 0
    labels: int = 0
    """Examples of `revela-hub synthesize` with a label as the positive."""
    wrong: int = 0
    """Pairs with a hard negative that is a positive of the same query."""

    def __str__(self) -> str:
        """For example `2,000 pairs with 3 hard negatives each; skipped: 12 empty, 3 repeated`."""
        text = counted(self.pairs, "pair")
        text += f" with {counted(self.negatives, 'hard negative')} each" if self.negatives else ""
        names = {
            "empty": "empty",
            "repeated": "repeated",
            "labels": "with a label as the passage (kind: other)",
            "wrong": "with a positive as a hard negative",
        }
        skipped = [f"{count:,} {words}" for name, words in names.items() if (count := getattr(self, name))]
        return text + (f"; skipped: {', '.join(skipped)}" if skipped else "")


def read_labelled_pairs(
    source: SourceLike, *, anchor_column: str = "anchor", positive_column: str = "positive", split: str = "train"
) -> tuple["Dataset", PairReport]:
    """Read pairs from JSON lines, a data set or a BEIR folder.

    A positive may be a list of texts: each makes a pair. Columns named `negative`, `negative_1`, `negative_2`, ... hold hard
    negatives, as `revela-hub mine` writes them. Pairs with a hard negative that is a positive of the same query are skipped, and so are the examples of kind "other" that `revela-hub synthesize` writes: their positives are
    labels, and the label of another text may be right, too.

    `split` selects the qrels of a BEIR folder. Return the rows (`anchor`, `positive`, `negative_1`, ...) and the report.
    """
    from datasets import Dataset

    if anchor_column == positive_column:
        raise UserError(f"--anchor_column and --positive_column are both {anchor_column!r}: name two different columns")
    parsed = parse_source(source)
    report = PairReport()
    if not parsed.is_dataset and is_beir(parsed.path):
        found: Iterator[tuple[str, ...]] = iter(read_beir_pairs(parsed.path, split))
    else:
        found = _row_pairs(_without_labels(read_rows(parsed), report), anchor_column, positive_column)
    rows: dict[tuple[str, ...], tuple[str, ...]] = {}  # by their keys: a pair in another spelling is a repetition
    for texts in found:
        if not all(text.strip() for text in texts[:2]):
            report.empty += 1
        elif (keys := tuple(map(text_key, texts))) in rows:
            report.repeated += 1
        else:
            rows[keys] = texts
    known = KnownPairs()
    for anchor, positive, *_ in rows.values():
        known.add(anchor, positive)
    right = [row for row in rows.values() if not any((row[0], negative) in known for negative in row[2:])]
    report.wrong = len(rows) - len(right)
    report.pairs, report.negatives = len(right), len(next(iter(rows), ("", ""))) - 2
    if report.pairs < 2:
        raise UserError(f"{parsed.path}: {report}; training needs at least 2 pairs")
    for column, texts in zip(("queries", "passages"), zip(*right, strict=True), strict=False):
        if not report.negatives and len(set(map(text_key, texts))) == 1:
            raise UserError(f"{parsed.path}: all {column} are equal; training needs different ones, or hard negatives")
    names = ["anchor", "positive", *(f"negative_{number + 1}" for number in range(report.negatives))]
    return Dataset.from_dict(dict(zip(names, map(list, zip(*right, strict=True)), strict=True))), report


def _without_labels(rows: Iterator[Row], report: PairReport) -> Iterator[Row]:
    for row in rows:
        if row.columns.get("kind") == "other" and str(row.columns.get("task")).startswith(SYNTHETIC):
            report.labels += 1
        else:
            yield row


def _row_pairs(rows: Iterator[Row], anchor_column: str, positive_column: str) -> Iterator[tuple[str, ...]]:
    remedy = f"a pair needs the texts {anchor_column!r} and {positive_column!r}: --anchor_column, --positive_column"
    expected: list[str] | None = None
    for row in rows:
        names = [name for name in row.columns if NEGATIVE.fullmatch(name) and row.columns[name] is not None]
        expected = names if expected is None else expected
        if names != expected:
            raise UserError(
                f"{row.where}: {counted(len(names), 'negative')}, but {len(expected)} in the rows before: give each row the same"
                " number (as revela-hub mine --fewer drop does)"
            )
        hard = "hard negatives are texts, in columns negative_1, negative_2, ..."
        negatives = [column_text(row, name, hard) for name in names]
        if empty := [name for name, text in zip(names, negatives, strict=True) if not text.strip()]:
            raise UserError(f"{row.where}: {empty[0]} is empty; remove the row, or give it a text")
        anchor = column_text(row, anchor_column, remedy)
        value = column_value(row, positive_column, remedy)
        for positive in (value or [None]) if isinstance(value, list) else [value]:
            part = Row(row.where, {positive_column: positive})
            yield anchor, column_text(part, positive_column, remedy), *negatives
