"""What was made of a mixture's tasks, and what was left out."""

from collections import Counter
from dataclasses import dataclass, field

from revela_hub.data.mixture.pairs import BELOW, CLASS_OF_ONE, NO_NEGATIVE
from revela_hub.data.mixture.rows import LEFT_OUT, NO_PASSAGE
from revela_hub.data.mixture.tasks import Task
from revela_hub.data.sources.report import counted, skips


@dataclass
class TaskReport:
    """What was made of one task; `str(report)` is its line."""

    name: str
    type: str
    rows: int = 0
    """Rows that were made, `max_samples` at most."""
    used: int = 0
    """Rows in the mixture."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows and pairs left out, by reason."""
    negatives: Counter[str] = field(default_factory=Counter)
    """Negatives: `given` by the source, `drawn` at random, `wrong` (given, but right for the anchor; left out)."""
    passages: int = 0
    """Passages in the corpus."""
    repeated_passages: int = 0
    """Those of them whose text was there before."""

    def __str__(self) -> str:
        """For example `scifact (retrieval): 919 rows; negatives: 919 drawn; 5,183 passages; dropped: 2 repeated`."""
        used = "" if self.used == self.rows else f" ({self.used:,} in the mixture)"
        parts = [f"{self.name} ({self.type}): {counted(self.rows, 'row')}{used}"]
        if negatives := +self.negatives:
            parts.append(f"negatives: {skips(negatives)}")
        if self.passages:
            repeated = f" ({self.repeated_passages:,} repeated)" if self.repeated_passages else ""
            parts.append(f"{counted(self.passages, 'passage')}{repeated}")
        if self.dropped:
            parts.append(f"dropped: {skips(self.dropped)}")
        return "; ".join(parts)


@dataclass
class MixtureReport:
    """What a mixture was made of; `str(report)` has a line for each task."""

    tasks: list[TaskReport]

    def __str__(self) -> str:
        """The total, then the tasks."""
        total = sum(task.used for task in self.tasks)
        head = f"{counted(total, 'row')} of {counted(len(self.tasks), 'task')}"
        return "\n".join([head, *(f"  {task}" for task in self.tasks)])


def no_positives(task: Task, report: TaskReport) -> str:
    """The message for a task of which nothing was left."""
    what = f"of {task.source.path}: {skips(report.dropped)}" if report.dropped else f"{task.source.path} has no rows"
    remedies = {  # what only leaves out what was asked to be left out comes last
        NO_PASSAGE: "check corpus and its id_column",
        CLASS_OF_ONE: "mode: label needs one text of each class",
        NO_NEGATIVE: "give it texts that are different, of two classes or more",
        BELOW: "lower the threshold",
        LEFT_OUT: "check where",
    }
    remedy = next(
        (remedies[reason] for reason in remedies if report.dropped[reason]), "give it others, or leave it out"
    )
    return f"task {task.name}: no positives for training ({what}); {remedy}"
