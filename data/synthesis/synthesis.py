"""Synthetic training pairs from a language model, in two steps: tasks, then examples of them.

After Wang et al. (arXiv 2401.00368, section 3.1), as used by NV-Embed (arXiv 2405.17428); the prompts are in
`revela_hub.data.synthesis.prompts`.

    reply with a list of tasks --> parse --> drop known tasks
    reply with an example of a task --> parse, validate --> drop overlap with evaluation sets, duplicates --> pairs.jsonl

Every example is a numbered draw. Its task, placeholders and sampling seed are derived from the run's seed and this number, so the same
backend gives the same data for any number of concurrent requests. An unusable reply is counted by reason, and its draw is skipped.
`pairs.jsonl` is the only state: a resumed run counts its lines, takes the tasks from it, and continues after its last draw.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from revela_hub.data.sources.report import counted, skips
from revela_hub.data.sources.rows import file_rows
from revela_hub.data.synthesis.backends import CUT_OFF, Backend, Reply, Request
from revela_hub.data.synthesis.parsing import Rejected, parse_example, parse_tasks
from revela_hub.data.synthesis.prompts import DOMAINS, FORMS, TASKS_PER_LIST, Form, brainstorm_prompt, example_prompt
from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.options import option
from revela_hub.output import progress_bar
from revela_hub.ranges import PositiveInt, Seed

if TYPE_CHECKING:
    from revela_hub.data.text.ngram_overlap import ExcludedTexts, NearDuplicates

PAIRS = "pairs.jsonl"
TASK_PREFIX = "synthetic/"
"""Of the column `task`: `synthetic/short-long`."""
COLUMNS = ("task", "instruction", "anchor", "positive", "negative_1", "kind", "language", "model", "draw")
MAX_UNUSABLE = 50
"""Consecutive unusable replies after which a run stops."""
MAX_LISTS_WITHOUT_NEW_TASKS = 10
"""Consecutive lists after which the existing tasks are used."""


@dataclass
class SynthesisSettings:
    """The settings of a synthesis run; the help texts describe them."""

    option_group = "examples"

    model: str = option("", "Name of the model, recorded in each example.")
    count: PositiveInt = option(1000, "Number of examples, divided evenly among the forms.")
    forms: list[Form] = option(["short-long", "long-short", "short-short"], "Forms of example to write.")
    examples_per_task: PositiveInt = option(2, "Number of examples per task.")
    languages: list[str] = option(
        ["English"], "Languages to draw from; a language that is given twice is drawn twice as often."
    )
    domains: list[str] = option([], "Subject areas of the tasks, e.g. 'tax law' (default: forty general ones).")
    seed: Seed = option(0, "Random seed.")

    def wanted(self, form: Form) -> int:
        """Return the number of examples of one form."""
        forms = list(dict.fromkeys(self.forms))
        share, rest = divmod(self.count, len(forms))
        return share + (forms.index(form) < rest)


@dataclass
class SynthesisReport:
    """The counts of a run; the command prints `str(report)`."""

    pairs: Counter[str] = field(default_factory=Counter)
    """Examples in the file, by form."""
    tasks: Counter[str] = field(default_factory=Counter)
    """Tasks of the examples, by form."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Unusable replies in this run, by reason."""

    def __str__(self) -> str:
        """For example `30 pairs (20 short-long, 10 short-short) of 16 tasks; rejected: 4 not JSON`."""
        forms = ", ".join(f"{number:,} {form}" for form, number in self.pairs.items())
        parts = [f"{counted(self.pairs.total(), 'pair')} ({forms}) of {counted(self.tasks.total(), 'task')}"]
        parts += [f"rejected: {skips(self.rejected)}"] if self.rejected else []
        return "; ".join(parts)


