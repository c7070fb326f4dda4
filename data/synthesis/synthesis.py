"""Synthetic training pairs from a language model, in two steps: tasks, then examples of them.

After Wang et al. (arXiv 2401.00368, section 3.1), as NV-Embed (arXiv 2405.17428) uses it; the prompts are in
`revela_hub.data.synthesis.prompts`.

    lists of tasks --parse, new ones kept--> tasks.jsonl
    task + drawn placeholders --reply--> parse, validate --> not in an evaluation set --> not there before --> pairs.jsonl

Every request is a numbered draw: its task, placeholders and sampling seed follow from the run's seed and the number, so
that the same backend gives the same data, however many requests are under way at once, and a restart goes on where the
run stopped. A reply that cannot be used is counted by its reason and asked for again, with the same placeholders (or the
difficult ones would become rare) and another seed; after a few tries the draw is given up for the next one.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from revela_hub.data.sources.report import counted, skips
from revela_hub.data.synthesis.backends import Backend, Reply, Request
from revela_hub.data.synthesis.parsing import Rejected, parse_example, parse_tasks
from revela_hub.data.synthesis.prompts import DOMAINS, FORMS, TASKS_PER_LIST, Form, brainstorm_prompt, example_prompt
from revela_hub.data.synthesis.store import TASK_PREFIX, SyntheticFolder
from revela_hub.data.text.ngram_overlap import ExcludedTexts, NearDuplicates, words
from revela_hub.errors import UserError

FRUITLESS_LISTS = 10  # lists in a row without a new task after which the tasks there are must do


@dataclass(frozen=True)
class SynthesisSettings:
    """What is made.

    Attributes:
        count: Examples, divided evenly among the forms.
        forms: `short-long`, `long-short`, `short-short`.
        examples_per_task: How many examples a task is used for. NV-Embed: 120,000 of 60,000 tasks.
        languages: One is drawn for each example; one that is named twice is drawn twice as often.
        domains: One is drawn for each list of tasks.
        seed: Of all draws.
        attempts: Replies that are asked for at most for one draw.
        patience: Unusable replies in a row after which the run gives up.
        duplicate_similarity: Examples as similar as that (see `NearDuplicates`) are the same.
        model: Name of the model, kept with each example.

    Raises:
        UserError: A number is too small, or a form is unknown or given twice.
    """

    count: int = 1000
    forms: Sequence[Form] = tuple(FORMS)
    examples_per_task: int = 2
    languages: Sequence[str] = ("English",)
    domains: Sequence[str] = DOMAINS
    seed: int = 0
    attempts: int = 3
    patience: int = 50
    duplicate_similarity: float = 0.8
    model: str = ""

    def __post_init__(self) -> None:
        """Checks the values."""
        for name in ("count", "examples_per_task", "attempts", "patience"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name in ("forms", "languages", "domains"):
            if not getattr(self, name):
                raise UserError(f"--{name} is empty: give at least one")
        unknown = [form for form in self.forms if form not in FORMS]
        if unknown or len(set(self.forms)) < len(self.forms):
            raise UserError(f"--forms must be different ones of {', '.join(FORMS)}, not {' '.join(self.forms)}")

    def wanted(self, form: Form) -> int:
        """Examples of one form."""
        share, rest = divmod(self.count, len(self.forms))
        return share + (list(self.forms).index(form) < rest)

    def draws_depend_on(self) -> dict[str, Any]:
        """The settings that must stay the same when a run is continued."""
        return {
            "examples_per_task": self.examples_per_task,
            "languages": list(self.languages),
            "domains": list(self.domains),
            "seed": self.seed,
        }


@dataclass
class SynthesisReport:
    """What was made, and what was not; `str(report)` is the line that a command prints."""

    pairs: Counter[str] = field(default_factory=Counter)
    """Examples in the folder, by form."""
    earlier: int = 0
    """Those of them that earlier runs made."""
    tasks: Counter[str] = field(default_factory=Counter)
    """Tasks in the folder, by form."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Replies that could not be used in this run, by reason."""
    few_tasks: list[str] = field(default_factory=list)
    """Forms for which the model had no more new tasks before there were as many as wanted."""

    def __str__(self) -> str:
        """For example `30 pairs (20 short-long, 10 short-short) of 16 tasks; rejected: 4 not JSON`."""
        forms = ", ".join(f"{number:,} {form}" for form, number in self.pairs.items())
        parts = [f"{counted(self.pairs.total(), 'pair')} ({forms}) of {counted(self.tasks.total(), 'task')}"]
        if self.earlier:
            parts.append(f"{self.earlier:,} of them from earlier runs")
        if self.rejected:
            parts.append(f"rejected: {skips(self.rejected)}")
        if self.few_tasks:
            parts.append(
                f"the model thinks of no more tasks for {', '.join(self.few_tasks)}, so each has more examples"
            )
        return "; ".join(parts)


