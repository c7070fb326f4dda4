"""Counts of read and skipped documents, updated while reading and printed as one line."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MAX_ENDINGS = 5


def counted(number: int, noun: str) -> str:
    """`counted(1234, "chunk")` -> `"1,234 chunks"`; "query" becomes "queries"."""
    plural = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


@dataclass
class ReadReport:
    """The counts of one pass over the sources; commands print `str(report)`.

    Nothing is skipped silently: skipped files and rows are counted by reason, and so are changes such as invalid UTF-8 and
    sentences that had to be split.
    """

    documents: int = 0
    """Documents with text."""
    chunks: int = 0
    """Chunks made of the documents."""
    groups: int = 0
    """Groups made of the chunks."""
    spans: int = 0
    """Token spans made of the documents."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Skipped files, folders and rows, and spans that are too short, by reason."""
    endings: Counter[str] = field(default_factory=Counter)
    """Files skipped as binary, by the ending of their names."""
    patterns: Counter[str] = field(default_factory=Counter)
    """Excluded files and folders by pattern; 0 for a pattern that matched nothing, if all of the text was read."""
    replaced: int = 0
    """Files with invalid UTF-8; each such byte is read as U+FFFD."""
    cut: int = 0
    """Sentences and lines of code longer than a chunk or span, split between words."""
    held_out: int = 0
    """Held-out texts of a probe that were removed from documents."""
    absent: int = 0
    """Empty rows in the last group."""
    dropped: int = 0
    """Chunks in an incomplete last group of one chunk, which is dropped because it has nothing to attend to."""

    def add(self, other: "ReadReport") -> None:
        """Add the counts of another report."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary, for a JSON file."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ReadReport":
        """Restore a report from `to_dict`."""
        counts = {name: Counter(values.get(name, {})) for name in ("skipped", "endings", "patterns")}
        return cls(**(values | counts))

    def __str__(self) -> str:
        """For example `1,234 documents, 5,678 chunks, 354 groups; skipped: 12 binary (.zip 12), 3 empty`."""
        numbers = {"document": self.documents, "chunk": self.chunks, "group": self.groups, "span": self.spans}
        made = [counted(number, noun) for noun, number in numbers.items() if number or noun == "document"]
        return "; ".join([", ".join(made), *self.remarks()])

    def remarks(self) -> list[str]:
        """Return what was skipped, replaced, split or removed."""
        parts: list[str] = []
        if self.skipped:
            parts.append(f"skipped: {skips(self.skipped, self.endings)}")
        if unmatched := [pattern for pattern, number in self.patterns.items() if not number]:
            parts.append(f"no file or folder matches exclude: {' '.join(unmatched)}")
        if self.replaced:
            parts.append(f"{counted(self.replaced, 'file')} had invalid UTF-8 (replaced)")
        if self.cut:
            pieces = counted(self.cut, "sentence or line") if self.cut == 1 else f"{self.cut:,} sentences or lines"
            parts.append(f"{pieces} longer than a {'span' if self.spans else 'chunk'} (split)")
        if self.held_out:
            parts.append(f"{counted(self.held_out, 'text')} of the probe held out")
        if self.absent:
            parts.append(f"last group incomplete ({counted(self.absent, 'row')} empty)")
        if self.dropped:
            parts.append(f"{counted(self.dropped, 'leftover chunk')} dropped")
        return parts


def skips(skipped: Counter[str], endings: Counter[str] | None = None) -> str:
    """Return `"12 binary (.xlsx 8, .zip 4), 3 empty"`, the most frequent reason first."""
    by_ending = [f"{ending} {number:,}" for ending, number in _ordered(endings or Counter())]
    more = ", ..." if len(by_ending) > MAX_ENDINGS else ""
    notes = {"binary": f" ({', '.join(by_ending[:MAX_ENDINGS])}{more})"} if by_ending else {}
    return ", ".join(f"{number:,} {reason}{notes.get(reason, '')}" for reason, number in _ordered(skipped))


def _ordered(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
