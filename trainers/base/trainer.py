"""Base class for all trainers: adds retrieval metrics, atomic checkpoints, signal handling and NaN checks to `transformers.Trainer`.

It comes before the library's trainer in the list of base classes: `class MyTrainer(MethodTrainer, SentenceTransformerTrainer)`.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import IterableDataset
from peft import PeftModel
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, PreTrainedModel, PrinterCallback, Trainer
from transformers.integrations import unset_hf_deepspeed_config
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput

from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.data.sources.report import counted
from revela_hub.errors import UserError, is_file_error, reason
from revela_hub.evaluation.retrieval import METRICS, Rankings, RetrievalScores, score_run
from revela_hub.internals import TrainerHooks
from revela_hub.interrupts import Interrupted
from revela_hub.paths import local_path
from revela_hub.retrieval.encoder import Encoder
from revela_hub.sdpa import varying_shapes
from revela_hub.trainers.base.adapters import UNFREEZE_REMEDY
from revela_hub.trainers.base.arguments import ProbeArguments, RunArguments
from revela_hub.trainers.base.checkpoints import (
    INCOMPLETE,
    Record,
    last_complete,
    missing_part,
    publish_checkpoint,
    rotate,
    step_of,
)
from revela_hub.trainers.base.cost import WallTime
from revela_hub.trainers.base.encoder_in_training import rank_together
from revela_hub.trainers.base.epochs import NewEpoch, SharedEpoch
from revela_hub.trainers.base.inputs import endless, first_rows, name_in, prepare_eval_dataset
from revela_hub.trainers.base.nodes import RECEIVED_FOLDER, checkpoint_for_all, copy_missing, folder_owners
from revela_hub.trainers.base.processes import from_main, gathered, is_distributed, on_all, rank
from revela_hub.trainers.base.progress import Progress, count
from revela_hub.trainers.base.publishing import Publishing
from revela_hub.trainers.base.settings import (
    LENGTH_ARGUMENTS,
    changes,
    model_settings,
    rows_digest,
    run_settings,
    sample_rows,
    weights_digest,
    without_names,
)
from revela_hub.trainers.base.sharding import Hollow, filled_copy, hollow_copy, is_sharded, prepare
from revela_hub.trainers.base.stopping import StopOnSignal

SAMPLE_ROWS = 64
"""Rows of a stream that are compared when a run resumes, and between processes."""


class MethodTrainer(Publishing, TrainerHooks, Trainer):
    """A `Trainer` whose runs can be killed, resumed and repeated.

    Args:
        *args: positional arguments of the library's trainer.
        retrieval_task: task to evaluate on, with metrics `eval_ndcg_at_10`, `eval_mrr_at_10` and `eval_recall_at_100`.
        prepare: makes rows for the collator from a data set passed to `evaluate` or `predict`; returns prepared rows unchanged.
        **kwargs: keyword arguments of the library's trainer.
    """

    args: RunArguments
    adapts_retriever: ClassVar[bool] = False
    """Whether the base model is a retriever, so that its weights can be averaged with the trained ones."""

    saves_copy: ClassVar[bool] = False
    """Whether a run with weights sharded by FSDP2 is saved from a copy of the model that has all of them (`whole_model`)."""

    adapters: PeftModel | None = None
    """Adapters of the model, which the copy shares."""

    smooths_labels: ClassVar[bool] = False
    """Whether the loss is the library's, with `label_smoothing_factor` and `compute_loss_func`."""

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
        if retrieval_task is not None:
            if kwargs.get("eval_dataset") is None and kwargs.get("evaluator") is None:
                kwargs["eval_dataset"] = {}  # the Trainer does not evaluate without one
        self._kept: dict[str, tuple[Tensor, int]] = {}
        self.record = Record({})
        self._hollow: Hollow | None = None
        self._tokens: Tensor | int = 0
        self._logged_at = time.monotonic()
        given = [*args, kwargs.get("args")]
        if not self.smooths_labels:
            self._check_loss(given, kwargs.get("compute_loss_func"))
        if kwargs.get("eval_dataset") is None and kwargs.get("evaluator") is None:
            _disable_evaluation(given)
        super().__init__(*args, **kwargs)
        self._check_folder()
        self._check_weights()
        self._check_noise()
        self._check_sampling()
        plain: Any = self.accelerator.unwrap_model(self.model)
        if self.args.load_best_model_at_end and not isinstance(
            plain, PreTrainedModel | PeftModel | SentenceTransformer
        ):
            raise UserError(
                f"{type(self).__name__} does not support --load_best_model_at_end: remove the option; with a retrieval task,"
                " `revela-hub train` exports the best weights anyway"
            )
        self.can_return_loss = True  # in an evaluation, too, whatever the columns are called
        zero = self.accelerator.state.deepspeed_plugin
        if self.saves_copy and zero is not None and zero.zero_stage == 3:
            raise UserError(
                f"{type(self).__name__} does not support ZeRO-3: use FSDP2 (examples/accelerate/fsdp.yaml), ZeRO-2, or"
                " accelerate launch --multi_gpu"
            )
        if self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.fsdp_version != 2:
            raise UserError("FSDP 1 is not supported: set fsdp_version: 2, as in examples/accelerate/fsdp.yaml")
        self._stop = StopOnSignal()
        self.remove_callback(PrinterCallback)
        for callback in (self._stop, WallTime(), Progress(self.args, self.describe_run)):
            self.add_callback(callback)
        collator: Any = self.data_collator
        if isinstance(collator, SharedEpoch):
            self.add_callback(NewEpoch(collator))

    def _check_loss(self, arguments: list[Any], function: object) -> None:
        """Raise a `UserError` for options of the library's loss, which have no effect on the method's."""
        if function is not None:
            raise UserError(f"{type(self).__name__} has its own loss: leave out compute_loss_func")
        if any(isinstance(given, RunArguments) and given.label_smoothing_factor for given in arguments):
            raise UserError("--label_smoothing_factor has no effect on this method's loss: remove the option")

    def _check_folder(self) -> None:
        """Raise a `UserError` if the result would overwrite one of the models that are trained."""
        model: Any = self.model
        output = Path(self.args.output_dir or "")
        for name in (name_in(module.config) for module in model.modules() if hasattr(module, "config")):
            if name and output.is_dir() and Path(name).is_dir() and output.samefile(name):
                raise UserError(f"--output_dir {output} is the folder of the model to train: choose another folder")

    def _check_weights(self) -> None:
        """Raise a `UserError` if all weights are frozen, or a given optimizer is not for those to train."""
        model: Any = self.model
        trained = {id(weight) for weight in model.parameters() if weight.requires_grad}
        if not trained:
            raise UserError(
                f"{self.model_names()} has no weights to train: all are frozen, {UNFREEZE_REMEDY} (for word embeddings, set"
                " update_embeddings in wordembedding_config.json to true)"
            )
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        given = {id(weight) for group in groups for weight in group["params"]}
        if given - trained and trained - given:
            raise UserError(
                "the optimizer has frozen weights and lacks weights to train, such as new adapters: pass"
                " optimizer_cls_and_kwargs=(torch.optim.AdamW, {...}) instead of optimizers, or set lora_rank to 0"
            )

    def _check_noise(self) -> None:
        """Raise a `UserError` if noise is to be added to the word embeddings of a model that does not return them."""
        model: Any = self.model
        try:
            if self.args.neftune_noise_alpha is not None:
                model.get_input_embeddings()
        except (AttributeError, NotImplementedError) as error:
            raise UserError(
                f"{type(self).__name__} does not support --neftune_noise_alpha: remove the option"
            ) from error

    def _check_sampling(self) -> None:
        """Raise a `UserError` for an order of the rows that has no effect, or that needs tokens or the number of rows."""
        this: Any = self
        strategy, rows = self.args.train_sampling_strategy, self.train_dataset
        stream, reason = isinstance(rows, IterableDataset), ""
        if isinstance(this, SentenceTransformerTrainer) and strategy != "random" and not stream:
            reason = "its batches are those of --batch_sampler"
        elif strategy in ("group_by_length", "batch_rebalance"):
            names = getattr(rows, "column_names", None) or ()
            if stream:
                reason = "a stream cannot be sorted"
            elif rows is not None and not {"input_ids", self.args.length_column_name}.intersection(names):
                reason = "its rows are not tokenized"
        if reason:
            raise UserError(
                f"{type(self).__name__} does not support --train_sampling_strategy {strategy}, because {reason}: remove the option"
            )

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Do nothing, unlike sentence-transformers' trainer: `hub_cards` writes the card after the run."""

    # --- sharded weights

    @contextmanager
    def whole_model(self, weights: dict[str, Tensor] | None = None) -> Iterator[None]:
        """Within it, `model` and `adapters` are a copy with all weights on the main process, if they are sharded.

        Args:
            weights: weights gathered from shards. Without them, all processes must call it.
        """
        model: Any = self.model
        adapters = self.adapters
        if not is_sharded(model):
            yield
            return
        if weights is None:
            weights = self.accelerator.get_state_dict(self.model_wrapped)
        if self.args.should_save:
            assert self._hollow is not None and weights is not None
            self.model, self.adapters = filled_copy(self._hollow, weights)
        try:
            yield
        finally:
            self.model, self.adapters = model, adapters

    # --- retrieval

    def retrieval_encoder(self) -> Encoder:
        """Return the retriever with its current weights, for methods that are evaluated."""
        raise NotImplementedError

    @property
    def retriever(self) -> Any:
        """The retriever with its current weights; has `encode_query` and `encode_document`."""
        return self.retrieval_encoder()

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Evaluate retrieval if there is a `retrieval_task`, and the loss if there is an evaluation data set.

        `eval_dataset` is prepared as in the constructor.
        """
        if self._to_log is not None:  # `Trainer.evaluate` calls this method for each of several data sets
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        began = time.monotonic()
        eval_dataset = self._prepared(eval_dataset)
        metrics = self._retrieval_metrics(metric_key_prefix)
        self._to_log = metrics
        try:
            if not metrics or eval_dataset or self.eval_dataset or getattr(self, "evaluator", None):
                return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics
        finally:
            self._to_log = None
            self._logged_at += time.monotonic() - began  # not part of `tokens_per_second`

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
        model = self.accelerator.unwrap_model(self.model)
        rankings = rank_together(self.retrieval_encoder(), self.retrieval_task, model)
        scores = score_run(rankings, self.retrieval_task)
        self._measurement = scores, rankings
        return {f"{prefix}_{name}": getattr(scores, name) for name in METRICS}

    def last_measurement(self) -> tuple[RetrievalScores, Rankings]:
        """The scores and rankings of the last evaluation."""
        assert self._measurement is not None
        return self._measurement

    # --- metrics

    def add_metric(self, name: str, value: Tensor) -> None:
        """Add a scalar to the next log, averaged over steps and processes, without synchronising with the device."""
        total, times = self._kept.get(name, (0.0, 0))
        self._kept[name] = (total + value.detach().float(), times + 1)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the averages of the scalars passed to `add_metric`.

        Raises:
            UserError: the loss is NaN or infinite.
        """
        if "loss" in logs:
            self._kept["tokens_per_second"] = (torch.as_tensor(self._tokens, device=self.args.device).float(), 1)
            sums = torch.stack([torch.stack([s, torch.full_like(s, n)]) for s, n in self._kept.values()])
            totals = self.accelerator.reduce(sums).tolist()
            logs |= {name: round(s / n, 6) for name, (s, n) in zip(self._kept, totals, strict=True)}
            since, self._logged_at = time.monotonic() - self._logged_at, time.monotonic()
            logs["tokens_per_second"] = round(totals[-1][0] / since)
            self._kept.clear()
            self._tokens = 0
            if not math.isfinite(logs["loss"]):
                raise UserError(self._failed(f"the loss became {logs['loss']}"))
        super().log(logs, start_time)

    # --- NaN checks

    def check_finite(self, message: str) -> None:
        """Raise a `UserError` if a weight is NaN or infinite; {what} in the message is replaced by their number and a name."""
        assert self.model is not None
        named = [(n, p.to_local() if isinstance(p, DTensor) else p) for n, p in self.model.named_parameters()]
        finite = torch.stack([torch.isfinite(p.detach()).all() for _, p in named]).tolist()
        if bad := [name for (name, _), good in zip(named, finite, strict=True) if not good]:
            what = f"{len(bad)} of {len(named)} weights are not finite (first: {bad[0]})"
            raise UserError(message.format(what=what))

    def _failed(self, what: str) -> str:
        good, _ = last_complete(Path(self.args.output_dir or "."))
        where = f"the last good checkpoint is {good}" if good else "there is no earlier checkpoint"
        return (
            f"{what} at step {self.state.global_step}: nothing is saved or exported; {where}. To fix it, try a lower"
            " --learning_rate or --bf16 false"
        )

    # --- the run

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train; see `Trainer.train`. A finished run is not changed.

        Raises:
            UserError: weights or the loss are not finite; the checkpoint is missing or damaged, or has different settings.
            Interrupted: SIGTERM or Ctrl-C stopped the run after it saved a checkpoint.
        """
        if self.train_dataset is None:
            raise UserError("train_dataset is missing")
        self.check_finite("{what}: this model cannot be trained")
        self.record = Record(self.settings())
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(self._newest_checkpoint())
        if resume_from_checkpoint:
            resume_from_checkpoint = str(local_path(str(resume_from_checkpoint)))
            self._check_resume(Path(resume_from_checkpoint))
        if self.is_fsdp_enabled:
            model: Any = self.model
            prepare(model, self.accelerator.state.fsdp_plugin)
            if self.saves_copy and self._hollow is None:
                self._hollow = hollow_copy(model, self.adapters)
        try:
            self._logged_at = time.monotonic()
            with varying_shapes():
                result: TrainOutput = super().train(resume_from_checkpoint or None, trial, ignore_keys_for_eval)
        finally:
            self._stop.restore()
            shutil.rmtree(Path(self.args.output_dir or ".") / RECEIVED_FOLDER, ignore_errors=True)
        unset_hf_deepspeed_config()  # from now on, models are loaded by one process
        if self._stop.signum:
            saved = Path(self.args.output_dir or ".") / f"checkpoint-{self.state.global_step}"
            if not saved.is_dir() and self.args.world_size == 1:  # the signal arrived after the last step
                self.save_checkpoint()
            raise Interrupted(
                f"stopped after saving {saved}: resume with --resume_from_checkpoint last", self._stop.signum
            )
        if not self.state.global_step:
            raise UserError(
                "no training steps: the data has fewer rows than one batch, and --dataloader_drop_last drops incomplete batches;"
                " lower --per_device_train_batch_size"
            )
        self.check_finite(self._failed("{what}"))
        return result

    def _newest_checkpoint(self) -> Path:
        output = Path(self.args.output_dir or ".")
        found, skipped, _ = checkpoint_for_all("last", output, folder_owners(output))
        if found is None:
            raise UserError(
                "; ".join([f"{output} has no complete checkpoint to resume from", *skipped])
                + ". Leave out resume_from_checkpoint to train from scratch"
            )
        for line in skipped:
            self.args.log(f"skipping {line}")
        return found

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect the result, which must not change when the run resumes."""
        assert self.model is not None
        frozen = weights_digest(p for p in self.model.parameters() if not p.requires_grad)
        settings = run_settings(self.args, self.method) | {"processes": self.args.world_size}
        settings |= {"train_dataset": rows_digest(self.sampled), "frozen_weights": frozen}
        for name in self.method.data:
            settings.pop(name, None)  # files may move; the digest is of their rows
        return model_settings(self.trained_config()) | settings

    def check_processes(self) -> None:
        """Check that all processes have the same data, model and settings; each node reads its own files.

        Raises:
            UserError: those of a process differ from the main process's, or each node would save weights that one process gathers.
        """
        if not is_distributed():
            return
        if self.args.save_on_each_node and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise UserError(
                "--save_on_each_node: sharded weights are gathered on the main process only: remove the option"
            )
        assert self.model is not None
        own = self.settings() | {"weights": weights_digest(self.model.parameters())}
        own["train_dataset"] = rows_digest(self.sampled, without="document")  # paths may differ between nodes
        everyone = gathered({name: value for name, value in own.items() if name not in self.method.computed_settings})
        for number, other in enumerate(everyone):
            for name, value in everyone[0].items():
                if without_names(value) != without_names(other.get(name)):
                    raise UserError(
                        f"process {number} differs from the main process in {name}: {other.get(name)!r} instead of"
                        f" {value!r}. Every node needs the same data, models and options"
                    )

    def trained_config(self) -> PreTrainedConfig:
        """Return the configuration of the model in training."""
        config: PreTrainedConfig = self.accelerator.unwrap_model(self.model).config
        return config

    def _check_resume(self, checkpoint: Path) -> None:
        """Compare the settings with the checkpoint's, and take over its list of earlier changes."""
        if missing := missing_part(checkpoint):
            raise UserError(f"{checkpoint} is not a complete checkpoint: {missing}")
        before = Record.read(checkpoint)
        assert before is not None  # checked by `missing_part`
        self.record.changes = before.changes
        changed = changes(before.settings, self.record.settings, self.method)
        if not changed:
            return
        listed = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in sorted(changed.items()))
        if set(changed) - LENGTH_ARGUMENTS and not self.args.allow_changes:
            raise UserError(
                f"{checkpoint} was trained with different settings: {listed}. Restore them, or pass --allow_changes true to resume"
                " with the new ones"
            )
        self.args.log(f"changed since {checkpoint.name}: {listed}")
        change = {"step": step_of(checkpoint)} | {name: list(values) for name, values in changed.items()}
        self.record.changes = [*before.changes, change]

    # --- logging

    def describe_run(self) -> str:
        """Return a line on the model, the device and the length of the run."""
        assert self.model is not None
        # `ds_numel`: ZeRO-3
        sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in self.model.parameters()]
        weights, trained = sum(n for n, _ in sizes), sum(n for n, trainable in sizes if trainable)
        kind = "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else "float32"
        devices = f"{self.args.world_size} x " if self.args.world_size > 1 else ""
        rows = (self.state.train_batch_size or 0) * self.args.gradient_accumulation_steps * self.args.world_size
        steps = self.state.max_steps
        tokens = self.tokens_per_row() * rows * steps
        warm_up = self.args.get_warmup_steps(steps)
        low = ""
        if warm_up > steps:
            low = f"; --warmup_steps {warm_up:,} exceeds them, so the learning rate only reaches {steps / warm_up:.0%}"
        return (
            f"training {self.model_names()}: {count(trained)} of {count(weights)} parameters, on {devices}"
            f"{self.args.device.type} in {kind}; {counted(steps, 'step')} of {counted(rows, 'row')}, about {count(tokens)} tokens{low}"
        )

    def model_names(self) -> str:
        """Return the method and the name of the base model, for the run's first line."""
        return f"{self.method.title} on {name_in(self.trained_config()) or 'a model'}"

    def tokens_per_row(self) -> float:
        """Return the mean number of tokens per row, without padding, in a sample of the data set."""
        rows = sample_rows(self.sampled, 8)
        with torch.random.fork_rng(devices=[]):
            return tokens_in(self.data_collator(rows)).item() / len(rows)

    @cached_property
    def sampled(self) -> Any:
        """The training rows, of which some are compared and counted; of a stream, the first ones."""
        rows = self.train_dataset
        return first_rows(rows, SAMPLE_ROWS) if isinstance(rows, IterableDataset) else rows

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

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Run `Trainer.training_step` and count the tokens."""
        self._tokens = self._tokens + tokens_in(inputs)
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss

    # --- checkpoints

    def write_checkpoint(self, output: Path, write: Callable[[Path], None]) -> None:
        """Write a checkpoint to a temporary folder, and move it to its name when it is complete and on the disk.

        Raises:
            UserError: weights are not finite, or the checkpoint cannot be written; earlier checkpoints are kept.
        """
        self.check_finite(self._failed("{what}"))
        beside, name = output / INCOMPLETE, f"checkpoint-{self.state.global_step}"
        try:
            owns = folder_owners(output)[rank()] == rank()
            if owns:
                shutil.rmtree(beside, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            on_all(lambda: write(beside))
            # Every process writes its random state, and some formats its part of the weights, to its own node's disk.
            copy_missing(beside / name, gives=owns, takes=self.args.should_save)
            written = from_main(time.time)
            on_all(lambda: self._publish(beside / name, output / name, written) if self.args.should_save else None)
            if owns and not self.args.should_save:
                shutil.rmtree(beside, ignore_errors=True)
        except Exception as error:
            shutil.rmtree(beside, ignore_errors=True)
            if not is_file_error(error):
                raise
            good, _ = last_complete(output)
            kept = f"; the last good checkpoint is {good}" if good else ""
            raise UserError(f"cannot write {output / name}: {reason(error)}{kept}") from error

    def _publish(self, written: Path, folder: Path, when: float) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and Path(best) == written:
            self.state.best_model_checkpoint = str(folder)
            self.state.save_to_json(str(written / TRAINER_STATE_NAME))
        self.record.write(written, when)
        publish_checkpoint(written, folder)
        rotate(folder.parent, self.args.save_total_limit or 0, self.state.best_model_checkpoint)


def _disable_evaluation(arguments: list[Any]) -> None:
    """Turn off the evaluation that a command's options ask for by default, because its data make no task."""
    for given in arguments:
        if isinstance(given, ProbeArguments):
            given.disable_evaluation()


def tokens_in(batch: dict[str, Any]) -> Tensor:
    """Return the number of tokens of a batch, without padding, as a tensor on its device."""
    masks = [v.sum() for k, v in batch.items() if k.endswith("attention_mask") and isinstance(v, Tensor)]
    # Inputs of static embeddings have no padding: the texts of a batch are concatenated.
    masks += [v.new_tensor(v.numel()) for k, v in batch.items() if k.endswith("input_ids") and v.dim() == 1]
    return torch.stack(masks).sum() if masks else torch.zeros((), dtype=torch.long)