def synthesize(
    backend: Backend,
    output: str | Path,
    settings: SynthesisSettings | None = None,
    *,
    excluded: ExcludedTexts | None = None,
    show_progress_bar: bool = False,
) -> SynthesisReport:
    """Makes examples until there are `settings.count` in the folder.

    Args:
        backend: The language model.
        output: The folder; see `revela_hub.data.synthesis.store`. `pairs.jsonl` has the columns `task`
            (`synthetic/short-long`), `instruction` (the task in words), `anchor`, `positive`, `negative_1`, `kind`
            (`retrieval` or `other`), `language`, `model` and `draw`.
        settings: What is made.
        excluded: Texts of evaluation sets: an example that shares words with them (see `ExcludedTexts`) is rejected.
        show_progress_bar: On standard error.

    Raises:
        UserError: The folder or the backend does not work, or the model gives nothing usable any more.
    """
    settings = settings or SynthesisSettings()
    with SyntheticFolder(output, settings.draws_depend_on()) as folder:
        run = _Run(backend, folder, settings, excluded, show_progress_bar)
        for form in settings.forms:
            if folder.count(form) < settings.wanted(form):
                run.make_tasks(form)
                run.make_examples(form)
        return run.finished()


@dataclass(frozen=True)
class _Job(Request):
    """A request and what it was drawn from."""

    draw: int = 0
    attempt: int = 0
    task: str = ""
    language: str = ""


