"""The trainings that `adapt` tries. Each one is a run of a training command, with a time limit, in its own folder.

All start from the base retriever. A run measures itself on the dev half of the probe and exports its best weights or
the base model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer

from revela_hub.adaptation.time_limit import TimeLimit
from revela_hub.data.sources.report import counted
from revela_hub.files import atomic
from revela_hub.loading import module_types
from revela_hub.retrieval.bm25 import BM25Settings
from revela_hub.retrieval.encoder import limit_length, model_in
from revela_hub.retrieval.hybrid import BM25_WEIGHT
from revela_hub.trainers.base.retriever import RETRIEVER, load_retriever
from revela_hub.trainers.pair_tuning.data import PairReport, read_labelled_pairs

UNLIMITED_STEPS = 1_000_000
QUESTIONS_SHARE = 0.3
"""Time for a language model's questions, as a part of the time of the training on them."""


def read_labels(path: str | None) -> tuple[Dataset, PairReport] | None:
    """Read labelled pairs, if given, and count them."""
    return read_labelled_pairs(path) if path else None


@dataclass(frozen=True)
class Inputs:
    """The inputs that all candidates share.

    Attributes:
        retriever: base retriever.
        data: text, with the options of its sources.
        probe: folder of the probe with the dev queries.
        output: folder for the runs.
        lm: language model, if given.
        labels: labelled pairs, if given.
        seed: random seed.
        passages: number of passages that the teacher ranks.
        bm25_weight: weight of BM25 in the base hybrid, the teacher.
        learning_rate: of the trainings on pairs; the others have a part of it.
        max_length: maximum number of tokens per text; None for the retriever's own.
        pairs: what `read_labels` returns for the labels.
        training_length: the same in training: less on a slow machine, which otherwise takes too few steps. None for `max_length`.
        options: other options of all runs: `trust_remote_code`, `exclude`, ...
        examples: real queries without labels, which the probe's queries are made to resemble.
        bm25: settings of BM25, for the language of the text.
    """

    retriever: str
    data: list[str]
    probe: Path
    output: Path
    lm: str | None
    labels: str | None
    seed: int
    passages: int
    learning_rate: float
    max_length: int | None
    options: dict[str, Any]
    bm25_weight: float = BM25_WEIGHT
    examples: tuple[str, ...] = ()
    bm25: BM25Settings = field(default_factory=BM25Settings)
    pairs: tuple[Dataset, PairReport] | None = None
    training_length: int | None = None

    @property
    def length(self) -> int | None:
        """Maximum number of tokens per text in training."""
        return self.training_length or self.max_length

    @property
    def static(self) -> bool:
        """Whether the retriever is a static model."""
        return is_static(self.retriever)

    def common(self, name: str) -> dict[str, Any]:
        """Return the arguments of a run."""
        rate = self.learning_rate * RATE_FACTORS.get(name, 1.0)
        folder = self.output / name
        resumed = {"resume_from_checkpoint": "last"} if folder.exists() else {}
        return resumed | {
            "retriever": self.retriever,
            "output_dir": str(folder),
            "probe": str(self.probe),
            "max_steps": UNLIMITED_STEPS,  # the time limit ends the run
            "eval_steps": UNLIMITED_STEPS,
            "save_strategy": "steps",
            "save_steps": UNLIMITED_STEPS,
            "save_total_limit": 1,
            "learning_rate": rate,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 5,
            "report_to": "none",
            "quiet": True,
            "disable_tqdm": True,
            "seed": self.seed,
        }


def is_static(retriever: str) -> bool:
    """Whether a model is a table of token vectors, without a transformer."""
    kinds = module_types(model_in(retriever)).values()
    return any(kind.endswith("StaticEmbedding") for kind in kinds) and not any(
        kind.endswith("Transformer") for kind in kinds
    )


def default_rate(retriever: str) -> float:
    """Return the learning rate of the trainings on pairs."""
    return STATIC_RATE if is_static(retriever) else RATE


Train = Callable[[Inputs, float], Path]
"""Trains for some seconds, or resumes; returns the retriever's folder."""


def natural_pairs(inputs: Inputs, seconds: float) -> Path:
    """Train on the natural pairs of the text."""
    return _train_pairs("natural_pairs", inputs, seconds, data=inputs.data)


def labelled_pairs(inputs: Inputs, seconds: float) -> Path:
    """Train on the labelled pairs; at most three epochs."""
    return _train_pairs("labelled_pairs", inputs, seconds, pairs=inputs.labels, max_steps=-1, num_train_epochs=3.0)


def _train_pairs(name: str, inputs: Inputs, seconds: float, **given: Any) -> Path:
    from revela_hub.trainers.pair_tuning.command import Arguments, train

    options = (
        inputs.common(name)
        | inputs.options
        | (STATIC_PAIRS if inputs.static else PAIRS)
        | {"max_length": inputs.length}
        | given
    )
    return train(Arguments(**options), callbacks=[TimeLimit(inputs.output / name, seconds)]) / RETRIEVER


