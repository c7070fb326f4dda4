"""The trainings that `adapt` tries: each one is a run of a training command with a time limit, in a folder of its own.

All start from the base retriever. A run measures itself on the dev half of the probe, and exports its best weights or
the base model to `RETRIEVER` in its folder.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from revela_hub.adaptation.distillation import PASSAGES_PER_QUESTION, distillation_loss, distillation_rows
from revela_hub.adaptation.options import AdaptOptions
from revela_hub.adaptation.plan import BATCH_SIZE, Plan, pairs_in_memory
from revela_hub.data.sources.report import counted
from revela_hub.files import atomic
from revela_hub.loading import module_types
from revela_hub.output import is_quiet, progress_bar
from revela_hub.retrieval.bm25 import BM25Settings
from revela_hub.retrieval.encoder import limit_length, model_in
from revela_hub.retrieval.hybrid import BM25_WEIGHT
from revela_hub.trainers.base.retriever import load_retriever

RATE, STATIC_RATE = 5e-5, 1e-2
"""Learning rates of the trainings on pairs; a static model has one vector for each token, which few of the texts change."""
UNLIMITED_STEPS = 1_000_000
QUESTIONS_FRACTION = 0.3
"""Time for a language model's questions, as a fraction of the time of the training on them."""
EVALUATIONS = 3


@dataclass
class Inputs:
    """What all trainings share: `probe` is the folder with the dev queries, `labels` the file of the labelled pairs to train on.

    The settings of BM25 and its weight are those of the teacher, the hybrid of BM25 and the base retriever.
    """

    options: AdaptOptions
    plan: Plan
    probe: Path
    labels: str | None
    bm25: BM25Settings
    bm25_weight: float = BM25_WEIGHT

    def arguments(self, folder: Path, *, rate: float = 1.0, **others: Any) -> dict[str, Any]:
        """Return the options of a run. `rate` is its learning rate as a fraction of that of the trainings on pairs."""
        options = self.options
        shared = "retriever kind text_column exclude max_documents cache_dir trust_remote_code seed".split()
        return {
            **{name: getattr(options, name) for name in shared},
            "output_dir": str(folder),
            "resume_from_checkpoint": "last" if folder.exists() else None,
            "probe": str(self.probe),
            "max_steps": UNLIMITED_STEPS,  # the time limit ends the run
            "eval_steps": UNLIMITED_STEPS,
            "save_steps": UNLIMITED_STEPS,
            "save_total_limit": 1,
            "learning_rate": (options.learning_rate or RATE) * rate,  # `adapt` has set it
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 5,
            "quiet": True,
            **others,
        }


def natural_pairs(inputs: Inputs, folder: Path, seconds: float) -> None:
    """Train on the natural pairs of the text."""
    _train_pairs(inputs, folder, seconds, data=inputs.options.data)


def labelled_pairs(inputs: Inputs, folder: Path, seconds: float) -> None:
    """Train on the labelled pairs; at most three epochs."""
    _train_pairs(inputs, folder, seconds, pairs=inputs.labels, max_steps=-1, num_train_epochs=3.0)


def _train_pairs(inputs: Inputs, folder: Path, seconds: float, **given: Any) -> None:
    from revela_hub.trainers.pair_tuning.command import Arguments, train

    length = inputs.plan.training_length
    batch, part = BATCH_SIZE, pairs_in_memory(length)
    if is_static(inputs.options.retriever):
        batch = part = 256
    given |= {"max_length": length, "per_device_train_batch_size": batch, "mini_batch_size": part}
    train(Arguments(**inputs.arguments(folder, **given)), callbacks=[TimeLimit(seconds)])


