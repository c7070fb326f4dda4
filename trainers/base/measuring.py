"""Evaluates a run on a retrieval task before, during and after training, and keeps the best weights.

The queries are split in two. The dev half selects the best checkpoint and decides when to stop early. The test half compares
that checkpoint with the base model (paired bootstrap over queries), so that selection does not inflate the result. If training
did not help, the base model's weights are restored.

If the base model is itself a retriever, the average of its weights and the best weights is evaluated too (Wortsman et al., arXiv
2109.01903): it forgets less of what the queries do not cover. The average is kept unless the best checkpoint is better by more
than one standard error.

With `--export last`, evaluations do not select: the last step is exported, and no run is stopped early.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from revela_hub.data.own_folder import claim
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.hybrid_weight import fit_hybrid, halves
from revela_hub.evaluation.retrieval import Rankings, RetrievalScores, bm25_run, score_run
from revela_hub.evaluation.significance import compare_queries
from revela_hub.retrieval.disk import key_of
from revela_hub.retrieval.encoder import Encoder
from revela_hub.trainers.base.arguments import METRIC
from revela_hub.trainers.base.checkpoints import MEASUREMENTS_FOLDER
from revela_hub.trainers.base.encoder_in_training import rank_together
from revela_hub.trainers.base.outcome import Outcome
from revela_hub.trainers.base.processes import copy_from_main, from_main, full_weight
from revela_hub.trainers.base.sharding import reshard
from revela_hub.whole_files import write_text

if TYPE_CHECKING:
    from revela_hub.trainers.base.trainer import MethodTrainer

SCORES = "scores.json"
MIN_QUERIES = 4
"""Smallest number of queries for a comparison: two for selection and two for testing."""
PATIENCE = 2
"""Number of consecutive evaluations significantly below the best one that stop the run."""


@dataclass
class _History:
    """Scores so far (step -> metric -> query -> score), stored on disk for runs that resume."""

    task: str  # identity of the task that was evaluated
    scores: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    best: int = 0  # step to export: the best so far, or the last; 0 before the first evaluation

    @classmethod
    def read(cls, file: Path, task: str) -> "_History":
        """Return the stored scores if they are of this task."""
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["task"] != task:
            return cls(task)
        return cls(task, {int(step): scores for step, scores in values["scores"].items()}, values["best"])

    def write(self, file: Path) -> None:
        write_text(file, json.dumps(asdict(self)), "--output_dir")


@dataclass(frozen=True)
class _Candidate:
    """Weights that may be exported: those of an evaluated step, or their average with the base model's."""

    step: int
    scores: RetrievalScores
    rankings: Rankings | None
    averaged: bool = False

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the stored weights to average."""
        if not self.step:
            return ("start",)
        return ("start", "best") if self.averaged else ("best",)


class BestWeights(TrainerCallback):
    """Records a trainer's evaluations, stores the best weights and stops runs that get significantly worse.

    Args:
        model: model in training; its trainable weights are stored in `folder`.
        encoder: the retriever in that model, with its current weights.
        task: task to evaluate on.
        latest: returns the scores and rankings of the trainer's last evaluation.
        folder: output folder of the run.
        averages: whether the average of the base model's and the best weights may be exported.
        last: whether the last step is exported, whatever the scores.
        resumed: whether the run resumes, so that earlier evaluations count.
        main: whether this process writes files.
        log: logs a line.
    """

    def __init__(
        self,
        model: nn.Module,
        encoder: Encoder,
        task: RetrievalTask,
        latest: Callable[[], tuple[RetrievalScores, Rankings]],
        folder: Path,
        *,
        averages: bool = False,
        last: bool = False,
        resumed: bool = False,
        main: bool = True,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model, self.encoder, self.task, self.latest = model, encoder, task, latest
        self.averages, self.last, self.log = averages and not last, last, log
        self.folder, self.main = folder / MEASUREMENTS_FOLDER, main
        self.dev, self.test = halves(task.queries)
        file = self.folder / SCORES
        # All processes use the main process's scores, so that they make the same decisions.
        identity = f"{task.name} {key_of(sorted(task.queries.items()))}"
        known = resumed and file.is_file()
        self.history = from_main(lambda: _History.read(file, identity) if known else _History(identity))
        self.rankings: dict[int, Rankings] = {}  # of the base model and the best step, if evaluated by this process

    @classmethod
    def of_trainer(cls, trainer: "MethodTrainer", folder: Path, *, resumed: bool) -> "BestWeights | None":
        """Return the callback for a trainer; None without a retrieval task, or if it has too few queries for a comparison."""
        if trainer.retrieval_task is None or len(trainer.retrieval_task.queries) < MIN_QUERIES:
            return None
        return cls(
            trainer.accelerator.unwrap_model(trainer.model),
            trainer.retrieval_encoder(),
            trainer.retrieval_task,
            trainer.last_measurement,
            folder,
            averages=trainer.adapts_retriever,
            last=getattr(trainer.args, "export", "best") == "last",
            resumed=resumed,
            main=trainer.args.should_save,
            log=trainer.args.log,
        )

    def record(self, step: int, scores: RetrievalScores, rankings: Rankings) -> None:
        """Record the scores of a step, and store its weights if it may be exported or is the base model."""
        self.history.scores[step] = {metric: dict(by_query) for metric, by_query in scores.per_query.items()}
        if step and (self.last or not self.history.best or self._dev_mean(step) > self._dev_mean(self.history.best)):
            self.history.best = step
        known = self.rankings | {step: rankings}
        self.rankings = {kept: found for kept, found in known.items() if kept in (0, self.history.best)}
        self._write()
        if step in (0, self.history.best):
            self._store("best" if step else "start")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Forget the evaluations after the step that the run resumes from; if the best was one of them, choose it again."""
        step, history = state.global_step, self.history
        if not step:
            return
        history.scores = {known: scores for known, scores in history.scores.items() if known <= step}
        if history.best >= step:
            history.best = step if step in history.scores else 0
        self._write()
        if history.best == step:  # a run that was killed may have stored other weights
            self._store("best")

    def _write(self) -> None:
        """Write the scores. They are written before the weights: a resumed run forgets the scores of later steps."""
        if self.main:
            self.history.write(claim(self.folder, "--output_dir") / SCORES)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Record an evaluation, and stop the run if it got significantly worse."""
        self.record(state.global_step, *self.latest())
        best = max({0, self.history.best} & self.history.scores.keys(), key=self._dev_mean)
        if self.last or not self._significantly_worse(best):
            return
        if state.global_step < state.max_steps and not control.should_training_stop:
            self.log(
                f"stopped at step {state.global_step} of {state.max_steps}: the last {PATIENCE} evaluations are significantly"
                f" worse than {f'step {best}' if best else 'the base model'}"
            )
        control.should_training_stop = True

    def finish(self, step: int) -> Outcome:
        """Load the weights to export into the model and return the results of the run.

        The final step and step 0 must have been recorded.
        """
        start, trained = self._candidate(0), self._select()
        difference = compare_queries(self._test_scores(start.scores), self._test_scores(trained.scores))
        # If the test half shows no significant difference, the mean over all queries decides.
        higher = (
            difference.verdict == "no significant difference" and trained.scores.ndcg_at_10 > start.scores.ndcg_at_10
        )
        chosen = trained if self.last or higher or difference.verdict == "better" else start
        self._load(*chosen.weights)
        dense = chosen.rankings or rank_together(self.encoder, self.task, self.model)
        bm25 = bm25_run(self.task)
        return Outcome(
            task=self.task.name,
            queries=(len(self.test), len(self.task.queries)),
            start=start.scores,
            chosen=score_run(dense, self.task),
            step=chosen.step,
            averaged=chosen.averaged,
            last_step=step,
            difference=difference,
            bm25=score_run(bm25, self.task),
            hybrid=fit_hybrid(dense, bm25, self.task),
            curve={s: self._scores(s).ndcg_at_10 for s in sorted(self.history.scores)},
        )

    def _select(self) -> _Candidate:
        """Return the best trained weights, or their average with the base model's if that is allowed and as good."""
        best = self._candidate(self.history.best)
        if not (self.averages and best.step and self._can_average()):
            return best
        self._load("start", "best")
        rankings = rank_together(self.encoder, self.task, self.model)
        average = _Candidate(best.step, score_run(rankings, self.task), rankings, averaged=True)
        return average if self._as_good(average.scores, best.scores) else best

    def _candidate(self, step: int) -> _Candidate:
        return _Candidate(step, self._scores(step), self.rankings.get(step))

    def _scores(self, step: int) -> RetrievalScores:
        per_query = self.history.scores[step]
        means = {metric: sum(values.values()) / len(values) for metric, values in per_query.items()}
        return RetrievalScores(
            self.task.name,
            **means,
            queries=len(self.task.queries),
            documents=len(self.task.corpus),
            unanswered=0,  # dense search always returns results
            per_query=per_query,
        )

    def _dev_scores(self, step: int) -> dict[str, float]:
        scores = self.history.scores[step][METRIC]
        return {query: scores[query] for query in sorted(self.dev)}

    def _dev_mean(self, step: int) -> float:
        return sum(self._dev_scores(step).values()) / len(self.dev)

    def _test_scores(self, scores: RetrievalScores) -> dict[str, float]:
        return {query: scores.per_query[METRIC][query] for query in self.test}

    def _as_good(self, average: RetrievalScores, best: RetrievalScores) -> bool:
        """Whether the average is at most one standard error below the best weights on the dev half."""
        of_best, of_average = best.per_query[METRIC], average.per_query[METRIC]
        lost = np.array([of_best[query] - of_average[query] for query in sorted(self.dev)])
        return bool(lost.mean() <= lost.std(ddof=1) / len(lost) ** 0.5)

    def _significantly_worse(self, reference: int) -> bool:
        """Whether the last evaluations are significantly worse than that of the step `reference`."""
        last = sorted(self.history.scores)[-PATIENCE:]
        if len(last) < PATIENCE or reference in last:
            return False
        best = self._dev_scores(reference)
        return all(compare_queries(best, self._dev_scores(step), samples=1000).verdict == "worse" for step in last)

    def _store(self, name: str) -> None:
        """Store the trainable weights, gathered one by one if they are sharded."""
        weights = {}
        for parameter_name, parameter in self._trainable():
            value = full_weight(parameter)
            if self.main:
                weights[parameter_name] = value.cpu().contiguous().clone()
        if self.main:
            part = claim(self.folder, "--output_dir") / f"{name}.part"
            save_file(weights, part)
            os.replace(part, self.folder / f"{name}.safetensors")

    @torch.no_grad()
    def _load(self, *names: str) -> None:
        """Load the average of the stored weights into the model, on all processes from the main process's files.

        LoRA adapters B A start with B = 0. Averaging B, with the last A, averages the merged weights.
        """
        stored: list[dict[str, Tensor]] = []
        from_main(lambda: stored.extend(load_file(self.folder / f"{name}.safetensors") for name in names))
        for name, parameter in self._trainable():
            averaged = stored[-1:] if ".lora_A." in name else stored
            values = torch.stack([weights[name] for weights in averaged]).mean(0) if stored else None
            copy_from_main(parameter, values)

    def _can_average(self) -> bool:
        """Whether weights can be averaged with the base model's: adapters must start with B = 0, unlike those of PiSSA."""

        def starts_at_zero() -> bool:
            start = load_file(self.folder / "start.safetensors")
            adapters = {name: value for name, value in start.items() if ".lora_" in name}
            known = all(".lora_A." in name or ".lora_B." in name for name in adapters)
            return known and not any(value.any() for name, value in adapters.items() if ".lora_B." in name)

        return from_main(starts_at_zero)

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        reshard(self.model)
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