def synthesize(
    backend: Backend,
    output: str | Path,
    settings: SynthesisSettings | None = None,
    *,
    excluded: "ExcludedTexts | None" = None,
    overwrite: bool = False,
    show_progress_bar: bool = False,
) -> SynthesisReport:
    """Generate examples until `output/pairs.jsonl` contains `settings.count` of them.

    Args:
        backend: The language model.
        output: The folder. `pairs.jsonl` has the columns `task` (`synthetic/short-long`), `instruction` (the task description),
            `anchor`, `positive`, `negative_1`, `kind` (`retrieval` or `other`), `language`, `model` and `draw`.
        settings: The settings of the run.
        excluded: Texts of evaluation sets: examples that overlap with them (see `ExcludedTexts`) are rejected.
        overwrite: Whether to start over instead of resuming; earlier examples are deleted when the first new one is written.
        show_progress_bar: Whether to show a progress bar on standard error.

    Raises:
        UserError: `pairs.jsonl` has other columns, or the model no longer gives usable replies.
    """
    from revela_hub.data.text.ngram_overlap import NearDuplicates  # imports numpy, which the help text does not need

    settings = settings or SynthesisSettings()
    file = local_path(output) / PAIRS
    earlier = list(_earlier(file))
    others = {row["model"] for row in earlier} - {settings.model}
    if others and not overwrite:
        raise UserError(f"{file} has examples of {', '.join(others)}: choose another output_dir, or set overwrite")
    run = _Synthesis(backend, file, settings, excluded, show_progress_bar, NearDuplicates())
    for row in [] if overwrite else earlier:
        run.remember(row)
    for form in settings.forms:
        run.make_examples(form)
    return run.report