def distillation(inputs: Inputs, folder: Path, seconds: float) -> None:
    """Learn the base hybrid's scores of made queries."""
    from revela_hub.data.synthesis.backends import LocalModel, Sampling
    from revela_hub.evaluation.probe import read_probe_task
    from revela_hub.trainers.base.run import open_run
    from revela_hub.trainers.pair_tuning import PAIR_TUNING
    from revela_hub.trainers.pair_tuning.command import Arguments
    from revela_hub.trainers.pair_tuning.data import TooFewPairs, build_text_pairs
    from revela_hub.trainers.pair_tuning.trainer import PairsTrainer

    options, plan = inputs.options, inputs.plan
    code: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    # A row has nine texts: eight rows at once took 18 GB with a model of 118 M parameters. The gradient is that of eight rows.
    given = {"data": options.data, "max_length": plan.training_length}
    given |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    arguments = Arguments(**inputs.arguments(folder, rate=0.4, **given))
    with open_run(PAIR_TUNING, arguments) as run:
        if run.finished:
            return
        model = load_retriever(options.retriever, max_length=plan.max_length, **code)
        kept = folder / "rows"
        if not kept.exists():  # a resumed run trains on the same rows
            sampling = Sampling(temperature=0.7, max_new_tokens=64)
            rows = distillation_rows(
                build_text_pairs(arguments.sources(inputs.probe), seed=options.seed, cache_dir=options.cache_dir),
                model,
                bm25_weight=inputs.bm25_weight,
                bm25=inputs.bm25,
                most=plan.passages,
                questions=LocalModel(options.lm, sampling, **code) if options.lm else None,
                seconds=QUESTIONS_FRACTION * seconds,
                seed=options.seed,
                log=arguments.log,
            )
            if not len(rows):
                raise TooFewPairs(f"fewer than {PASSAGES_PER_QUESTION} passages are left for it")
            with atomic(kept) as part:
                rows.save_to_disk(str(part))
        if plan.training_length:  # the teacher read whole texts
            limit_length(model, plan.training_length, options.retriever)
        rows = Dataset.load_from_disk(str(kept))
        how: dict[str, Any] = {"loss": distillation_loss, "retrieval_task": read_probe_task(inputs.probe)}
        trainer = PairsTrainer(model, arguments, train_dataset=rows, callbacks=[TimeLimit(seconds)], **how)
        run.train(trainer)
        run.export(trainer, summary=counted(len(rows), "made query"), sources=options.data)


def revela(inputs: Inputs, folder: Path, seconds: float) -> None:
    """Train with Revela, joint reading and a frozen language model."""
    from revela_hub.trainers.revela.command import Arguments, train

    settings = {"reading": "joint", "lm_training": "frozen", "lora_rank": 0, "group_size": 8}
    settings |= {"gradient_accumulation_steps": 1, "data": inputs.options.data, "lm": inputs.options.lm}
    train(Arguments(**inputs.arguments(folder, rate=0.2, **settings)), callbacks=[TimeLimit(seconds)])


CANDIDATES: dict[str, Callable[[Inputs, Path, float], object]] = {
    "labelled_pairs": labelled_pairs,
    "natural_pairs": natural_pairs,
    "distillation": distillation,
    "revela": revela,
}
"""The candidates, the most promising first: each trains for some seconds, or resumes, and writes the retriever to a folder.
Their settings and learning rates were chosen in benchmarks/adaptation."""
TIME_WEIGHTS = {"labelled_pairs": 0.3, "natural_pairs": 0.4, "distillation": 0.3, "revela": 0.4}
"""Relative time of each candidate."""


def possible(options: AdaptOptions) -> dict[str, float]:
    """Return the candidates that the options allow, and their relative times."""
    # Revela trains a transformer.
    missing = {"labelled_pairs": not options.labels, "revela": not options.lm or is_static(options.retriever)}
    return {name: TIME_WEIGHTS[name] for name in CANDIDATES if not missing.get(name)}


def is_static(retriever: str) -> bool:
    """Whether a model is a table of token vectors, without a transformer."""
    kinds = {kind.rpartition(".")[2] for kind in module_types(model_in(retriever)).values()}
    return "StaticEmbedding" in kinds and "Transformer" not in kinds


def default_rate(retriever: str) -> float:
    """Return the learning rate of the trainings on pairs."""
    return STATIC_RATE if is_static(retriever) else RATE


class TimeLimit(TrainerCallback, ExportableState):
    """Stop after some seconds of training, without evaluations, and evaluate and save three times; a resumed run continues to count."""

    def __init__(self, seconds: float) -> None:
        self.limit, self.spent, self.mark = seconds, 0.0, 0.0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"args": {"seconds": self.limit}, "attributes": {"spent": self.spent}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Continue from the time of the checkpoint."""
        kept = cast(dict[str, Any], state.stateful_callbacks)
        self.spent = kept.get(type(self).__name__, self.state())["attributes"]["spent"]
        kept[type(self).__name__] = self.state()
        shown = "Training: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} s"
        self.bar = progress_bar(show=not is_quiet(), total=round(self.limit), bar_format=shown, leave=False)
        self.mark = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Evaluate and save after each third, and stop after the last."""
        now = time.monotonic()
        before, self.spent, self.mark = self.spent, self.spent + now - self.mark, now
        self.bar.update(min(int(self.spent), round(self.limit)) - self.bar.n)
        done, part = (int(EVALUATIONS * spent / self.limit) for spent in (before, self.spent))
        if part > done:
            control.should_evaluate = control.should_save = True
            control.should_training_stop = part >= EVALUATIONS

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Remove the progress bar."""
        self.bar.close()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Do not count evaluations and checkpoints, which come before this call."""
        self.mark = time.monotonic()
