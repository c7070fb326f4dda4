"""What was read, and what was not: counted while reading, shown as one line."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


def counted(number: int, noun: str) -> str:
    """`counted(1234, "chunk")` -> `"1,234 chunks"`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass
class ReadReport:
    """The counts of one pass over the sources; `str(report)` is the one line that a command prints.

    Nothing is left out silently: what is not read is counted under its reason, and what is changed (invalid UTF-8,
    sentences that had to be cut) or defined by us (the last group) is counted too.
    """

    documents: int = 0
    """Documents with text in them."""
    chunks: int = 0
    """Chunks made of them."""
    groups: int = 0
    """Groups made of those."""
    spans: int = 0
    """Spans of tokens made of the documents."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Files, folders and rows that were not read, and spans that were too short to be kept: reason -> how many."""
    replaced: int = 0
    """Files with bytes that are not UTF-8, each such byte read as U+FFFD."""
    cut: int = 0
    """Sentences and lines of code that were longer than a chunk or span may be, and so were cut between words."""
    held_out: int = 0
    """Texts that a probe asks for, taken out of the documents."""
    absent: int = 0
    """Rows of a last group that stayed empty."""
    dropped: int = 0
    """Chunks left over: a last group of one chunk has nothing to attend to, so it is left out."""

    def add(self, other: "ReadReport") -> None:
        """Adds the counts of another report to this one."""
        for name, value in vars(other).items():
            if name == "skipped":
                self.skipped.update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for a JSON file."""
        return asdict(self) | {"skipped": dict(self.skipped)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ReadReport":
        """The report that `to_dict` wrote down."""
        return cls(**(values | {"skipped": Counter(values["skipped"])}))

    def __str__(self) -> str:
        """For example `1,234 documents, 5,678 chunks, 354 groups; skipped: 12 binary, 3 empty`."""
        made = [counted(self.documents, "document")]
        made += [counted(self.chunks, "chunk")] if self.chunks else []
        made += [counted(self.groups, "group")] if self.groups else []
        made += [counted(self.spans, "span")] if self.spans else []
        parts = [", ".join(made)]
        if self.skipped:
            parts.append(f"skipped: {skips(self.skipped)}")
        if self.replaced:
            parts.append(f"{counted(self.replaced, 'file')} had invalid UTF-8 (replaced)")
        if self.cut:
            pieces = counted(self.cut, "sentence or line") if self.cut == 1 else f"{self.cut:,} sentences or lines"
            parts.append(f"{pieces} longer than a {'span' if self.spans else 'chunk'} (cut)")
        if self.held_out:
            parts.append(f"{counted(self.held_out, 'text')} of the probe held out")
        if self.absent:
            parts.append(f"last group is not full ({counted(self.absent, 'row')} absent)")
        if self.dropped:
            parts.append(f"{counted(self.dropped, 'chunk')} left over (dropped)")
        return "; ".join(parts)


def skips(skipped: Counter[str]) -> str:
    """`"12 binary, 3 empty"`, the most frequent reason first."""
    ordered = sorted(((number, reason) for reason, number in skipped.items()), key=lambda item: (-item[0], item[1]))
    return ", ".join(f"{number:,} {reason}" for number, reason in ordered)
