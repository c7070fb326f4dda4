"""A training run: it locks the output folder, finds the checkpoint to resume from, trains, exports and reports.

Every command has this form:

    with open_run(METHOD, arguments) as run:
        if run.finished:
            return run.output
        ...
        run.train(trainer)
        run.export(trainer, summary=report, sources=arguments.data)
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import datasets
import torch
import yaml
from filelock import FileLock, Timeout
from transformers import Trainer, set_seed
from transformers.integrations import CodeCarbonCallback, unset_hf_deepspeed_config
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from revela_hub.data.sources.report import counted
from revela_hub.data.sources.source import HUB_ADDRESS, check_apart, parse_source
from revela_hub.data.sources.unicode import printable_name
from revela_hub.errors import UserError
from revela_hub.evaluation.retrieval import METRICS
from revela_hub.files import local_path
from revela_hub.hub_cards.metadata import ModelCardMetadata
from revela_hub.hub_cards.method import Method
from revela_hub.interrupts import if_interrupted
from revela_hub.trainers.base.arguments import RunArguments
from revela_hub.trainers.base.callbacks import WallTime, clock
from revela_hub.trainers.base.checkpoints import (
    RECORD,
    RunRecord,
    checkpoints_in,
    is_complete,
    last_checkpoint,
    run_settings,
    step_of,
    to_json,
)
from revela_hub.trainers.base.distributed import from_main
from revela_hub.trainers.base.measuring import MEASUREMENTS_FOLDER, BestWeights
from revela_hub.trainers.base.outcome import OUTCOME_FILE, Outcome
from revela_hub.trainers.base.run_probe import remove_run_probe
from revela_hub.trainers.base.trainer import MethodTrainer

Rows = TypeVar("Rows")
LOCK = ".lock"
TRAINING_CURVE = "training_curve.png"
# What every run writes; a method adds its folders.
_WRITTEN = ("checkpoint-*", MEASUREMENTS_FOLDER, "*.safetensors", "*.json", "*.bin", "README.md", "*.png", "card.yaml")


@dataclass
class Run:
    """A training run that holds the lock of its output folder.

    Attributes:
        method: the training method.
        arguments: options of the run.
        record: content of `run.json`.
        checkpoint: checkpoint to resume from; None to start from scratch.
        finished: whether there is nothing to do: the run was exported, or has no steps.
        outcome: results of the run, if it was evaluated.
    """

    method: Method
    arguments: RunArguments
    record: RunRecord
    checkpoint: Path | None = None
    finished: bool = False
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
        """Read the training data and log the report. One process prepares and caches the data before the others read them."""
        with self.arguments.preparing(what):
            rows, report = load()
        summary = "text that is read during training" if isinstance(rows, datasets.IterableDataset) else str(report)
        self.arguments.log(summary)
        return rows, summary

    def train(self, trainer: MethodTrainer) -> None:
        """Train, and keep the best weights; with too few queries to compare, evaluate before and after training."""
        checkpoint = str(self.checkpoint) if self.checkpoint else None
        best = BestWeights.of_trainer(trainer, self.output, resumed=self.resumed)
        if best is not None:
            self.outcome = best.train(trainer, checkpoint)
            return
        if trainer.retrieval_task is not None and not self.resumed:
            self._log_metrics("before", trainer.evaluate())
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.retrieval_task is not None:
            self._log_metrics("after", trainer.evaluate())

    def _log_metrics(self, when: str, metrics: dict[str, float]) -> None:
        values = ", ".join(f"{name} {metrics[f'eval_{name}']:.4f}" for name in METRICS)
        self.arguments.log(f"{when} training: {values} (too few queries for a comparison)")

    def export(self, trainer: MethodTrainer, *, summary: str, sources: Iterable[object]) -> None:
        """Write the exported models with their cards, publish them if requested, and report; arguments as in `card_metadata`."""
        from revela_hub.hub_cards import write_card
        from revela_hub.hub_cards.card import CARD_METADATA, training_curve

        folders = trainer.write_models(self.output)
        trainer.save_state()
        if self.arguments.should_save:
            metadata = card_metadata(
                self.arguments, method=self.method, summary=summary, sources=map(str, sources), record=self.record
            )
            cost = describe_cost(trainer, resumed=self.resumed)
            metadata = replace(metadata, training_run=cost, co2_eq_emissions=co2_emissions(trainer))
            if self.outcome is not None:
                figures = (self.outcome.figure(self.output),)
                results, verdict = self.outcome.results(), self.outcome.explained()
                metadata = replace(metadata, results=results, verdict=verdict, figures=figures)
                self.outcome.write(self.output / OUTCOME_FILE)
            metadata.to_file(self.output / CARD_METADATA)  # read by `revela-hub publish`
            for folder in folders:
                write_card(folder, metadata, repo_id=self.arguments.hub_model_id)
            training_curve(trainer.state.log_history, self.output / TRAINING_CURVE)
        if self.arguments.push_to_hub:
            trainer.push_to_hub()
        if self.arguments.should_save:
            replace(self.record, finished=True).write(self.output)
        if self.outcome is not None and self.arguments.should_log:
            lines = [self.outcome.table(), self.outcome.sentence(), self.outcome.advice()]
            sys.stdout.write("\n" + "".join(f"{line}\n" for line in lines if line))


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
        unset_hf_deepspeed_config()  # load whole models; they are sharded when training starts
        stack.enter_context(if_interrupted(lambda: _saved(output)))
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
    if arguments.max_steps == 0 or (arguments.max_steps < 0 and arguments.num_train_epochs == 0):
        arguments.log("nothing to train: --max_steps or --num_train_epochs is 0")
        return record, None, True
    checkpoint = None
    if not arguments.resume_from_checkpoint:
        _start_from_scratch(arguments, output)
        remove_run_probe(output)
    else:
        checkpoint = _checkpoint(arguments.resume_from_checkpoint, output)
        if before is not None and before.finished and before.settings == record.settings:
            arguments.log(f"nothing to do: the run in {output} finished")
            return before, None, True
        arguments.log(
            f"resuming from {checkpoint}"
            if checkpoint
            else f"{output} has no complete checkpoint: training from scratch"
        )
    if checkpoint is not None and before is not None:
        record.changes = _changes(before, record, checkpoint)
    record.write(output)
    return record, checkpoint, False


def _checkpoint(wanted: str, output: Path) -> Path | None:
    if wanted in ("last", "true", "True"):
        return last_checkpoint(output)
    if not is_complete(Path(wanted)):
        raise UserError(f"--resume_from_checkpoint {wanted} is not a complete checkpoint")
    return Path(wanted)


def _changes(before: RunRecord, record: RunRecord, checkpoint: Path) -> list[dict[str, Any]]:
    """Warn of changed options once, and return all changes of the run."""
    changed = {
        name: [before.settings[name], value]
        for name, value in record.settings.items()
        if name in before.settings and before.settings[name] != value
    }
    if not changed:
        return before.changes
    listed = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in sorted(changed.items()))
    sys.stderr.write(f"warning: the run is resumed with other options: {listed}\n")
    return [*before.changes, {"step": step_of(checkpoint)} | changed]


def _start_from_scratch(arguments: RunArguments, output: Path) -> None:
    """Delete an earlier run's checkpoints, or raise an error if that was not requested."""
    record, checkpoints = RunRecord.read(output), checkpoints_in(output)
    if not checkpoints and (record is None or not record.finished):
        return
    if not arguments.overwrite:
        raise UserError(
            f"--output_dir {output} already contains a run: resume it with --resume_from_checkpoint last, start over with"
            " --overwrite true, or choose another folder"
        )
    for path in (*checkpoints, output / MEASUREMENTS_FOLDER):
        shutil.rmtree(path, ignore_errors=True)
    for name in (TRAINER_STATE_NAME, RECORD):
        (output / name).unlink(missing_ok=True)


