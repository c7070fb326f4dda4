"""Frame of a training run: locks the output folder, finds the checkpoint to resume from, trains, exports and reports."""

import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import datasets
from filelock import FileLock, Timeout
from transformers import TrainerState, set_seed
from transformers.integrations import unset_hf_deepspeed_config
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from revela_hub.data.own_folder import check_apart
from revela_hub.errors import UserError
from revela_hub.evaluation.retrieval import METRICS
from revela_hub.hub_cards.method import Method
from revela_hub.interrupts import if_interrupted
from revela_hub.trainers.base.arguments import RunArguments
from revela_hub.trainers.base.card import card_metadata
from revela_hub.trainers.base.checkpoints import (
    INCOMPLETE,
    MEASUREMENTS_FOLDER,
    RECORD,
    Record,
    checkpoints_in,
    last_complete,
    remove_checkpoint,
    step_of,
)
from revela_hub.trainers.base.cost import co2_emissions, describe_cost
from revela_hub.trainers.base.measuring import BestWeights
from revela_hub.trainers.base.nodes import RECEIVED_FOLDER, checkpoint_for_all, folder_owners
from revela_hub.trainers.base.outcome import OUTCOME_FILE, RETRIEVAL_CURVE, Outcome
from revela_hub.trainers.base.processes import explained, from_main, gathered, on_all, rank
from revela_hub.trainers.base.settings import LENGTH_ARGUMENTS, changes, run_settings
from revela_hub.trainers.base.trainer import MethodTrainer
from revela_hub.whole_files import naming_full_disk

Rows = TypeVar("Rows")
STREAMED_REPORT = "text that is read during training"
"""Report on training data that are streamed, and not counted."""
LOCK = ".lock"
TRAINING_CURVE = "training_curve.png"
# Files that runs of all methods write into their output folders. Once it contains their lock file, the folder belongs to them.
RUN_FILES = (
    *("checkpoint-*", MEASUREMENTS_FOLDER, "README.md"),
    *("*.safetensors", "*.safetensors.index.json", "config*.json", "generation_config.json", "modules.json"),
    *("sentence_bert_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt"),
    *("adapter_config.json", "training_args.bin", "trainer_state.json", "card.yaml", "outcome.json", "[0-9]_*"),
    *(LOCK, RECORD, INCOMPLETE, TRAINING_CURVE, RETRIEVAL_CURVE),
)


