"""Base class of all trainers: the library's Trainer, with retrieval metrics, NaN checks, signals, and the export of a run.

It comes before the library's trainer in the list of base classes: `class MyTrainer(MethodTrainer, SentenceTransformerTrainer)`.
A method defines `method`, `retriever` and `exportable()`. Checkpoints are the Trainer's own.
"""

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from datasets import IterableDataset
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import IntervalStrategy, PrinterCallback, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.evaluation.retrieval import Rankings, RetrievalScores, score_run
from revela_hub.files import local_path
from revela_hub.hub_cards.assemble import copy_finished, export_parts, has_our_card
from revela_hub.hub_cards.card import write_card
from revela_hub.hub_cards.metadata import ModelCardMetadata
from revela_hub.hub_cards.method import Method
from revela_hub.hub_cards.repository import Destination
from revela_hub.interrupts import Interrupted
from revela_hub.loading import varying_shapes
from revela_hub.trainers.base.arguments import ProbeArguments, RunArguments
from revela_hub.trainers.base.callbacks import Progress, SharedEpoch, StopOnSignal
from revela_hub.trainers.base.checkpoints import how_to_resume, last_checkpoint
from revela_hub.trainers.base.distributed import is_sharded
from revela_hub.trainers.base.encoder_in_training import rank_together
from revela_hub.trainers.base.models import name_in
from revela_hub.trainers.base.rows import endless
from revela_hub.trainers.base.run_card import run_card

_Trainer = TypeVar("_Trainer", bound="MethodTrainer")