def _saved(output: Path) -> str:
    """Return what an interrupted run has saved and how to continue."""
    checkpoint = last_checkpoint(output)
    if checkpoint is None:
        return "no checkpoint was saved: run the same command again to start over"
    return f"{checkpoint} was saved: resume with --resume_from_checkpoint last"


def card_metadata(
    arguments: Any, *, method: Method, summary: str, sources: Iterable[str], record: RunRecord | None = None
) -> ModelCardMetadata:
    """Return the card's metadata for a run of `revela-hub train METHOD`, without any path of this machine.

    `summary` describes the training data in one line. `sources` are their paths and ids; those that start with `hf:` are data
    sets on the Hub. `record` has the settings that changed when the run was resumed.
    """
    defaults = {
        entry.name: to_json(entry.default if entry.default_factory is MISSING else entry.default_factory())
        for entry in fields(arguments)
    }
    models = {name: value for name in method.models if (value := getattr(arguments, name)) is not None}
    always = arguments.card_settings()
    settings = {
        name: for_card(name, value)
        for name, value in (run_settings(arguments) | always).items()
        if name not in {"data", *models} and (name in always or value != defaults[name])
    }
    names = {name: path.name if (path := _local(value)) else value for name, value in models.items()}
    hub_data = {parse_source(source).path.removeprefix("hf:") for source in sources if source.startswith("hf:")}
    base = next(iter(models.values()))
    resumed = [
        f"# from step {change['step']} on: {name} {for_card(name, values[1])} (before: {for_card(name, values[0])})\n"
        for change in (record.changes if record else ())
        for name, values in change.items()
        if name not in ("step", "max_steps", "num_train_epochs")
    ]
    return ModelCardMetadata(
        method=method,
        base_model=None if _local(base) else base,
        datasets=sorted(name for name in hub_data if "/" in name and not _local(name)),
        training_data=summary,
        command=f"revela-hub {next(iter(method.commands))} --config config.yaml",
        config=yaml.safe_dump(names | settings, sort_keys=False, allow_unicode=True) + "".join(resumed),
    )


