"""Synthetic training pairs from a language model, in two steps: tasks, then examples of them.

After Wang et al. (arXiv 2401.00368, section 3.1), as used by NV-Embed (arXiv 2405.17428); the prompts are in
`revela_hub.data.synthesis.prompts`.

    reply with a list of tasks --> parse --> drop known tasks --> tasks.jsonl
    reply with an example of a task --> parse, validate --> drop overlap with evaluation sets, duplicates --> pairs.jsonl

Every request is a numbered draw. Its task, placeholders and sampling seed are derived from the run's seed and this number, so
the same backend gives the same data for any number of concurrent requests, and a run can be resumed. An unusable reply is
counted by reason and requested again with the same placeholders (otherwise difficult ones would become rare) and a new seed;
after a few attempts the draw is skipped.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, cast

from annotated_types import Interval
from tqdm import tqdm

from revela_hub.data.sources.report import counted, skips
from revela_hub.data.synthesis import prompts
from revela_hub.data.synthesis.backends import CUT_OFF, Backend, Reply, Request
from revela_hub.data.synthesis.parsing import Rejected, parse_example, parse_tasks
from revela_hub.data.synthesis.prompts import DOMAINS, FORMS, TASKS_PER_LIST, Form, brainstorm_prompt, example_prompt
from revela_hub.data.synthesis.store import TASK_PREFIX, Rejection, SyntheticFolder, SyntheticPair, SyntheticTask
from revela_hub.data.text.ngram_overlap import ExcludedTexts, NearDuplicates
from revela_hub.data.text.words import words
from revela_hub.errors import UserError
from revela_hub.options import option
from revela_hub.ranges import PositiveInt, Seed

MAX_LISTS_WITHOUT_NEW_TASKS = 10  # consecutive lists, after which the existing tasks are used
SAMPLE_CHARACTERS = 500  # characters of a rejected reply that are stored


@dataclass
class SynthesisSettings:
    """The settings of a synthesis run; the help texts describe them.

    Raises:
        UserError: A form is unknown or given twice, or a list is empty.
    """

    option_group = "examples"

    model: str = option("", "Name of the model, recorded in each example.")
    count: PositiveInt = option(1000, "Number of examples, divided evenly among the forms.")
    forms: list[str] = option(["short-long", "long-short", "short-short"], "Forms of example to write.")
    examples_per_task: PositiveInt = option(2, "Number of examples per task.")
    languages: list[str] = option(
        ["English"], "Languages to draw from; a language that is given twice is drawn twice as often."
    )
    domains: list[str] = option([], "Subject areas of the tasks, e.g. 'tax law' (default: forty general ones).")
    seed: Seed = option(0, "Random seed.")
    duplicate_similarity: Annotated[float, Interval(gt=0, le=1)] = option(
        0.8, "Jaccard similarity above which two examples count as duplicates."
    )
    attempts: PositiveInt = option(3, "Maximum number of replies per prompt if they are unusable.")
    patience: PositiveInt = option(50, "Number of consecutive unusable replies after which to stop.")

    def __post_init__(self) -> None:
        for name in ("forms", "languages"):
            if not getattr(self, name):
                raise UserError(f"--{name} is empty: pass at least one value")
        for name in ("model", "languages", "domains"):
            for text in [self.model] if name == "model" else getattr(self, name):
                if prompts.BROKEN.search(text):
                    raise UserError(f"--{name}: {text!r} is not valid Unicode (a lone surrogate or broken UTF-8)")
        if set(self.forms) - FORMS.keys() or len(set(self.forms)) < len(self.forms):
            raise UserError(f"--forms must be distinct values of {', '.join(FORMS)}, not {' '.join(self.forms)}")

    def wanted(self, form: str) -> int:
        """Return the number of examples of one form."""
        share, rest = divmod(self.count, len(self.forms))
        return share + (list(self.forms).index(form) < rest)

    def recorded(self, backend: Backend, excluded: ExcludedTexts | None) -> dict[str, Any]:
        """Return the settings that the data depend on, which must not change when a run is resumed."""
        return {
            "model": self.model,
            "examples_per_task": self.examples_per_task,
            "languages": list(self.languages),
            "domains": list(self.domains or DOMAINS),
            "seed": self.seed,
            "duplicate_similarity": self.duplicate_similarity,
            "exclude": excluded and excluded.fingerprint(),
            "prompts": prompts.VERSION,
            **getattr(backend, "recorded", {}),
        }


@dataclass
class SynthesisReport:
    """The counts of a run; the command prints `str(report)`."""

    pairs: Counter[str] = field(default_factory=Counter)
    """Examples in the folder, by form."""
    earlier: int = 0
    """Examples from earlier runs."""
    tasks: Counter[str] = field(default_factory=Counter)
    """Tasks in the folder, by form."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Unusable replies in this run, by reason."""
    few_tasks: list[str] = field(default_factory=list)
    """Forms for which the model produced fewer distinct tasks than requested."""

    def __str__(self) -> str:
        """For example `30 pairs (20 short-long, 10 short-short) of 16 tasks; rejected: 4 not JSON`."""
        forms = ", ".join(f"{number:,} {form}" for form, number in self.pairs.items())
        parts = [f"{counted(self.pairs.total(), 'pair')} ({forms}) of {counted(self.tasks.total(), 'task')}"]
        if self.earlier:
            parts.append(f"{self.earlier:,} from earlier runs")
        if self.rejected:
            parts.append(f"rejected: {skips(self.rejected)}")
        if self.few_tasks:
            parts.append(
                f"the model ran out of new tasks for {', '.join(self.few_tasks)}, so each task has more examples"
            )
        return "; ".join(parts)