@dataclass
class Run:
    """A training run that holds the lock of its output folder.

    Attributes:
        method: the training method.
        arguments: arguments of the run.
        settings: the arguments that affect the result, as given.
        checkpoint: checkpoint to resume from; None to start from scratch.
        nothing_to_do: whether the run has already finished or has no steps to train; the caller should return.
        outcome: results of the run, if it was evaluated.
    """

    method: Method
    arguments: RunArguments
    settings: dict[str, Any]
    checkpoint: str | None = None
    nothing_to_do: bool = False
    outcome: Outcome | None = None

    @property
    def output(self) -> Path:
        """Output folder."""
        return Path(self.arguments.output_dir or ".")

    @property
    def resumed(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return self.checkpoint is not None

    def read(self, what: str, load: Callable[[], tuple[Rows, object]]) -> tuple[Rows, str]:
        """Read the training data and log the report, on each node's main process first. Each node reads its own files."""

        def read() -> tuple[Rows, object]:
            with self.arguments.main_process_first(desc=what):
                return load()

        rows, report = on_all(read)
        said = STREAMED_REPORT if isinstance(rows, datasets.IterableDataset) else str(report)
        self.arguments.log(said)
        return rows, said

    def train(self, trainer: MethodTrainer, best: BestWeights | None = None) -> None:
        """Train. With `best`, keep the best weights; with fewer queries than that needs, evaluate before and after training.

        Raises:
            UserError: the data, the model or the settings of two processes differ; the trainer's errors.
        """
        trainer.check_processes()
        if best is not None:
            self._train_measured(trainer, best)
        elif trainer.retrieval_task is None:
            trainer.train(resume_from_checkpoint=self.checkpoint)
        else:
            if not self.resumed:
                self._log_metrics("before", trainer.evaluate())
            trainer.train(resume_from_checkpoint=self.checkpoint)
            self._log_metrics("after", trainer.evaluate())

    def _train_measured(self, trainer: MethodTrainer, best: BestWeights) -> None:
        trainer.add_callback(best)
        if not self.resumed:
            trainer.evaluate()
        trainer.train(resume_from_checkpoint=self.checkpoint)
        step = trainer.state.global_step
        if step not in best.history.scores:
            trainer.evaluate()
        if 0 in best.history.scores:  # missing if the run resumed without its earlier measurements
            self.outcome = best.finish(step)
        else:
            self.arguments.log("no comparison with the base model, which was not evaluated on this task")

    def _log_metrics(self, when: str, metrics: dict[str, float]) -> None:
        values = ", ".join(f"{name} {metrics[f'eval_{name}']:.4f}" for name in METRICS)
        self.arguments.log(f"{when} training: {values} (too few queries for a comparison)")

    def export(self, trainer: MethodTrainer, *, summary: str, sources: Iterable[object]) -> None:
        """Write the exported models with their cards, and publish them if requested; arguments as in `card_metadata`."""
        from revela_hub.hub_cards import write_card
        from revela_hub.hub_cards.card import CARD_METADATA

        folders = trainer.write_models(self.output)
        if self.arguments.should_save:
            metadata = card_metadata(
                self.arguments, method=self.method, summary=summary, sources=map(str, sources), record=trainer.record
            )
            cost = describe_cost(trainer, resumed=self.resumed)
            metadata = replace(metadata, training_run=cost, co2_eq_emissions=co2_emissions(trainer))
            if self.outcome is not None:
                figures = (self.outcome.figure(self.output),)
                results, verdict = self.outcome.results(), self.outcome.explained()
                metadata = replace(metadata, results=results, verdict=verdict, figures=figures)
            metadata.to_file(self.output / CARD_METADATA)  # read by `revela-hub publish`
            for folder in folders:
                write_card(folder, metadata, repo_id=self.arguments.hub_model_id)
        if self.arguments.push_to_hub:
            trainer.push_to_hub()

    def report(self, trainer: MethodTrainer) -> None:
        """Plot the training curve, record that the run has finished, and print its results."""
        from revela_hub.hub_cards.card import training_curve

        trainer.save_state()
        if self.arguments.should_save:
            training_curve(trainer.state.log_history, self.output / TRAINING_CURVE)
            if self.outcome is not None:
                self.outcome.write(self.output / OUTCOME_FILE)
            Record(self.settings, finished=True).write(self.output)
        if self.outcome is not None and self.arguments.should_log:
            lines = [self.outcome.table(), self.outcome.sentence(), self.outcome.advice()]
            sys.stdout.write("\n" + "".join(f"{line}\n" for line in lines if line))


def in_run(method: Method) -> Callable[[Callable[..., None]], Callable[..., Path]]:
    """Turn `train(run, arguments, **options)` into `train(arguments, **options)`, which opens a run of the method.

    It returns the output folder, and does not train if there is nothing to do.
    """

    def decorate(train: Callable[..., None]) -> Callable[..., Path]:
        @wraps(train)
        def opened(arguments: Any, **options: Any) -> Path:
            with open_run(method, arguments) as run:
                if not run.nothing_to_do:
                    train(run, arguments, **options)
            return run.output

        return opened

    return decorate


@contextmanager
def open_run(method: Method, arguments: RunArguments) -> Iterator[Run]:
    """Lock the output folder, find the checkpoint to resume from and set the seed, before any model is loaded.

    Raises:
        UserError: the folder is not writable, contains a run or the user's files, or is in use by another process.
    """
    with ExitStack() as stack:
        output = Path(arguments.output_dir or ".")
        on_all(lambda: refuse_foreign(output, method))
        owners = _make_output(arguments, output)
        owns = owners[rank()] == rank()  # one process per disk
        on_all(lambda: stack.enter_context(lock_output(output)) if owns else None)
        if owns:
            stack.callback(shutil.rmtree, output / RECEIVED_FOLDER, ignore_errors=True)
        if arguments.disable_tqdm:  # also for loading, writing and mapping
            logging.disable_progress_bar()
            datasets.disable_progress_bars()
        set_seed(arguments.seed)  # before fresh decoders, pooling layers and adapters are initialised
        # Load whole models; they are sharded when training starts. The base model is evaluated and exported by one process.
        unset_hf_deepspeed_config()
        with explained(), naming_full_disk(output, "--output_dir"), if_interrupted(lambda: _kept(output)):
            run = _opened(method, arguments, output, owners)
            if not run.nothing_to_do:
                on_all(lambda: check_apart(arguments.sources(), output))
            yield run


def _kept(output: Path) -> str:
    """Return what an interrupted run has saved and how to continue."""
    checkpoint, _ = last_complete(output)
    if checkpoint is None:
        return "no checkpoint was saved: run the same command again to start over"
    return f"{checkpoint} was saved: resume with --resume_from_checkpoint last"


def _make_output(arguments: RunArguments, output: Path) -> list[int]:
    """Create the output folder on all nodes, and return its `folder_owners`."""
    try:
        owners = folder_owners(output)
    except OSError as error:
        raise UserError(f"cannot write to --output_dir {output}: {error.strerror}") from error
    for number, saves in enumerate(gathered(arguments.should_save)):
        if saves and owners[number] != number:
            raise UserError(
                f"--save_on_each_node: processes {owners[number]} and {number} have the same --output_dir {output}: remove the option"
            )
    return owners


def lock_output(output: Path, file: Path | None = None) -> AbstractContextManager[object]:
    """Acquire the lock of an output folder; raise a `UserError` if another process holds it or the folder is not writable.

    `file` is a lock file in an existing folder, by default that of training runs, which may then replace files in the folder.
    """
    try:
        return FileLock(file or output / LOCK, timeout=0).acquire()
    except Timeout:
        raise UserError(
            f"--output_dir {output} is in use by another training process: wait for it, or choose another folder"
        ) from None
    except OSError as error:
        raise UserError(f"cannot write to --output_dir {output}: {error.strerror}") from error


def refuse_foreign(output: Path, method: Method) -> None:
    """Raise a `UserError` if a run of the method would overwrite files or folders that no run wrote.

    A run's folder contains its empty lock file or its record.
    """
    lock = output / LOCK
    if not output.is_dir() or Record.read(output) is not None or (lock.is_file() and not lock.stat().st_size):
        return
    found = sorted(
        path for name in (*RUN_FILES, *method.folders, *method.checkpoint_files) for path in output.glob(name)
    )
    foreign = [path for path in found if not path.is_dir() or any(path.iterdir())]
    if foreign:
        raise UserError(
            f"--output_dir {output} contains {foreign[0].name}, which was not written by a training run and would be"
            " overwritten: choose another folder"
        )


def _opened(method: Method, arguments: RunArguments, output: Path, owners: list[int]) -> Run:
    run = Run(method, arguments, run_settings(arguments, method))
    if arguments.max_steps == 0 or (arguments.max_steps < 0 and arguments.num_train_epochs == 0):
        arguments.log("nothing to train: --max_steps or --num_train_epochs is 0")
        return replace(run, nothing_to_do=True)
    if not arguments.resume_from_checkpoint:
        owns = owners[rank()] == rank()
        on_all(lambda: _start_from_scratch(arguments, output, owns=owns))
        return run
    checkpoint, skipped, source = checkpoint_for_all(arguments.resume_from_checkpoint, output, owners)
    for line in skipped:
        arguments.log(f"skipping {line}")
    if reason := from_main(lambda: _has_finished(run, checkpoint), source):
        arguments.log(f"nothing to do: {reason}")
        return replace(run, nothing_to_do=True)
    if checkpoint is None:
        arguments.log(f"{output} has no complete checkpoint: training from scratch")
        return run
    arguments.log(f"resuming from {checkpoint}")
    return replace(run, checkpoint=str(checkpoint))


def _start_from_scratch(arguments: RunArguments, output: Path, *, owns: bool) -> None:
    """Delete an earlier run's checkpoints, or raise an error if that was not requested."""
    traces = [
        *checkpoints_in(output),
        *(path for name in (TRAINER_STATE_NAME, RECORD) if (path := output / name).exists()),
    ]
    if traces and not arguments.overwrite:
        raise UserError(
            f"--output_dir {output} already contains a run ({traces[0].name}): resume it with --resume_from_checkpoint last,"
            " start over with --overwrite true, or choose another folder"
        )
    if owns:
        for path in traces:
            path.unlink() if path.is_file() else remove_checkpoint(path)
        shutil.rmtree(output / INCOMPLETE, ignore_errors=True)


def _has_finished(run: Run, checkpoint: Path | None) -> str | None:
    """Return why a run has nothing left to do, export included; None if it has."""
    limit, epochs = run.arguments.max_steps, run.arguments.num_train_epochs
    if checkpoint is not None and 0 < limit < step_of(checkpoint):
        return f"{checkpoint.name} is beyond --max_steps {limit}"
    record = Record.read(run.output)
    if record is None or not record.finished:
        return None
    if checkpoint is not None and limit <= 0:
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if (state.epoch or 0) > math.ceil(epochs):  # a fraction of an epoch is rounded up to whole steps
            return f"{checkpoint.name} is beyond --num_train_epochs {epochs:g}"
    same_length = all(record.settings.get(name) == run.settings[name] for name in LENGTH_ARGUMENTS)
    if same_length and not changes(record.settings, run.settings, run.method):
        return f"the run in {run.output} finished" + (f" at step {step_of(checkpoint)}" if checkpoint else "")
    return None