class _Run:
    """One pass of `synthesize`."""

    def __init__(
        self,
        backend: Backend,
        folder: SyntheticFolder,
        settings: SynthesisSettings,
        excluded: ExcludedTexts | None,
        show_progress_bar: bool,
    ) -> None:
        self.backend, self.folder, self.settings, self.excluded = backend, folder, settings, excluded
        self.show_progress_bar = show_progress_bar
        self.report = SynthesisReport(earlier=len(folder.pairs))
        self.seen = NearDuplicates(settings.duplicate_similarity)
        self.asked: set[tuple[str, ...]] = set()
        for row in folder.pairs:
            self._remember(row)

    def finished(self) -> SynthesisReport:
        """The report, with the counts of what is in the folder now."""
        for form in self.settings.forms:
            self.report.pairs[form] = self.folder.count(form)
            self.report.tasks[form] = len(self.folder.tasks[form])
        return self.report

    # --- first step

    def make_tasks(self, form: Form) -> None:
        """Asks for lists until there are tasks enough, or nothing new comes."""
        wanted = -(-self.settings.wanted(form) // self.settings.examples_per_task)
        tasks = self.folder.tasks[form]
        seen = NearDuplicates(self.settings.duplicate_similarity)
        for task in tasks:
            seen.add(task)
        outstanding = fruitless = 0
        reasons: Counter[str] = Counter()
        numbers = (number for number in itertools.count() if number not in self.folder.lists[form])

        def jobs() -> Iterator[_Job | None]:
            nonlocal outstanding
            while len(tasks) < wanted:
                if outstanding and len(tasks) + outstanding * TASKS_PER_LIST >= wanted:
                    yield None
                    continue
                outstanding += 1
                number = next(numbers)
                random = self._random("tasks", form, number)
                drawn = brainstorm_prompt(form, self.settings.domains, random)
                yield _Job(drawn.prompt, random.getrandbits(31), draw=number)

        with self._bar(wanted, len(tasks), f"{form} tasks") as bar:
            for job, reply in self.backend.replies(jobs()):
                outstanding -= 1
                try:
                    new = _new_tasks(reply, seen)[: wanted - len(tasks)]
                    self.folder.add_tasks(form, new, job.draw)
                    bar.update(len(new))
                    fruitless = 0
                except Rejected as rejected:
                    reasons[str(rejected)] += 1
                    self._reject("tasks", form, job, rejected, reply)
                    fruitless += 1
                if fruitless == FRUITLESS_LISTS:
                    break
        if not tasks:
            raise self._nothing_usable(f"{form} tasks", fruitless, reasons, reply)
        if len(tasks) < wanted:
            self.report.few_tasks.append(form)

    # --- second step

    def make_examples(self, form: Form) -> None:
        """Asks for examples until there are as many as wanted."""
        wanted, made = self.settings.wanted(form), self.folder.count(form)
        pending, numbers = self._unfinished(form)
        outstanding = useless = 0
        reasons: Counter[str] = Counter()

        def jobs() -> Iterator[_Job | None]:
            nonlocal outstanding
            while made < wanted:
                if made + outstanding >= wanted:  # if all that are under way are good, they are enough
                    yield None
                    continue
                outstanding += 1
                yield self._example_job(form, *(pending.popleft() if pending else (next(numbers), 0)))

        with self._bar(wanted, made, form) as bar:
            for job, reply in self.backend.replies(jobs()):
                outstanding -= 1
                try:
                    self.folder.add_pair(self._row(form, job, reply))
                    made, useless = made + 1, 0
                    bar.update()
                except Rejected as rejected:
                    reasons[str(rejected)] += 1
                    self._reject("examples", form, job, rejected, reply)
                    useless += 1
                    if job.attempt + 1 < self.settings.attempts:
                        pending.append((job.draw, job.attempt + 1))
                bar.set_postfix(rejected=reasons.total(), refresh=False)
                if useless == self.settings.patience:
                    raise self._nothing_usable(form, useless, reasons, reply)

    def _unfinished(self, form: Form) -> tuple[deque[tuple[int, int]], Iterator[int]]:
        """Draws of earlier runs that are to be asked for (again), with the attempts made; and the numbers after them."""
        done = self.folder.draws(form)
        attempts = {
            draw: number
            for (step, of, draw), number in self.folder.attempts.items()
            if (step, of) == ("examples", form)
        }
        first = max([*done, *attempts], default=-1) + 1
        open_ = [(draw, attempts.get(draw, 0)) for draw in range(first) if draw not in done]
        return deque(item for item in open_ if item[1] < self.settings.attempts), itertools.count(first)

    def _example_job(self, form: Form, draw: int, attempt: int) -> _Job:
        tasks = self.folder.tasks[form]
        task = tasks[draw // self.settings.examples_per_task % len(tasks)]
        drawn = example_prompt(form, task, self.settings.languages, self._random("examples", form, draw))
        seed = self._random("sampling", form, draw, attempt).getrandbits(31)
        return _Job(drawn.prompt, seed, draw, attempt, task, drawn.values["language"])

    def _row(self, form: Form, job: _Job, reply: Reply) -> dict[str, Any]:
        """The line of `pairs.jsonl`.

        Raises:
            Rejected: The reply is no example, or not a new one.
        """
        if reply.problem:
            raise Rejected(reply.problem)
        texts = parse_example(form, reply.text)
        # A label is a word or two that may well stand in an evaluation set.
        checked = [texts["anchor"]] if form == "long-short" else list(texts.values())
        if self.excluded and (name := next(filter(None, map(self.excluded.find, checked)), None)):
            raise Rejected(f"overlapping {name}")
        row = {"task": f"{TASK_PREFIX}{form}", "instruction": job.task} | texts
        if _asked(row) in self.asked or _content(row) in self.seen:
            raise Rejected("near-duplicate")
        self._remember(row)
        source = {"language": job.language, "model": self.settings.model, "draw": job.draw}
        return row | {"kind": FORMS[form].kind} | source

    def _remember(self, row: dict[str, Any]) -> None:
        self.seen.add(_content(row))
        self.asked.add(_asked(row))

    # --- both

    def _random(self, *key: object) -> Random:
        """Random numbers of their own for each draw: a string is the same seed in every process and version."""
        return Random("/".join(map(str, (self.settings.seed, *key))))

    def _bar(self, total: int, initial: int, name: str) -> "tqdm[Any]":
        return tqdm(total=total, initial=initial, desc=name, disable=not self.show_progress_bar, dynamic_ncols=True)

    def _reject(self, step: str, form: Form, job: _Job, rejected: Rejected, reply: Reply) -> None:
        self.report.rejected[str(rejected)] += 1
        self.folder.reject(step, form, job.draw, job.attempt, str(rejected), reply.text)

    def _nothing_usable(self, what: str, in_a_row: int, reasons: Counter[str], reply: Reply) -> UserError:
        sample = " ".join(reply.text.split())[:200]
        return UserError(
            f"{what}: {counted(in_a_row, 'answer')} in a row could not be used (of this run: {skips(reasons)}); the last "
            f"one began {sample!r}; what was accepted is in {self.folder.path}: try another model, or a higher "
            "--max-new-tokens or --patience"
        )


def _new_tasks(reply: Reply, seen: NearDuplicates) -> list[str]:
    """The tasks in a reply that are not known, which they then are."""
    cut_off = reply.problem == "cut off"
    if reply.problem and not cut_off:
        raise Rejected(reply.problem)
    new = []
    # A list that is cut off has good items, but for the last one.
    for task in parse_tasks(reply.text)[: -1 if cut_off else None]:
        if task not in seen:
            seen.add(task)
            new.append(task)
    if not new:
        raise Rejected("no new task")
    return new


def _content(row: dict[str, Any]) -> str:
    """What near-duplicates are found by: the same short query may ask for different things."""
    return f"{row['anchor']}\n{row['positive']}"


def _asked(row: dict[str, Any]) -> tuple[str, ...]:
    """The query under its instruction, which may be there once only."""
    return (row["instruction"], *(words(row["anchor"]) or [row["anchor"]]))