def synthesize(
    backend: Backend,
    output: str | Path,
    settings: SynthesisSettings | None = None,
    *,
    excluded: ExcludedTexts | None = None,
    overwrite: bool = False,
    show_progress_bar: bool = False,
) -> SynthesisReport:
    """Generate examples until the folder contains `settings.count` of them.

    Args:
        backend: The language model.
        output: The folder; see `revela_hub.data.synthesis.store`. `pairs.jsonl` has the columns `task`
            (`synthetic/short-long`), `instruction` (the task description), `anchor`, `positive`, `negative_1`, `kind`
            (`retrieval` or `other`), `language`, `model` and `draw`.
        settings: The settings of the run.
        excluded: Texts of evaluation sets: examples that overlap with them (see `ExcludedTexts`) are rejected.
        overwrite: Whether to start over instead of resuming.
        show_progress_bar: Whether to show a progress bar on standard error.

    Raises:
        UserError: The folder or the backend fails, the folder belongs to a run with another model or different settings, or
            the model no longer gives usable replies.
    """
    settings = settings or SynthesisSettings()
    with SyntheticFolder(output, settings.recorded(backend, excluded), overwrite) as folder:
        run = _Synthesis(backend, folder, settings, excluded, show_progress_bar)
        for form in cast("list[Form]", settings.forms):
            if len(folder.pairs[form]) < settings.wanted(form):
                run.make_tasks(form)
                run.make_examples(form)
            run.report.pairs[form] = len(folder.pairs[form])
            run.report.tasks[form] = len(folder.tasks[form])
        return run.report


@dataclass(frozen=True, kw_only=True)
class _Job(Request):
    """A request and the draw that it was made from."""

    step: Literal["tasks", "examples"]
    form: Form
    draw: int
    attempt: int = 0
    task: str = ""
    language: str = ""


