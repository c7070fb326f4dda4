"""Counts of used and dropped rows of a mixture's tasks."""

from collections import Counter
from dataclasses import dataclass, field

from revela_hub.data.mixture.pairs import BELOW, CLASS_OF_ONE, NO_NEGATIVE
from revela_hub.data.mixture.rows import EXCLUDED_BY_WHERE, NO_PASSAGE
from revela_hub.data.mixture.tasks import Task
from revela_hub.data.sources.report import counted, skips


@dataclass
class TaskReport:
    """The counts of one task; `str(report)` is one line."""

    name: str
    type: str
    rows: int = 0
    """Rows of the task, at most `max_samples`."""
    used: int = 0
    """Rows in the mixture."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Dropped rows and pairs, by reason."""
    negatives: Counter[str] = field(default_factory=Counter)
    """Negatives: `given` by the source, `drawn` at random, `wrong` (given, but a known positive; removed)."""
    passages: int = 0
    """Passages in the corpus."""
    repeated_passages: int = 0
    """Passages with the text of an earlier one."""

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
    """The counts of a mixture; `str(report)` has one line per task."""

    tasks: list[TaskReport]

    def __str__(self) -> str:
        """The total, then the tasks."""
        total = sum(task.used for task in self.tasks)
        head = f"{counted(total, 'row')} of {counted(len(self.tasks), 'task')}"
        return "\n".join([head, *(f"  {task}" for task in self.tasks)])


def no_positives(task: Task, report: TaskReport) -> str:
    """Return the message for a task without any row left."""
    what = f"of {task.source.path}: {skips(report.dropped)}" if report.dropped else f"{task.source.path} has no rows"
    remedies = {  # filters that the user chose come last
        NO_PASSAGE: "check corpus and its id_column",
        CLASS_OF_ONE: "mode: label needs only one text per class",
        NO_NEGATIVE: "it needs distinct texts of at least two classes",
        BELOW: "lower the threshold",
        EXCLUDED_BY_WHERE: "check where",
    }
    remedy = next(
        (remedies[reason] for reason in remedies if report.dropped[reason]), "use other data, or remove the task"
    )
    return f"task {task.name}: no positives for training ({what}); {remedy}"
