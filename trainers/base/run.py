"""A training run: it locks the output folder, finds the checkpoint to resume from, trains, exports and reports.

Every command has this form:

    with open_run(METHOD, arguments) as run:
        if run.finished:
            return run.output
        ...
        run.train(trainer)
        run.export(trainer, summary=report, sources=arguments.data)
"""

import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import datasets
from filelock import FileLock, Timeout
from transformers import set_seed
from transformers.utils import logging

from revela_hub.data.sources.source import check_apart
from revela_hub.errors import UserError
from revela_hub.hub_cards.card import CARD_METADATA
from revela_hub.hub_cards.metadata import for_card, hub_datasets
from revela_hub.hub_cards.method import Method
from revela_hub.interrupts import if_interrupted
from revela_hub.trainers.base.arguments import RunArguments
from revela_hub.trainers.base.checkpoints import (
    RunRecord,
    checkpoints_in,
    how_to_resume,
    is_complete,
    last_checkpoint,
    run_settings,
)
from revela_hub.trainers.base.distributed import from_main
from revela_hub.trainers.base.measuring import MEASUREMENTS_FOLDER, Outcome, train_and_select
from revela_hub.trainers.base.run_card import run_card
from revela_hub.trainers.base.run_probe import remove_run_probe
from revela_hub.trainers.base.trainer import MethodTrainer

Rows = TypeVar("Rows")
LOCK = ".lock"
# What every run writes; a method adds its folders.
_WRITTEN = ("checkpoint-*", MEASUREMENTS_FOLDER, "*.safetensors", "*.json", "*.bin", "README.md", "*.png", "card.yaml")


@dataclass
class Run:
    """A training run that holds the lock of its output folder; `outcome` are its results, if it was evaluated."""

    method: Method
    arguments: RunArguments
    record: RunRecord
    checkpoint: Path | None = None
    """Checkpoint to resume from; None to start from scratch."""
    finished: bool = False
    """Whether there is nothing to do: the run was exported."""
    outcome: Outcome | None = None

    @property
    def output(self) -> Path:
        """Output folder."""
        return Path(self.arguments.output_dir or ".")

    def read(self, rows: Rows, report: object) -> tuple[Rows, str]:
        """Log the report on the training data, and return it as text. One process prepares the data, see `data.row_cache`."""
        summary = "text that is read during training" if isinstance(rows, datasets.IterableDataset) else str(report)
        self.arguments.log(summary)
        return rows, summary

    def train(self, trainer: MethodTrainer) -> None:
        """Train; with an evaluation task, the model gets the weights to export (`measuring`)."""
        self.outcome = train_and_select(trainer, self.output, self.checkpoint)

    def export(self, trainer: MethodTrainer, *, summary: str, sources: Iterable[object]) -> None:
        """Write the exported models with their cards, and report.

        `summary` describes the training data in one line. `sources` are their paths and ids; those that start with `hf:` are data
        sets on the Hub.
        """
        found = run_card(trainer)
        card = replace(
            found,
            **({} if self.outcome is None else self.outcome.card()),
            datasets=hub_datasets(sources),
            training_data=summary,
            command=f"revela-hub {next(iter(self.method.commands))} --config config.yaml",
            config=found.config + "".join(f"# {line}\n" for line in self.record.changes),
        )
        trainer.card = card
        trainer.write_models(self.output)
        trainer.save_state()
        if not self.arguments.should_save:
            return
        card.to_file(self.output / CARD_METADATA)  # read by `revela-hub publish`
        if self.outcome is not None:
            self.outcome.write(self.output / "outcome.json")
        replace(self.record, finished=True).write(self.output)
        if self.outcome is not None:
            sys.stdout.write(f"\n{self.outcome.report()}\n")


@contextmanager
def open_run(method: Method, arguments: RunArguments) -> Iterator[Run]:
    """Lock the output folder, find the checkpoint to resume from and set the seed, before any model is loaded.

    The processes of a run share the output folder, also if they run on several nodes.
    """
    output = Path(arguments.output_dir or ".")
    with ExitStack() as stack:

        def claim() -> tuple[RunRecord, Path | None, bool]:
            _refuse_foreign(output, method)
            output.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_output(output))
            check_apart(arguments.sources(), output)
            return _opened(arguments, output)

        run = Run(method, arguments, *from_main(claim))
        if arguments.disable_tqdm:  # also for loading, writing and mapping
            logging.disable_progress_bar()
            datasets.disable_progress_bars()
        set_seed(arguments.seed)  # before fresh decoders, pooling layers and adapters are initialised
        stack.enter_context(if_interrupted(lambda: how_to_resume(output)))
        yield run


def lock_output(output: Path, file: Path | None = None) -> AbstractContextManager[object]:
    """Acquire the lock of an output folder (`file`, by default that of training runs)."""
    try:
        return FileLock(file or output / LOCK, timeout=0).acquire()
    except Timeout:
        raise UserError(f"--output_dir {output} is in use by another process: choose another folder") from None


def _refuse_foreign(output: Path, method: Method) -> None:
    """Raise a `UserError` if a run would overwrite files or folders that no run wrote."""
    if not output.is_dir() or RunRecord.read(output) is not None:
        return
    for pattern in (*_WRITTEN, *method.folders, *method.checkpoint_files):
        for path in output.glob(pattern):
            if path.is_file() or any(path.iterdir()):
                raise UserError(
                    f"--output_dir {output} contains {path.name}, which no training run wrote: choose another folder"
                )


def _opened(arguments: RunArguments, output: Path) -> tuple[RunRecord, Path | None, bool]:
    """Return the record, the checkpoint to resume from, if any, and whether there is nothing to do."""
    record, before = RunRecord(run_settings(arguments)), RunRecord.read(output)
    old = {} if before is None else before.settings
    changed = {name: value for name, value in record.settings.items() if old.get(name, value) != value}
    wanted = arguments.resume_from_checkpoint
    checkpoint = last_checkpoint(output) if wanted in ("last", "true", "True") else Path(wanted) if wanted else None
    if checkpoint is not None and not is_complete(checkpoint):
        raise UserError(f"--resume_from_checkpoint {wanted} is not a complete checkpoint")
    if not wanted:
        _start_from_scratch(arguments, output, before)
    elif before is not None and before.finished and not changed:
        arguments.log(f"nothing to do: the run in {output} finished")
        return before, None, True
    else:
        scratch = f"{output} has no complete checkpoint: training from scratch"
        arguments.log(f"resuming from {checkpoint}" if checkpoint else scratch)
    if checkpoint is not None and before is not None:
        since = checkpoint.name.replace("checkpoint-", "step ")
        changes = [
            f"from {since} on: {name} {for_card(name, value)} (before: {for_card(name, old[name])})"
            for name, value in changed.items()
        ]
        record.changes = before.changes + changes
        if changes:
            sys.stderr.write(f"warning: the run is resumed with other options: {', '.join(changes)}\n")
    record.write(output)
    return record, checkpoint, False


def _start_from_scratch(arguments: RunArguments, output: Path, before: RunRecord | None) -> None:
    """Delete an earlier run's checkpoints and probe, or raise an error if that was not requested."""
    checkpoints = checkpoints_in(output)
    if (checkpoints or (before is not None and before.finished)) and not arguments.overwrite:
        raise UserError(
            f"--output_dir {output} already contains a run: resume it with --resume_from_checkpoint last, start over with"
            " --overwrite true, or choose another folder"
        )
    for path in (*checkpoints, output / MEASUREMENTS_FOLDER):
        shutil.rmtree(path, ignore_errors=True)
    remove_run_probe(output)