@dataclass
class _Synthesis:
    """The state of one call of `synthesize`."""

    backend: Backend
    folder: SyntheticFolder
    settings: SynthesisSettings
    excluded: ExcludedTexts | None
    show_progress_bar: bool

    def __post_init__(self) -> None:
        """Adds existing pairs to the duplicate detection."""
        pairs = [pair for pairs in self.folder.pairs.values() for pair in pairs]
        self.report = SynthesisReport(earlier=len(pairs))
        self.seen = NearDuplicates(self.settings.duplicate_similarity)
        self.asked: set[tuple[str, ...]] = set()
        for pair in pairs:
            self._remember(pair)

    def make_tasks(self, form: Form) -> None:
        """The first step: requests lists until there are enough tasks, or no new ones."""
        wanted = -(-self.settings.wanted(form) // self.settings.examples_per_task)
        tasks = self.folder.tasks[form]
        seen = NearDuplicates(self.settings.duplicate_similarity)
        for task in tasks:
            seen.add(task)
        numbers = (number for number in itertools.count() if number not in self.folder.lists[form])

        def job() -> _Job:
            draw = next(numbers)
            random = self._random("tasks", form, draw)
            prompt = brainstorm_prompt(form, self.settings.domains or DOMAINS, random)
            return _Job(prompt, random.getrandbits(31), step="tasks", form=form, draw=draw)

        def use(job: _Job, reply: Reply) -> None:
            for task in _new_tasks(reply, seen)[: wanted - len(tasks)]:
                self.folder.add(SyntheticTask(form=form, task=task, draw=job.draw))

        problem = self._collect(tasks, wanted, job, use, TASKS_PER_LIST, MAX_LISTS_WITHOUT_NEW_TASKS, f"{form} tasks")
        if problem:
            if not tasks:
                raise problem
            self.report.few_tasks.append(form)

    def make_examples(self, form: Form) -> None:
        """The second step: requests examples until there are enough."""
        settings, attempts = self.settings, self.folder.attempts[form]
        done = {pair.draw for pair in self.folder.pairs[form]}
        first = max([*done, *attempts], default=-1) + 1
        numbers = itertools.count(first)
        # Draws of earlier runs without a usable reply, with the number of attempts.
        earlier = [(draw, attempts.get(draw, 0)) for draw in range(first) if draw not in done]
        pending = deque(item for item in earlier if item[1] < settings.attempts)

        def job() -> _Job:
            draw, attempt = pending.popleft() if pending else (next(numbers), 0)
            tasks = self.folder.tasks[form]
            task = tasks[draw // settings.examples_per_task % len(tasks)]
            prompt, language = example_prompt(form, task, settings.languages, self._random("examples", form, draw))
            return _Job(
                prompt,
                self._random("sampling", form, draw, attempt).getrandbits(31),
                FORMS[form].example.model_json_schema(),
                step="examples",
                form=form,
                draw=draw,
                attempt=attempt,
                task=task,
                language=language,
            )

        def use(job: _Job, reply: Reply) -> None:
            try:
                self.folder.add(self._pair(job, reply))
            except Rejected:
                if job.attempt + 1 < settings.attempts:
                    pending.append((job.draw, job.attempt + 1))
                raise

        problem = self._collect(self.folder.pairs[form], settings.wanted(form), job, use, 1, settings.patience, form)
        if problem:
            raise problem

    def _collect(
        self,
        made: Sequence[Any],
        wanted: int,
        next_job: Callable[[], _Job],
        use: Callable[[_Job, Reply], None],
        per_reply: int,
        patience: int,
        name: str,
    ) -> UserError | None:
        """Requests replies until `made` has `wanted` items; `use` adds up to `per_reply` items, or raises `Rejected`.

        Returns:
            An error after `patience` consecutive rejected replies, otherwise None.
        """
        outstanding = useless = 0
        reasons: Counter[str] = Counter()

        def jobs() -> Iterator[_Job | None]:
            nonlocal outstanding
            while len(made) < wanted:
                # Enough if all pending replies are usable.
                if outstanding and len(made) + outstanding * per_reply >= wanted:
                    yield None
                else:
                    outstanding += 1
                    yield next_job()

        bar = tqdm(total=wanted, initial=len(made), desc=name, disable=not self.show_progress_bar, dynamic_ncols=True)
        with bar:
            for job, reply in self.backend.replies(jobs()):
                outstanding -= 1
                try:
                    use(job, reply)
                    useless = 0
                except Rejected as rejected:
                    reasons[str(rejected)] += 1
                    self._reject(job, str(rejected), reply)
                    useless += 1
                bar.set_postfix(rejected=reasons.total(), refresh=False)
                bar.update(len(made) - bar.n)
                if useless == patience:
                    sample = " ".join(reply.text.split())[:200]
                    return UserError(
                        f"{name}: {useless:,} unusable replies in a row (in this run: {skips(reasons)}); the last one begins "
                        f"with {sample!r}; accepted examples are in {self.folder.path}: try a higher --max_new_tokens, "
                        "or another model with another --output_dir"
                    )
        return None

    def _pair(self, job: _Job, reply: Reply) -> SyntheticPair:
        """Return the line of `pairs.jsonl`.

        Raises:
            Rejected: The reply is not an example, or a duplicate.
        """
        if reply.problem not in (None, CUT_OFF):
            raise Rejected(reply.problem)
        try:
            texts = parse_example(job.form, reply.text)
        except Rejected as error:  # an example is whole if only what follows it was cut off
            if reply.problem:
                raise Rejected(reply.problem) from error
            raise
        # Not the labels: one or two words easily occur in an evaluation set.
        checked = [texts["anchor"]] if job.form == "long-short" else list(texts.values())
        if self.excluded and (name := next(filter(None, map(self.excluded.find, checked)), None)):
            raise Rejected(f"overlapping {name}")
        pair = SyntheticPair(
            task=f"{TASK_PREFIX}{job.form}",  # type: ignore[arg-type]  # it is one of the three
            instruction=job.task,
            **texts,
            kind=FORMS[job.form].kind,
            language=job.language,
            model=self.settings.model,
            draw=job.draw,
        )
        if _asked(pair) in self.asked or _content(pair) in self.seen:
            raise Rejected("near-duplicate")
        self._remember(pair)
        return pair

    def _remember(self, pair: SyntheticPair) -> None:
        self.seen.add(_content(pair))
        self.asked.add(_asked(pair))

    def _reject(self, job: _Job, reason: str, reply: Reply) -> None:
        self.report.rejected[reason] += 1
        # A reply may contain a lone surrogate, which cannot be written to a file.
        sample = reply.text[:SAMPLE_CHARACTERS].encode(errors="replace").decode()
        kept = Rejection(step=job.step, form=job.form, draw=job.draw, attempt=job.attempt, reason=reason, reply=sample)
        self.folder.add(kept)

    def _random(self, *key: object) -> Random:
        """Return a generator for one draw; seeding with a string gives the same numbers in every process and version."""
        return Random("/".join(map(str, (self.settings.seed, *key))))


def _new_tasks(reply: Reply, seen: NearDuplicates) -> list[str]:
    """Return the new tasks in a reply, and add them to `seen`."""
    cut_off = reply.problem == CUT_OFF
    if reply.problem and not cut_off:
        raise Rejected(reply.problem)
    new = []
    # All items of a list that was cut off are usable, except for the last one.
    for task in parse_tasks(reply.text)[: -1 if cut_off else None]:
        if task not in seen:
            seen.add(task)
            new.append(task)
    if not new:
        raise Rejected("no new task")
    return new


def _content(pair: SyntheticPair) -> str:
    """Return the text that is compared for near-duplicates: short queries alone may be equal with different intents."""
    return f"{pair.anchor}\n{pair.positive}"


def _asked(pair: SyntheticPair) -> tuple[str, ...]:
    """Return the query with its instruction, which must be unique."""
    return (pair.instruction, *(words(pair.anchor) or [pair.anchor]))