def distillation(inputs: Inputs, seconds: float) -> Path:
    """Learn the base hybrid's scores of made queries."""
    from revela_hub.adaptation.distillation import PASSAGES_PER_QUESTION, distillation_loss, distillation_rows
    from revela_hub.evaluation.probe_folder import read_probe_task
    from revela_hub.trainers.base.run import open_run
    from revela_hub.trainers.pair_tuning import PAIR_TUNING
    from revela_hub.trainers.pair_tuning.command import Arguments
    from revela_hub.trainers.pair_tuning.data import TooFewPairs, build_text_pairs
    from revela_hub.trainers.pair_tuning.trainer import PairsTrainer

    arguments = Arguments(data=inputs.data, **inputs.common("distillation"), **inputs.options, **DISTILLATION)
    arguments.max_length = inputs.length
    with open_run(PAIR_TUNING, arguments) as run:
        if run.finished:
            return run.output / RETRIEVER
        trust = arguments.trust_remote_code
        model = load_retriever(inputs.retriever, max_length=inputs.max_length, trust_remote_code=trust)
        folder = run.output / "rows"
        if not folder.exists():  # a resumed run trains on the same rows
            pairs = build_text_pairs(arguments.sources(inputs.probe), seed=inputs.seed, cache_dir=arguments.cache_dir)
            asking: dict[str, Any] = {
                "questions": question_writer(inputs.lm, trust),
                "seconds": QUESTIONS_SHARE * seconds,
                "log": arguments.log,
            }
            teaching: dict[str, Any] = {"bm25_weight": inputs.bm25_weight, "bm25": inputs.bm25}
            rows = distillation_rows(pairs, model, most=inputs.passages, seed=inputs.seed, **teaching, **asking)
            if not len(rows):
                raise TooFewPairs(f"fewer than {PASSAGES_PER_QUESTION} passages are left for it")
            with atomic(folder) as part:
                rows.save_to_disk(str(part))
        rows = Dataset.load_from_disk(str(folder))
        if inputs.length:  # the teacher read whole texts
            limit_length(model, inputs.length, inputs.retriever)
        trainer = PairsTrainer(
            model,
            arguments,
            train_dataset=rows,
            loss=distillation_loss,
            retrieval_task=read_probe_task(inputs.probe),
            callbacks=[TimeLimit(run.output, seconds)],
        )
        run.train(trainer)
        run.export(trainer, summary=f"{counted(len(rows), 'made query')}", sources=inputs.data)
        return run.output / RETRIEVER


def revela(inputs: Inputs, seconds: float) -> Path:
    """Train with Revela, joint reading and a frozen language model."""
    from revela_hub.trainers.revela.command import Arguments, train

    assert inputs.lm is not None
    arguments = Arguments(data=inputs.data, lm=inputs.lm, **inputs.common("revela"), **inputs.options, **REVELA)
    return train(arguments, callbacks=[TimeLimit(inputs.output / "revela", seconds)]) / RETRIEVER


def question_writer(lm: str | None, trust_remote_code: bool) -> Any:  # noqa: ANN401 (a backend, or None)
    """Return a language model that writes questions, if one is given."""
    if lm is None:
        return None
    from revela_hub.data.synthesis.backends import LocalModel, Sampling

    sampling = Sampling(temperature=0.7, max_new_tokens=64)
    return LocalModel(lm, sampling, trust_remote_code=trust_remote_code)


def average(models: list[SentenceTransformer], folder: Path) -> None:
    """Write a retriever with the mean of the weights of several ones, the first of which is changed."""
    mean, states = models[0], [model.state_dict() for model in models]
    # All means are computed before any is written, because tied weights have several names.
    means = {
        key: sum(state[key] for state in states) / len(states)
        for key, value in states[0].items()
        if value.is_floating_point()
    }
    mean.load_state_dict(means, strict=False)
    mean.save_pretrained(str(folder), create_model_card=False)


RATE, STATIC_RATE = 5e-5, 1e-2
"""Learning rates of the trainings on pairs; a static model has one vector for each token, which few of the texts change."""
RATE_FACTORS = {"distillation": 0.4, "revela": 0.2}
"""Learning rates as parts of that of the pairs, where they differ. Ours, as the settings below."""
PAIRS: dict[str, Any] = {"per_device_train_batch_size": 32}
STATIC_PAIRS: dict[str, Any] = {"per_device_train_batch_size": 256, "mini_batch_size": 256}
DISTILLATION: dict[str, Any] = {"per_device_train_batch_size": 8}
REVELA: dict[str, Any] = {
    "reading": "joint",
    "lm_training": "frozen",
    "lora_rank": 0,
    "group_size": 8,
    "gradient_accumulation_steps": 1,
}
"""Settings of each kind of run. The pairs' are those of the benchmark in benchmarks/adaptation; the others are ours."""
