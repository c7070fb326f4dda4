"""Counts of read and skipped documents, updated while reading and printed as one line."""

from collections import Counter
from dataclasses import dataclass, field

MAX_ENDINGS = 5


def counted(number: int, noun: str) -> str:
    """`counted(1234, "chunk")` -> `"1,234 chunks"`; "query" becomes "queries"."""
    plural = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


@dataclass
class ReadReport:
    """The counts of one pass over the sources; commands print `str(report)`.

    Nothing is skipped silently: skipped files and rows are counted by reason, and so are changes such as invalid UTF-8 and
    sentences that had to be split. `vars(report)` can be written as JSON, and `ReadReport(**values)` restores it.
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

    def __post_init__(self) -> None:
        """Restore the counters from dictionaries."""
        self.skipped, self.endings = Counter(self.skipped), Counter(self.endings)

    def add(self, other: "ReadReport") -> None:
        """Add the counts of another report."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        """For example `1,234 documents, 5,678 chunks, 354 groups; skipped: 12 binary (.zip 12), 3 empty`."""
        made = {"chunk" if self.groups else "passage": self.chunks, "group": self.groups, "span": self.spans}
        counts = [counted(number, noun) for noun, number in made.items() if number]
        return "; ".join([", ".join([counted(self.documents, "document"), *counts]), *self.remarks()])

    def remarks(self) -> list[str]:
        """Return what was skipped, replaced, split or removed."""
        unit = "span" if self.spans else "chunk" if self.groups else "passage"
        remarks = {
            f"skipped: {skips(self.skipped, self.endings)}": self.skipped,
            f"{counted(self.replaced, 'file')} had invalid UTF-8 (replaced)": self.replaced,
            f"{counted(self.cut, 'sentence')} longer than a {unit} (split)": self.cut,
            f"{counted(self.held_out, 'text')} of the probe held out": self.held_out,
            f"last group incomplete ({counted(self.absent, 'row')} empty)": self.absent,
            f"{counted(self.dropped, 'leftover chunk')} dropped": self.dropped,
        }
        return [remark for remark, number in remarks.items() if number]


def skips(skipped: Counter[str], endings: Counter[str] | None = None) -> str:
    """Return `"12 binary (.xlsx 8, .zip 4), 3 empty"`, the most frequent reason first."""
    by_ending = [f"{ending} {number:,}" for ending, number in _ordered(endings or Counter())[:MAX_ENDINGS]]
    notes = {"binary": f" ({', '.join(by_ending)})"} if by_ending else {}
    return ", ".join(f"{number:,} {reason}{notes.get(reason, '')}" for reason, number in _ordered(skipped))


def _ordered(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