def for_card(name: str, value: Any) -> Any:
    """Return an option's value with files and folders of this machine without their parent folders."""
    if isinstance(value, list):
        return [for_card(name, item) for item in value]
    if isinstance(value, dict):
        return {key: for_card(key, item) if key in ("path", "data_files") else item for key, item in value.items()}
    if not isinstance(value, str) or not value or value.startswith(HUB_ADDRESS) or "prompt" in name:
        return value
    prefix = next((kind for kind in ("lm:", "hf:") if value.startswith(kind)), "")
    path = local_path(value.removeprefix(prefix))
    if path.is_absolute() or os.path.exists(path):
        return prefix + printable_name(path.resolve().name)
    return value


def _local(name: str) -> Path | None:
    """Return the path of a model or data set on this machine, which may be gone; None for one on the Hub."""
    path = local_path(name)
    return path if path.is_absolute() or path.exists() else None


def hardware(device: torch.device, processes: int = 1) -> str:
    """Describe the hardware: `2 x NVIDIA H100` or `CPU (2 threads, AVX2)`."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif device.type == "cpu":
        threads = torch.get_num_threads()
        name = f"CPU ({threads} thread{'s' * (threads > 1)}, {torch.backends.cpu.get_cpu_capability()})"
    else:
        name = device.type.upper()
    return f"{processes} x {name}" if processes > 1 else name


def describe_cost(trainer: Trainer, *, resumed: bool = False) -> str:
    """Return the steps, duration, hardware and energy of a run as sentences; codecarbon knows only the part since it was resumed."""
    processes = trainer.args.world_size * max(trainer.args.n_gpu, 1)
    took = next((each.seconds for each in trainer.callback_handler.callbacks if isinstance(each, WallTime)), 0.0)
    where = hardware(trainer.args.device, processes)
    text = f"Trained for {counted(trainer.state.global_step, 'step')} in {clock(took)} on {where}."
    if emissions := co2_emissions(trainer):
        text += (
            f" codecarbon estimates {emissions['energy_consumed'] * 1000:.3g} Wh of energy and"
            f" {emissions['emissions']:.3g} g of CO2"
        )
        text += " since the run was last resumed." if resumed else "."
    return text


def co2_emissions(trainer: Trainer) -> dict[str, Any]:
    """Return the Hub's `co2_eq_emissions` as codecarbon measured them (`--report_to codecarbon`): grams and kWh; empty without it.

    The place of the machine, which codecarbon also finds out, is left out.
    """
    trackers = [each.tracker for each in trainer.callback_handler.callbacks if isinstance(each, CodeCarbonCallback)]
    found = getattr(trackers[0], "final_emissions_data", None) if trackers else None
    if found is None:
        return {}
    used = found.gpu_model or found.cpu_model
    return {
        "emissions": float(f"{found.emissions * 1000:.4g}"),
        "energy_consumed": float(f"{found.energy_consumed:.4g}"),
        "source": "codecarbon",
        "training_type": "fine-tuning",
        **({"hardware_used": used} if used else {}),
    }