def _earlier(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of earlier runs; a file that is not ours is an error, because it would be changed."""
    for row in file_rows(file) if file.exists() else ():
        if tuple(row.columns) != COLUMNS:
            raise UserError(f"{row.where}: not written by revela-hub synthesize; choose another output_dir")
        yield dict(row.columns)


@dataclass
class _Synthesis:
    """One call of `synthesize`: the examples, and what they must not repeat."""

    backend: Backend
    file: Path
    settings: SynthesisSettings
    excluded: "ExcludedTexts | None"
    show_progress_bar: bool
    similar: "NearDuplicates"
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {form: [] for form in FORMS})
    report: SynthesisReport = field(default_factory=SynthesisReport)
    useless: int = 0

    def make_examples(self, form: Form) -> None:
        """Request examples until there are enough: those that are missing, then those that are still missing."""
        rows, wanted = self.rows[form], self.settings.wanted(form)
        tasks = self._tasks(form) if len(rows) < wanted else []
        number = max((row["draw"] for row in rows), default=-1) + 1
        bar = progress_bar(total=wanted, initial=len(rows), desc=form, show=self.show_progress_bar, dynamic_ncols=True)
        while (missing := wanted - len(rows)) > 0:
            draws = range(number, number + missing)
            number += missing
            requests = (Request(*self._prompt(form, tasks, draw)[:2]) for draw in draws)
            for draw, (_, reply) in zip(draws, self.backend.replies(requests), strict=True):
                try:
                    self._add(self._example(form, tasks, draw, reply))
                    bar.update()
                except Rejected as rejected:
                    self._reject(str(rejected), reply, form)
        bar.close()
        self.report.pairs[form] = len(rows)
        self.report.tasks[form] = len({row["instruction"] for row in rows})

    def _tasks(self, form: Form) -> list[str]:
        """Return tasks, those of earlier runs first: as many as are wanted, or until no list has a new one."""
        from revela_hub.data.text.ngram_overlap import NearDuplicates

        wanted = -(-self.settings.wanted(form) // self.settings.examples_per_task)
        tasks = list(dict.fromkeys(row["instruction"] for row in self.rows[form]))
        seen = NearDuplicates()
        for task in tasks:
            seen.add(task)
        lists, without_new = len(tasks), 0
        while len(tasks) < wanted and without_new < MAX_LISTS_WITHOUT_NEW_TASKS:
            count = -(-(wanted - len(tasks)) // TASKS_PER_LIST)
            requests = [self._brainstorm(form, lists + number) for number in range(count)]
            lists += count
            for _, reply in self.backend.replies(requests):
                try:
                    tasks += _new_tasks(reply, seen)
                    without_new = self.useless = 0
                except Rejected as rejected:
                    without_new += 1
                    self._reject(str(rejected), reply, form)
        if not tasks:
            raise UserError(f"{form}: no list has a usable task (rejected: {skips(self.report.rejected)})")
        return tasks[:wanted]

    def _brainstorm(self, form: Form, number: int) -> Request:
        random = self._random("tasks", form, number)
        prompt = brainstorm_prompt(form, self.settings.domains or DOMAINS, random)
        return Request(prompt, random.getrandbits(31))

    def _prompt(self, form: Form, tasks: list[str], draw: int) -> tuple[str, int, str, str]:
        """Return the prompt of a draw, the sampling seed, its task and its language."""
        task = tasks[draw // self.settings.examples_per_task % len(tasks)]
        random = self._random("examples", form, draw)
        prompt, language = example_prompt(form, task, self.settings.languages, random)
        return prompt, random.getrandbits(31), task, language

    def _example(self, form: Form, tasks: list[str], draw: int, reply: Reply) -> dict[str, Any]:
        """Return the row of a reply that is an example, and no duplicate."""
        if reply.problem not in (None, CUT_OFF):
            raise Rejected(reply.problem)
        try:
            texts = parse_example(form, reply.text)
        except Rejected as error:  # an example is whole if only what follows it was cut off
            raise Rejected(reply.problem or str(error)) from error
        # Not the labels: one or two words easily occur in an evaluation set.
        checked = [texts["anchor"]] if form == "long-short" else list(texts.values())
        if self.excluded and (name := next(filter(None, map(self.excluded.find, checked)), None)):
            raise Rejected(f"overlapping {name}")
        *_, task, language = self._prompt(form, tasks, draw)
        more = {"kind": FORMS[form]["kind"], "language": language, "model": self.settings.model, "draw": draw}
        row = {"task": f"{TASK_PREFIX}{form}", "instruction": task, **texts, **more}
        if _content(row) in self.similar:
            raise Rejected("near-duplicate")
        return row

    def _add(self, row: dict[str, Any]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a" if any(self.rows.values()) else "w", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.useless = 0
        self.remember(row)

    def remember(self, row: dict[str, Any]) -> None:
        """Count an example, and let no later one repeat it."""
        self.rows[row["task"].removeprefix(TASK_PREFIX)].append(row)
        self.similar.add(_content(row))

    def _reject(self, reason: str, reply: Reply, form: Form) -> None:
        self.report.rejected[reason] += 1
        self.useless += 1
        if self.useless == MAX_UNUSABLE:
            raise UserError(
                f"{form}: {self.useless} unusable replies in a row (rejected: {skips(self.report.rejected)}); the last one begins"
                f" with {' '.join(reply.text.split())[:200]!r}; try a higher max_new_tokens, or another model"
            )

    def _random(self, *key: object) -> Random:
        """Return a generator for one draw; seeding with a string gives the same numbers in every process and version."""
        return Random("/".join(map(str, (self.settings.seed, *key))))


def _new_tasks(reply: Reply, seen: "NearDuplicates") -> list[str]:
    """Return the new tasks in a reply, and add them to `seen`."""
    if reply.problem not in (None, CUT_OFF):
        raise Rejected(reply.problem)
    new = []
    # All items of a list that was cut off are usable, except for the last one.
    for task in parse_tasks(reply.text)[: -1 if reply.problem else None]:
        if task not in seen:
            seen.add(task)
            new.append(task)
    if not new:
        raise Rejected("no new task")
    return new


def _content(row: dict[str, Any]) -> str:
    """Return the text that is compared for near-duplicates: short queries alone may be equal with different intents."""
    return f"{row['anchor']}\n{row['positive']}"
