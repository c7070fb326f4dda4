"""Base class of all trainers: the library's Trainer, with retrieval metrics, NaN checks, signals, and the export of a run.

It comes before the library's trainer in the list of base classes: `class MyTrainer(MethodTrainer, SentenceTransformerTrainer)`.
A method defines `method`, `retriever_now()` and `exportable()`. Checkpoints are the Trainer's own.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from datasets import IterableDataset
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer
from transformers.integrations import unset_hf_deepspeed_config
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import HubStrategy, TrainOutput

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError
from revela_hub.evaluation.retrieval import METRICS, Rankings, RetrievalScores, score_run
from revela_hub.files import local_path
from revela_hub.hub_cards.method import Method
from revela_hub.interrupts import Interrupted
from revela_hub.loading import varying_shapes
from revela_hub.retrieval.encoder import Encoder
from revela_hub.trainers.base.arguments import ProbeArguments, RunArguments
from revela_hub.trainers.base.callbacks import NewEpoch, Progress, SharedEpoch, StopOnSignal, WallTime, count
from revela_hub.trainers.base.checkpoints import last_checkpoint
from revela_hub.trainers.base.distributed import is_sharded
from revela_hub.trainers.base.encoder_in_training import rank_together
from revela_hub.trainers.base.models import name_in
from revela_hub.trainers.base.rows import endless, prepare_eval_dataset

if TYPE_CHECKING:
    from revela_hub.hub_cards.assemble import Assembled, Assembly
    from revela_hub.hub_cards.upload import Published


class MethodTrainer(Trainer):
    """A `Trainer` of a retriever.

    Args:
        *args: positional arguments of the library's trainer.
        retrieval_task: task to evaluate on, with metrics `eval_ndcg_at_10`, `eval_mrr_at_10` and `eval_recall_at_100`.
        prepare: makes rows for the collator from a data set passed to `evaluate` or `predict`; returns prepared rows unchanged.
        **kwargs: keyword arguments of the library's trainer.
    """

    method: ClassVar[Method]
    args: RunArguments
    can_be_sharded: ClassVar[bool] = False
    """Whether FSDP2 and ZeRO-3 may shard the model."""
    smooths_labels: ClassVar[bool] = False
    """Whether the loss is the library's, with `label_smoothing_factor`."""

    def __init__(
        self,
        *args: Any,
        retrieval_task: RetrievalTask | None = None,
        prepare: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.retrieval_task, self.prepare = retrieval_task, prepare
        self._measurement: tuple[RetrievalScores, Rankings] | None = None
        self._to_log: dict[str, float] | None = None  # in `evaluate`, the retrieval metrics that are not logged yet
        self._sums: dict[str, tuple[Tensor, int]] = {}
        if retrieval_task is not None:
            if kwargs.get("eval_dataset") is None and kwargs.get("evaluator") is None:
                kwargs["eval_dataset"] = {}  # the Trainer does not evaluate without one
        if kwargs.get("eval_dataset") is None and kwargs.get("evaluator") is None:
            _disable_evaluation([*args, kwargs.get("args")])
        given = [value for value in (*args, kwargs.get("args")) if getattr(value, "label_smoothing_factor", 0)]
        if given and not self.smooths_labels:  # the library's `__init__` would ask the model for a `config`
            raise UserError(
                f"{type(self).__name__} has its own loss, without --label_smoothing_factor: remove the option"
            )
        super().__init__(*args, **kwargs)
        self._check_model()
        self.can_return_loss = True  # in an evaluation, too, whatever the columns are called
        self._stop = StopOnSignal()
        self.remove_callback(PrinterCallback)
        for callback in (self._stop, WallTime(), Progress(self.args, self.describe_run)):
            self.add_callback(callback)
        collator: Any = self.data_collator
        if isinstance(collator, SharedEpoch):
            self.add_callback(NewEpoch(collator))

    def _check_model(self) -> None:
        """Raise a `UserError` if nothing would be trained, the result would overwrite the model, or it cannot be sharded."""
        model: Any = self.model
        output = Path(self.args.output_dir or "")
        for name in (name_in(module.config) for module in model.modules() if hasattr(module, "config")):
            if name and output.is_dir() and Path(name).is_dir() and output.samefile(name):
                raise UserError(f"--output_dir {output} is the folder of the model to train: choose another folder")
        trained = {id(weight) for weight in model.parameters() if weight.requires_grad}
        if not trained:
            raise UserError("all weights of the model are frozen: call requires_grad_(True) on it, or load it again")
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        optimized = {id(weight) for group in groups for weight in group["params"]}
        if optimized - trained and trained - optimized:
            raise UserError(
                "the optimizer has frozen weights and lacks trained ones, such as new adapters: pass optimizer_cls_and_kwargs"
            )
        zero = self.accelerator.state.deepspeed_plugin
        if not self.can_be_sharded and (self.is_fsdp_enabled or (zero is not None and zero.zero_stage == 3)):
            raise UserError(
                f"{type(self).__name__} does not support FSDP and ZeRO-3: use accelerate launch --multi_gpu, or ZeRO-2"
            )

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Do nothing, unlike sentence-transformers' trainer: `hub_cards` writes the card after the run."""

    # --- what a method defines

    def retriever_now(self) -> Encoder:
        """Return the retriever with its current weights."""
        raise NotImplementedError

    def exportable(self) -> Any:
        """Return a copy of the trained model, adapters merged, in the form that `method.loader` loads from a checkpoint."""
        raise NotImplementedError

    @property
    def retriever(self) -> Any:
        """The retriever with its current weights; has `encode_query` and `encode_document`."""
        return self.retriever_now()

    @property
    def folders(self) -> Mapping[str, str]:
        """The folders that `write_models` writes, each with the part of the model in it."""
        return self.method.folders

    # --- evaluation

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Evaluate retrieval if there is a `retrieval_task`, and the loss if there is an evaluation data set.

        `eval_dataset` is prepared as in the constructor.
        """
        if self._to_log is not None:  # `Trainer.evaluate` calls this method for each of several data sets
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        eval_dataset = self._prepared(eval_dataset)
        metrics = self._to_log = self._retrieval_metrics(metric_key_prefix)
        try:
            if not metrics or eval_dataset or self.eval_dataset or getattr(self, "evaluator", None):
                return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics
        finally:
            self._to_log = None

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Return the Trainer's result, with the retrieval metrics, so that they are logged and callbacks see them."""
        result: Any = super().evaluation_loop(*args, **options)
        if self._to_log:
            result.metrics.update(self._to_log)
            self._to_log = {}  # of several data sets, only the first one's metrics contain them
        return result

    def predict(self, test_dataset: Any, *args: Any, **options: Any) -> Any:
        """Predict; see `Trainer.predict`. `test_dataset` is prepared as in the constructor."""
        return super().predict(self._prepared(test_dataset), *args, **options)

    def _prepared(self, rows: Any) -> Any:
        if rows is None or isinstance(rows, str) or self.prepare is None:  # a string names one of several data sets
            return rows
        return prepare_eval_dataset(rows, self.prepare)

    def _retrieval_metrics(self, prefix: str) -> dict[str, float]:
        if self.retrieval_task is None:
            return {}
        rankings = rank_together(self.retriever_now(), self.retrieval_task, self.accelerator.unwrap_model(self.model))
        scores = score_run(rankings, self.retrieval_task)
        self._measurement = scores, rankings
        return {f"{prefix}_{name}": getattr(scores, name) for name in METRICS}

    def last_measurement(self) -> tuple[RetrievalScores, Rankings]:
        """The scores and rankings of the last evaluation."""
        assert self._measurement is not None
        return self._measurement

    # --- logging and NaN checks

    def add_metric(self, name: str, value: Tensor) -> None:
        """Add a scalar to the next log, averaged over steps and processes, without synchronising with the device."""
        total, times = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + value.detach().float(), times + 1)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the averages of the scalars passed to `add_metric`."""
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
        named = [(n, p.to_local() if isinstance(p, DTensor) else p) for n, p in model.named_parameters()]
        finite = torch.stack([torch.isfinite(p.detach()).all() for _, p in named]).tolist()
        if bad := [name for (name, _), good in zip(named, finite, strict=True) if not good]:
            raise UserError(self._not_finite(f"{counted(len(bad), 'weight')} not finite (first: {bad[0]})"))

    def _not_finite(self, what: str) -> str:
        checkpoint = last_checkpoint(Path(self.args.output_dir or "."))
        return (
            f"{what} at step {self.state.global_step}: nothing is saved or exported; the last good checkpoint is"
            f" {checkpoint}. Try a lower --learning_rate or --bf16 false"
        )

    def describe_run(self) -> str:
        """Return a line on the model, the device and the length of the run."""
        model: Any = self.model
        sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]  # ds_numel: ZeRO-3
        total, trained = sum(size for size, _ in sizes), sum(size for size, trainable in sizes if trainable)
        kind = "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else "float32"
        devices = (f"{self.args.world_size} x " if self.args.world_size > 1 else "") + self.args.device.type
        names = [name_in(module.config) for module in model.modules() if hasattr(module, "config")]
        base = next(filter(None, names), "a model")
        rows = (self.state.train_batch_size or 0) * self.args.gradient_accumulation_steps * self.args.world_size
        steps, warm_up = self.state.max_steps, self.args.get_warmup_steps(self.state.max_steps)
        line = (
            f"training {self.method.title} on {base}: {count(trained)} of {count(total)} parameters, on {devices} in {kind};"
            f" {counted(steps, 'step')} of {counted(rows, 'row')}"
        )
        if warm_up > steps:
            line += f"; --warmup_steps {warm_up:,} exceeds them: the learning rate only reaches {steps / warm_up:.0%}"
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
        if self.train_dataset is None:
            raise UserError("train_dataset is missing")
        self._check_finite()
        if resume_from_checkpoint is True:
            if (newest := last_checkpoint(output)) is None:
                raise UserError(f"{output} has no complete checkpoint to resume from")
            resume_from_checkpoint = str(newest)
        try:
            with varying_shapes():
                result: TrainOutput = super().train(
                    str(local_path(resume_from_checkpoint)) if resume_from_checkpoint else None,
                    trial,
                    ignore_keys_for_eval,
                )
        finally:
            self._stop.restore()
        unset_hf_deepspeed_config()  # from now on, models are loaded by one process
        if self._stop.signum:
            saved = output / f"checkpoint-{self.state.global_step}"
            if not saved.is_dir() and self.args.world_size == 1:  # the signal arrived after the last step
                self._save_checkpoint(self.model_wrapped, None)
            raise Interrupted(
                f"stopped after saving {saved}: resume with --resume_from_checkpoint last", self._stop.signum
            )
        if not self.state.global_step:
            raise UserError(
                "no training steps: the data has fewer rows than one batch, and --dataloader_drop_last drops incomplete batches"
            )
        self._check_finite()
        return result

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's loader, with a stream shuffled and repeated, so that a resumed run skips the rows it has used."""
        rows, args, seed = self.train_dataset, self.args, self.args.seed
        if args.data_seed is not None:
            args.seed = args.data_seed  # sentence-transformers' samplers do not read it
        if isinstance(rows, IterableDataset):
            buffer_size = 1 if args.train_sampling_strategy == "sequential" else args.shuffle_buffer
            self.train_dataset = endless(rows, args.seed, buffer_size)
        try:
            return super().get_train_dataloader()
        finally:
            self.train_dataset, args.seed = rows, seed

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch. A run that was killed after its last step has nothing to train; the Trainer would add a step."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:
            self.control.should_training_stop = True

    def _left_out(self, weight: str) -> bool:
        """Return whether checkpoints do not contain this weight."""
        return False

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of missing weights, but not of tied ones, which a checkpoint has under their first names."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied and not self._left_out(name)]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _load_best_model(self) -> None:
        """Load the best checkpoint (`--load_best_model_at_end`) as a resumed run does."""
        model: Any = self.model
        if is_sharded(model):
            super()._load_best_model()
        else:
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))

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

    # --- export

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as `Trainer` does, but without publishing it or writing the token to training_args.bin."""
        from revela_hub.hub_cards.export import make_readable

        token, self.args.hub_token = self.args.hub_token, None
        try:
            super().save_model(output_dir, _internal_call=True)
        finally:
            self.args.hub_token = token
        if self.args.should_save:
            make_readable(Path(output_dir or self.args.output_dir or "."))

    def write_models(self, output: str | Path) -> list[Path]:
        """Save the model to the output folder and write the exported models; must be called by all processes.

        Returns:
            The folders that get a model card; empty except on the main process.
        """
        from revela_hub.hub_cards.assemble import export_parts

        output = local_path(output)
        self.save_model(str(output))
        if not self.args.should_save:
            return []
        return export_parts(self.method, output, output, self.folders, loaded=self._exportable())

    def _exportable(self) -> Any:
        """Return the model to export; None to load it from the saved folder, because its weights are sharded."""
        model: Any = self.model
        return None if is_sharded(model) else self.exportable()

    def assemble(self, checkpoint: Path, folder: Path, assembly: "Assembly") -> "Assembled":
        """Write the model to publish. The checkpoint has just been saved from the same weights."""
        from revela_hub.hub_cards.assemble import assemble_part

        return assemble_part(self.method, checkpoint, folder, assembly, self._exportable())

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Check the name of the repository; it is created by `push_to_hub`, and checkpoints are not uploaded."""
        self._destination()
        self.args.hub_strategy = HubStrategy.END

    def _destination(self, **options: Any) -> Any:
        from revela_hub.hub_cards.repository import Destination

        args = self.args
        if not args.output_dir or not args.hub_model_id:
            raise UserError("push_to_hub needs --hub_model_id OWNER/NAME")
        defaults = {"private": bool(args.hub_private_repo), "revision": args.hub_revision, "token": args.hub_token}
        given = {name: value for name, value in options.items() if value is not None}
        return Destination(args.hub_model_id, update=True, **defaults | given)

    def push_to_hub(  # type: ignore[override] # returns more details
        self,
        commit_message: str | None = None,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> "Published | None":
        """Assemble, verify and upload the model to `args.hub_model_id`.

        Args:
            commit_message: ignored; commit messages are generated.
            blocking: must be True.
            token: overrides `args.hub_token`, which overrides the token of `hf auth login` or HF_TOKEN.
            revision: branch; overrides `args.hub_revision`.
            private: overrides `args.hub_private_repo`.
            **kwargs: ignored; the card's metadata is read from the checkpoint's card.yaml.

        Returns:
            The published model; None except on the main process.
        """
        from revela_hub.hub_cards.assemble import Assembly
        from revela_hub.hub_cards.upload import publish

        destination = self._destination(token=token, revision=revision, private=private)
        self.save_model(self.args.output_dir)
        if not self.is_world_process_zero():
            return None
        methods = {self.method.name: self.method}
        return publish(self.assemble, str(self.args.output_dir), destination, Assembly(), methods=methods)


def _disable_evaluation(arguments: list[Any]) -> None:
    """Turn off the evaluation that a command's options ask for by default, because its data make no task."""
    for given in arguments:
        if isinstance(given, ProbeArguments):
            given.disable_evaluation()