class MethodTrainer(Trainer):
    """A `Trainer` of a retriever.

    Args:
        args: training arguments.
        retrieval_task: task to evaluate on, with metrics `eval_ndcg_at_10`, `eval_mrr_at_10` and `eval_recall_at_100`.
        **kwargs: arguments of the library's trainer.
    """

    method: ClassVar[Method]
    args: RunArguments
    can_be_sharded: ClassVar[bool] = False
    """Whether FSDP2 may shard the model."""
    measurement: tuple[RetrievalScores, Rankings]
    """Scores and rankings of the last evaluation."""
    folders: Mapping[str, str]
    """The folders that `write_models` writes, each with the part of the model in it: by default those of the method."""

    saves_with_models: ClassVar[bool] = True
    """Whether the output folder gets a checkpoint next to the exported models."""
    given: dict[str, Any]
    card: ModelCardMetadata | None = None
    """Data of the model cards; by default those of the run: base model, data, settings, steps, time, hardware, retrieval scores."""
    resumed = False

    def __new__(cls: type[_Trainer], *args: Any, **kwargs: Any) -> _Trainer:
        """Keep the arguments of the constructor, for the card."""
        trainer = super().__new__(cls)
        bound = inspect.signature(cls.__init__).bind(trainer, *args, **kwargs)
        bound.apply_defaults()
        trainer.given = {**bound.arguments, **bound.arguments.get("kwargs", {}), "self": None}
        return trainer

    def __init__(self, *, args: RunArguments, retrieval_task: RetrievalTask | None = None, **kwargs: Any) -> None:
        self.retrieval_task, self.folders = retrieval_task, self.method.folders
        self._sums: dict[str, tuple[Tensor, int]] = {}
        if kwargs.get("eval_dataset") is None and kwargs.get("evaluator") is None:
            if retrieval_task is not None:
                kwargs["eval_dataset"] = {}  # the Trainer does not evaluate without one
            elif issubclass(type(args), ProbeArguments):  # evaluates by default, but its data make no task
                args.eval_strategy = IntervalStrategy.NO
        super().__init__(args=args, **kwargs)
        self._check_model()
        self.can_return_loss = True  # in an evaluation, too, whatever the columns are called
        self._stop = StopOnSignal()
        self.remove_callback(PrinterCallback)
        self.add_callback(self._stop)
        self.add_callback(Progress(self.args, self.describe_run))
        collator: Any = self.data_collator
        if isinstance(collator, SharedEpoch):
            self.add_callback(collator)

    def _check_model(self) -> None:
        """Raise a `UserError` if the result would overwrite the model, or the model cannot be sharded."""
        model: Any = self.model
        output = Path(self.args.output_dir or "")
        for name in (name_in(module.config) for module in model.modules() if hasattr(module, "config")):
            if name and output.is_dir() and Path(name).is_dir() and output.samefile(name):
                raise UserError(f"output_dir {output} is the folder of the model to train: choose another folder")
        zero = self.accelerator.state.deepspeed_plugin
        if (self.is_fsdp_enabled and not self.can_be_sharded) or (zero is not None and zero.zero_stage == 3):
            raise UserError(
                f"{type(self).__name__} does not support {'FSDP' if zero is None else 'ZeRO-3'}: use accelerate launch"
                " --multi_gpu, or ZeRO-2"
            )

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Do nothing, unlike sentence-transformers' trainer: `hub_cards` writes the card after the run."""

    # --- what a method defines

    @property
    def retriever(self) -> Any:
        """The retriever with its current weights, an `Encoder`: it has `encode_query` and `encode_document`."""
        raise NotImplementedError

    def exportable(self) -> Any:
        """Return a copy of the trained model, adapters merged, in the form that `method.loader` loads from a checkpoint."""
        raise NotImplementedError

    # --- evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate the loss on each evaluation data set, and then retrieval, once, if there is a `retrieval_task`."""
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        sets: dict[str, Any] = {}
        if isinstance(rows, dict):  # by name, as the Trainer does, which would call this method for each of them
            sets = {f"{metric_key_prefix}_{name}": name if eval_dataset is None else rows[name] for name in rows}
        elif rows is not None or getattr(self, "evaluator", None) is not None:
            sets[metric_key_prefix] = eval_dataset
        metrics: dict[str, float] = {}
        for prefix, part in sets.items():
            metrics |= super().evaluate(part, ignore_keys, prefix)
        if self.retrieval_task is not None:
            model = self.accelerator.unwrap_model(self.model)
            rankings = rank_together(self.retriever, self.retrieval_task, model)
            scores = score_run(rankings, self.retrieval_task)
            self.measurement = scores, rankings
            found = {f"{metric_key_prefix}_{name}": value for name, value in scores.metrics.items()}
            self.log(found)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
            metrics |= found
        return metrics

    # --- logging and NaN checks

    def add_metric(self, name: str, value: Tensor) -> None:
        """Add a scalar to the next log, averaged over steps and processes, without synchronising with the device."""
        total, times = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + value.detach().float(), times + 1)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the averages of the scalars passed to `add_metric`; a loss that is not finite ends the run."""
        if "loss" in logs:
            if self._sums:
                sums = torch.stack([torch.stack([s, torch.full_like(s, n)]) for s, n in self._sums.values()])
                totals = self.accelerator.reduce(sums).tolist()
                logs |= {name: round(s / n, 6) for name, (s, n) in zip(self._sums, totals, strict=True)}
                self._sums.clear()
            if not math.isfinite(logs["loss"]):
                raise UserError(self._not_finite(f"the loss became {logs['loss']}"))
        super().log(logs, start_time)

    def _check_finite(self) -> None:
        """Raise a `UserError` if a weight is NaN or infinite."""
        model: Any = self.model
        for name, weight in model.named_parameters():
            own = weight.to_local() if isinstance(weight, DTensor) else weight
            if not own.detach().isfinite().all():
                raise UserError(self._not_finite(f"the weight {name} is not finite"))

    def _not_finite(self, what: str) -> str:
        checkpoint = last_checkpoint(Path(self.args.output_dir or "."))
        return (
            f"{what} at step {self.state.global_step}: nothing is saved or exported; the last good checkpoint is"
            f" {checkpoint}. Try a lower learning_rate or bf16 false"
        )

    def describe_run(self) -> str:
        """Return a line on the model, the device and the length of the run."""
        model: Any = self.model
        args, steps = self.args, self.state.max_steps
        weights = [(weight.numel() / 1e6, weight.requires_grad) for weight in model.parameters()]
        total, trained = sum(size for size, _ in weights), sum(size for size, trains in weights if trains)
        names = [name_in(module.config) for module in model.modules() if hasattr(module, "config")]
        devices = (f"{args.world_size} x " if args.world_size > 1 else "") + args.device.type
        rows = (self.state.train_batch_size or 0) * args.gradient_accumulation_steps * args.world_size
        line = (
            f"training {self.method.title} on {next(filter(None, names), 'a model')}: {trained:,.1f} M of {total:,.1f} M"
            f" parameters, on {devices} in {'bf16' if args.bf16 else 'fp16' if args.fp16 else 'float32'};"
            f" {counted(steps, 'step')} of {counted(rows, 'row')}"
        )
        if (warm_up := args.get_warmup_steps(steps)) > steps:
            line += f"; warmup_steps {warm_up:,} exceeds them: the learning rate only reaches {steps / warm_up:.0%}"
        return line

    # --- training and checkpoints

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train; see `Trainer.train`. With True, resume from the newest complete checkpoint.

        Raises:
            UserError: weights or the loss are not finite, or there is no checkpoint.
            Interrupted: SIGTERM or Ctrl-C stopped the run after it saved a checkpoint.
        """
        output = Path(self.args.output_dir or ".")
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(last_checkpoint(output) or "")
            if not resume_from_checkpoint:
                raise UserError(f"{output} has no complete checkpoint to resume from")
        checkpoint = str(local_path(resume_from_checkpoint)) if resume_from_checkpoint else None
        self.resumed = checkpoint is not None
        before = [log for log in self.state.log_history if log["step"] == 0]
        try:
            with varying_shapes():
                result: TrainOutput = super().train(checkpoint, trial, ignore_keys_for_eval)
        finally:
            self._stop.restore()
        self.state.log_history[:0] = before  # the base model's scores: the Trainer starts a new log
        if self._stop.signum:
            raise Interrupted(
                f"stopped: {how_to_resume(output, 'train(resume_from_checkpoint=True)')}", self._stop.signum
            )
        if not self.state.global_step:
            raise UserError(
                "no training steps: the data has fewer rows than one batch, and dataloader_drop_last drops incomplete batches"
            )
        self._check_finite()
        return result

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's loader, with a stream shuffled and repeated, so that a resumed run skips the rows it has used."""
        rows = self.train_dataset
        if isinstance(rows, IterableDataset):
            buffer_size = 1 if self.args.train_sampling_strategy == "sequential" else self.args.shuffle_buffer
            self.train_dataset = endless(rows, self.args.seed, buffer_size)
        try:
            return super().get_train_dataloader()
        finally:
            self.train_dataset = rows

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch. A run that was killed after its last step has nothing to train; the Trainer would add a step."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:
            self.control.should_training_stop = True

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of missing weights, but not of frozen ones, and of tied ones, which a checkpoint has under their first names."""
        model: Any = self.model
        known = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        missing = sorted({*load_result.missing_keys} - {*known, *getattr(model, "all_tied_weights_keys", {})})
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint of finite weights; one that is replaced is incomplete until it is written."""
        self._check_finite()
        if self.args.should_save:
            checkpoint = Path(self.args.output_dir or ".") / f"checkpoint-{self.state.global_step}"
            (checkpoint / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state, and wait for other processes: the Trainer's state, written next, makes the checkpoint complete."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save as the Trainer does; the code to save is that of the model's class, not of the subclass that FSDP2 makes."""
        model: Any = self.model
        kind = type(model)
        if isinstance(model, FSDPModule):
            model.__class__ = kind.__mro__[2]
        try:
            super()._save(output_dir, state_dict)
        finally:
            model.__class__ = kind

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a checkpoint; a call by a user also writes the exported models, with cards."""
        super().save_model(output_dir, _internal_call)
        if not _internal_call:
            self.with_cards(self._export(local_path(output_dir or self.args.output_dir or ".")))

    def write_models(self, output: str | Path) -> list[Path]:
        """Write the exported models with cards, and a checkpoint that they can be written from, on all processes; return the models' folders."""
        if self.saves_with_models:
            self.save_model(str(local_path(output)), _internal_call=True)
        return self.with_cards(self._export(local_path(output)))

    def _export(self, output: Path) -> list[Path]:
        model: Any = self.model
        if not self.args.should_save:
            return []
        # A sharded model is loaded from the saved folder.
        loaded = None if is_sharded(model) else self.exportable()
        return export_parts(self.method, output, output, self.folders, loaded=loaded)

    def with_cards(self, folders: list[Path]) -> list[Path]:
        """Write the cards of exported folders, except over a README.md of the user, and return the folders."""
        for folder in (each for each in folders if has_our_card(each) or not (each / "README.md").exists()):
            write_card(folder, self.card or run_card(self), repo_id=self.args.hub_model_id)
        return folders

    def push_to_hub(self, repo_id: str | None = None, **options: Any) -> Any:  # type: ignore[override] # a verified model
        """Write the models, verify the retriever and upload it, and nothing else of the run; see `revela_hub.publish`.

        Files of the same names are replaced, as by the `Trainer`. Other files of an earlier model, such as weights in another format,
        are deleted, and printed; your own are kept. With `update=False`, a repository that holds files is an error.

        Args:
            repo_id: `namespace/name`; by default `args.hub_model_id`.
            **options: fields of `Destination`, such as `private`, `revision` or `token`; `update` is true by default.

        Returns:
            The published model; None except on the main process.
        """
        from revela_hub.hub_cards.upload import publish

        destination = Destination(repo_id or self.args.hub_model_id or "", **{"update": True} | options)
        folders = self.write_models(str(self.args.output_dir))
        if not self.is_world_process_zero():
            return None
        return publish(
            copy_finished, folders[0], destination, methods={self.method.name: self.method}, log=self.args.log
        )
