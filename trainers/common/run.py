"""The frame of a run: its output folder, which no other run uses, where it goes on from, and what it leaves behind."""

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import datasets
from filelock import FileLock, Timeout
from transformers import set_seed
from transformers.integrations import unset_hf_deepspeed_config
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from revela_hub.errors import UserError
from revela_hub.evaluation.retrieval import METRICS
from revela_hub.trainers.common.arguments import RunArguments
from revela_hub.trainers.common.checkpoints import (
    INCOMPLETE,
    RECORD,
    Record,
    checkpoint_to_resume,
    checkpoints_in,
    remove_checkpoint,
    step_of,
)
from revela_hub.trainers.common.facts import facts_of_run
from revela_hub.trainers.common.measuring import KEPT, MIN_QUERIES, Measured
from revela_hub.trainers.common.outcome import CURVE, OUTCOME, Outcome
from revela_hub.trainers.common.processes import from_main
from revela_hub.trainers.common.settings import LENGTH, changes, run_settings
from revela_hub.trainers.common.trainer import MethodTrainer

if TYPE_CHECKING:
    from revela_hub.hub_cards import ModelCardMetadata

Rows = TypeVar("Rows")
LOCK = ".lock"
TRAINING_CURVE = "training_curve.png"
# What runs write into their output folders, which is theirs from their lock file on.
WRITTEN = (
    *("checkpoint-*", KEPT, "retriever", "lm", "embedder", "encoder", "*_encoder", "model", "dense"),
    *("sparse", "retriever_tokenizer", "lm_tokenizer", "README.md"),
    *("*.safetensors", "*.safetensors.index.json", "config*.json", "generation_config.json", "modules.json"),
    *("sentence_bert_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "prompts.json"),
    *("adapter_config.json", "training_args.bin", "trainer_state.json", "card.yaml", "outcome.json", "[0-9]_*"),
    *(LOCK, RECORD, INCOMPLETE, TRAINING_CURVE, CURVE),
)


@dataclass
class Run:
    """A run that has its output folder.

    Attributes:
        arguments: of the run.
        settings: those of them that affect the result, as they were given.
        checkpoint: what it goes on from; None from the beginning.
        nothing_to_do: whether it has ended already, or has no updates to make: the caller returns.
        outcome: what it was worth, where that was measured.
    """

    arguments: RunArguments
    settings: dict[str, Any]
    checkpoint: str | None = None
    nothing_to_do: bool = False
    outcome: Outcome | None = None

    @property
    def output(self) -> Path:
        """The output folder."""
        return Path(self.arguments.output_dir or ".")

    @property
    def resumed(self) -> bool:
        """Whether it goes on from a checkpoint."""
        return self.checkpoint is not None

    def read(self, what: str, load: Callable[[], tuple[Rows, object]]) -> tuple[Rows, str]:
        """Reads the training data, on a node's first process before the others, and says what was read.

        Args:
            what: is done, for the log.
            load: returns the data and the report.
        """
        with self.arguments.main_process_first(desc=what):
            rows, report = load()
        self.arguments.say(report)
        return rows, str(report)

    def train(self, trainer: MethodTrainer) -> None:
        """Trains; where there is a task, measures before, during and after, and leaves the best weights in the model."""
        if trainer.retrieval_task is None:
            trainer.train(resume_from_checkpoint=self.checkpoint)
            return
        measured = self._measured(trainer)
        if measured is not None:
            trainer.add_callback(measured)
        if not self.resumed:
            metrics = trainer.evaluate()
            if measured is None:
                self._say("before", metrics)
        trainer.train(resume_from_checkpoint=self.checkpoint)
        if measured is None:
            self._say("after", trainer.evaluate())
            return
        if trainer.state.global_step not in measured.memory.scores:
            trainer.evaluate()
        if 0 in measured.memory.scores:  # else it was resumed without what it measured before
            keep_worse = getattr(self.arguments, "keep_worse", False)
            self.outcome = measured.finish(trainer.state.global_step, keep_worse=keep_worse)

    def _measured(self, trainer: MethodTrainer) -> Measured | None:
        """The callback that notes what the trainer measures; None where the queries are too few to tell anything."""
        task = trainer.retrieval_task
        if task is None or len(task.queries) < MIN_QUERIES:
            return None
        return Measured(
            trainer.accelerator.unwrap_model(trainer.model),
            trainer.retrieval_encoder(),
            task,
            trainer.last_measurement,
            self.output,
            averages=trainer.adapts_retriever,
            resumed=self.resumed,
            main=trainer.is_world_process_zero(),
        )

    def _say(self, when: str, metrics: dict[str, float]) -> None:
        shown = [f"{name} {metrics[f'eval_{name}']:.4f}" for name in METRICS]
        self.arguments.say(f"{when} training: {', '.join(shown)} (too few queries to tell whether it helps)")

    def export(self, trainer: MethodTrainer, *, models: Sequence[str], summary: str, sources: Iterable[object]) -> None:
        """Writes the folders for readers with their model cards, and publishes them if asked.

        Args:
            trainer: of the method, trained.
            models: the arguments that name the models it starts from; the first is the model of the card.
            summary: of the training data, in words.
            sources: paths and ids of the training data.
        """
        from revela_hub.hub_cards import write_card
        from revela_hub.hub_cards.card import CARD_METADATA

        folders = trainer.write_models(self.output)
        if self.arguments.should_save:
            metadata = self._card_metadata(trainer, models=models, summary=summary, sources=map(str, sources))
            metadata.to_file(self.output / CARD_METADATA)  # `revela-hub publish` reads it
            for folder in folders:
                write_card(folder, metadata, repo_id=self.arguments.hub_model_id)
        if self.arguments.push_to_hub:
            trainer.push_to_hub()

    def _card_metadata(self, trainer: MethodTrainer, **of_the_method: Any) -> "ModelCardMetadata":
        """What the card says of the run; for the arguments see `facts_of_run`."""
        metadata = facts_of_run(self.arguments, method=trainer.method, record=trainer.record, **of_the_method)
        if self.outcome is None:
            return metadata
        figures = (self.outcome.figure(self.output),)
        return replace(metadata, results=self.outcome.results(), verdict=self.outcome.explained(), figures=figures)

    def report(self, trainer: MethodTrainer) -> Path:
        """Draws the training curve, notes that the run has ended, and says what it was worth.

        Returns:
            The output folder.
        """
        from revela_hub.hub_cards.figures import training_curve

        trainer.save_state()
        if self.arguments.should_save:
            training_curve(trainer.state.log_history, self.output / TRAINING_CURVE)
            if self.outcome is not None:
                self.outcome.write(self.output / OUTCOME)
            Record(self.settings, finished=True).write(self.output)
        if self.outcome is not None and self.arguments.should_log:
            said = [self.outcome.table(), self.outcome.sentence(), self.outcome.advice()]
            sys.stdout.write("\n" + "".join(f"{text}\n" for text in said if text))
        return self.output


@contextmanager
def open_run(arguments: RunArguments) -> Iterator[Run]:
    """Takes the output folder, finds the checkpoint to go on from, and sets the seed: all before anything is loaded.

    Raises:
        UserError: the folder cannot be written to, holds a run already or files of the user, or is another process's.
    """
    with ExitStack() as stack:
        output = Path(arguments.output_dir or ".")
        from_main(lambda: refuse_foreign(output))
        try:
            output.mkdir(parents=True, exist_ok=True)
            if arguments.process_index == 0:
                stack.enter_context(FileLock(output / LOCK, timeout=0))
        except Timeout:
            raise UserError(
                f"another process is training into {output}: wait for it, or give another --output_dir"
            ) from None
        except OSError as error:
            raise UserError(f"cannot write to --output_dir {output}: {error.strerror}") from error
        if arguments.disable_tqdm:  # the bars of loading, writing and mapping, too
            logging.disable_progress_bar()
            datasets.disable_progress_bars()
        set_seed(arguments.seed)  # before anything is drawn: fresh decoders, pooling, adapters
        # Models are loaded whole, and sharded when the training begins: the start is measured, and one process exports.
        unset_hf_deepspeed_config()
        yield _opened(arguments, output)


def refuse_foreign(output: Path) -> None:
    """Refuses an output folder with files that no run wrote and that this one would overwrite or delete.

    Raises:
        UserError: it is one. A folder that a run has had has its lock file, which is empty, or its record.
    """
    lock = output / LOCK
    if not output.is_dir() or Record.read(output) is not None or (lock.is_file() and not lock.stat().st_size):
        return
    foreign = sorted(path for name in WRITTEN for path in output.glob(name) if not path.is_dir() or any(path.iterdir()))
    if foreign:
        raise UserError(
            f"--output_dir {output} holds {foreign[0].name}, which no training run wrote there and this one would overwrite:"
            " give another folder"
        )


def _opened(arguments: RunArguments, output: Path) -> Run:
    run = Run(arguments, run_settings(arguments))
    if arguments.max_steps == 0 or (arguments.max_steps < 0 and arguments.num_train_epochs == 0):
        arguments.say("there is nothing to train: --max_steps or --num_train_epochs is 0")
        return replace(run, nothing_to_do=True)
    if not arguments.resume_from_checkpoint:
        _begin_anew(arguments, output)
        return run
    checkpoint, passed = checkpoint_to_resume(arguments.resume_from_checkpoint, output)
    for line in passed:
        arguments.say(f"passed over {line}")
    if checkpoint is None:
        arguments.say(f"there is no complete checkpoint in {output}: the run starts from the beginning")
        return run
    if reason := _has_ended(arguments, run.settings, output, checkpoint):
        arguments.say(f"nothing to do: {reason}")
        return replace(run, nothing_to_do=True)
    arguments.say(f"resuming from {checkpoint}")
    return replace(run, checkpoint=str(checkpoint))


def _begin_anew(arguments: RunArguments, output: Path) -> None:
    """Refuses a folder that holds a run, or deletes its checkpoints."""
    traces = [
        *checkpoints_in(output),
        *(path for name in (TRAINER_STATE_NAME, RECORD) if (path := output / name).exists()),
    ]
    if traces and not arguments.overwrite:
        raise UserError(
            f"--output_dir {output} holds a run already ({traces[0].name}): go on with it by"
            " --resume_from_checkpoint last, begin anew by --overwrite true, or give another folder"
        )
    if arguments.process_index == 0:
        for path in traces:
            path.unlink() if path.is_file() else remove_checkpoint(path)
        shutil.rmtree(output / INCOMPLETE, ignore_errors=True)


def _has_ended(arguments: RunArguments, now: dict[str, Any], output: Path, checkpoint: Path) -> str | None:
    """Why a run that is to be resumed is at its end already, exports and all."""
    step = step_of(checkpoint)
    if 0 < arguments.max_steps < step:
        return f"{checkpoint.name} is beyond --max_steps {arguments.max_steps}"
    ended = Record.read(output)
    if ended is None or not ended.finished:
        return None
    same_length = all(ended.settings.get(name) == now[name] for name in LENGTH)
    if same_length and not changes(ended.settings, now, by_name=ended.places == "name"):
        return f"the run in {output} has ended, at update {step}"
    return None
