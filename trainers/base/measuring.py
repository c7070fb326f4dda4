"""Evaluates a run on a retrieval task before, during and after training, and keeps the best weights.

The queries are split in two. The dev half selects the best checkpoint and decides when to stop early. The test half compares
that checkpoint with the base model (paired bootstrap over queries), so that selection does not inflate the result. If training
did not help, the base model's weights are exported.

With `--export last`, evaluations do not select: the last step is exported, and no run is stopped early.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from revela_hub.evaluation.hybrid_weight import fit_hybrid, halves
from revela_hub.evaluation.retrieval import Rankings, RetrievalScores, bm25_run, score_run
from revela_hub.evaluation.significance import compare_queries
from revela_hub.trainers.base.arguments import METRIC
from revela_hub.trainers.base.distributed import copy_from_main, from_main, full_weight, reshard
from revela_hub.trainers.base.encoder_in_training import rank_together
from revela_hub.trainers.base.outcome import Outcome

if TYPE_CHECKING:
    from revela_hub.trainers.base.trainer import MethodTrainer

MEASUREMENTS_FOLDER = "measured"
"""Folder in the output folder with the scores, and the weights of the base model and of the best step."""
SCORES = "scores.json"
MIN_QUERIES = 4
"""Smallest number of queries for a comparison: two for selection and two for testing."""
PATIENCE = 3
"""Number of consecutive evaluations not above the best one that stop the run."""

PerQuery = dict[str, dict[str, float]]  # metric -> query -> score


class BestWeights(TrainerCallback):
    """Records a trainer's evaluations, keeps the best weights, and stops runs that no longer improve.

    Args:
        trainer: trainer with a retrieval task; its trainable weights are stored in `output`.
        output: output folder of the run.
        resumed: whether the run resumes, so that earlier evaluations count.
    """

    def __init__(self, trainer: "MethodTrainer", output: Path, *, resumed: bool = False) -> None:
        assert trainer.retrieval_task is not None
        self.trainer, self.task = trainer, trainer.retrieval_task
        self.folder, self.main = output / MEASUREMENTS_FOLDER, trainer.args.should_save
        self.last = getattr(trainer.args, "export", "best") == "last"
        self.dev, self.test = halves(self.task.queries)
        queries = json.dumps(sorted(self.task.queries.items()))
        self.identity = f"{self.task.name} {hashlib.sha256(queries.encode()).hexdigest()[:16]}"
        self.scores: dict[int, PerQuery] = from_main(self._read) if resumed else {}
        self.rankings: dict[int, Rankings] = {}  # of the base model and the best step, if evaluated by this process

    @classmethod
    def of_trainer(cls, trainer: "MethodTrainer", output: Path, *, resumed: bool) -> "BestWeights | None":
        """Return the callback for a trainer; None without a retrieval task, or if it has too few queries for a comparison."""
        if trainer.retrieval_task is None or len(trainer.retrieval_task.queries) < MIN_QUERIES:
            return None
        return cls(trainer, output, resumed=resumed)

    def train(self, trainer: "MethodTrainer", checkpoint: str | None) -> Outcome | None:
        """Train, load the weights to export into the model, and return the results; None if the base model was not evaluated."""
        trainer.add_callback(self)
        self._store("base")  # a resumed run, too, is built from the base model
        if checkpoint is None:
            trainer.evaluate()
        trainer.train(resume_from_checkpoint=checkpoint)
        step = trainer.state.global_step
        if step not in self.scores:
            trainer.evaluate()
        if 0 in self.scores:
            return self.finish(step)
        trainer.args.log("no comparison with the base model, which was not evaluated on this task")
        return None

    # --- during training

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Forget the evaluations after the step that the run resumes from; if the best was one of them, choose it again."""
        if not state.global_step:
            return
        best = self.best_step
        self.scores = {step: scores for step, scores in self.scores.items() if step <= state.global_step}
        if best > state.global_step:  # its weights replaced those of earlier steps
            self.scores = {step: scores for step, scores in self.scores.items() if step in (0, state.global_step)}
        if self.best_step == state.global_step:
            self._store("best")
        self._write()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Record an evaluation, and stop the run if it no longer improves."""
        step = state.global_step
        scores, rankings = self.trainer.last_measurement()
        self.scores[step] = {metric: dict(by_query) for metric, by_query in scores.per_query.items()}
        self.rankings[step] = rankings
        self.rankings = {kept: found for kept, found in self.rankings.items() if kept in (0, self.best_step)}
        self._write()  # before the weights: a resumed run forgets the scores of later steps
        if step and step == self.best_step:
            self._store("best")
        if self.last:
            return
        later = [known for known in self.scores if known > max(self.scores, key=self._dev_mean)]
        if len(later) >= PATIENCE and step < state.max_steps:
            self.trainer.args.log(f"stopped at step {step}: the last {PATIENCE} evaluations are not above the best one")
            control.should_training_stop = True

    @property
    def best_step(self) -> int:
        """The best step after training started, or the last one with `--export last`; 0 before the first evaluation."""
        steps = [step for step in sorted(self.scores) if step]
        return max(steps, key=int if self.last else self._dev_mean, default=0)

    def _dev_mean(self, step: int) -> float:
        scores = self.scores[step][METRIC]
        return sum(scores[query] for query in sorted(self.dev)) / len(self.dev)

    # --- after training

    def finish(self, last_step: int) -> Outcome:
        """Load the weights to export into the model and return the results of the run."""
        base, trained = self._scores(0), self._scores(self.best_step)
        difference = compare_queries(self._test_scores(base), self._test_scores(trained))
        # If the test half shows no significant difference, the mean over all queries decides.
        higher = difference.verdict == "no significant difference" and trained.ndcg_at_10 > base.ndcg_at_10
        step = self.best_step if self.last or higher or difference.verdict == "better" else 0
        self._load("best" if step else "base")
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        dense = self.rankings.get(step) or rank_together(self.trainer.retriever_now(), self.task, model)
        bm25 = bm25_run(self.task)
        return Outcome(
            task=self.task.name,
            queries=(len(self.test), len(self.task.queries)),
            base=base,
            chosen=score_run(dense, self.task),
            step=step,
            last_step=last_step,
            difference=difference,
            bm25=score_run(bm25, self.task),
            hybrid=fit_hybrid(dense, bm25, self.task),
            curve={s: self._scores(s).ndcg_at_10 for s in sorted(self.scores)},
        )

    def _scores(self, step: int) -> RetrievalScores:
        per_query = self.scores[step]
        return RetrievalScores(
            self.task.name,
            **{metric: sum(values.values()) / len(values) for metric, values in per_query.items()},
            queries=len(self.task.queries),
            documents=len(self.task.corpus),
            unanswered=0,  # dense search always returns results
            per_query=per_query,
        )

    def _test_scores(self, scores: RetrievalScores) -> Mapping[str, float]:
        return {query: scores.per_query[METRIC][query] for query in self.test}

    # --- files

    def _read(self) -> dict[int, PerQuery]:
        """Return the stored scores, if they are of this task; after `--export last`, which kept no best weights, the base model's."""
        if not (self.folder / SCORES).is_file():
            return {}
        stored = json.loads((self.folder / SCORES).read_text(encoding="utf-8"))
        if stored["task"] != self.identity:
            return {}
        scores: dict[int, PerQuery] = {int(step): scores for step, scores in stored["scores"].items()}
        return scores if self.last or not stored.get("last") else {step: scores[step] for step in scores if not step}

    def _write(self) -> None:
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / f"{SCORES}.part"
            part.write_text(
                json.dumps({"task": self.identity, "last": self.last, "scores": self.scores}), encoding="utf-8"
            )
            os.replace(part, self.folder / SCORES)

    def _store(self, name: str) -> None:
        """Store the trainable weights, gathered one by one if they are sharded."""
        weights = {}
        for parameter_name, parameter in self._trainable():
            value = full_weight(parameter)
            if self.main:
                weights[parameter_name] = value.cpu().contiguous().clone()
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / f"{name}.part"
            save_file(weights, part)
            os.replace(part, self.folder / f"{name}.safetensors")

    def _load(self, name: str) -> None:
        """Load stored weights into the model, on all processes from the main process's files."""
        stored: dict[str, torch.Tensor] = {}
        from_main(lambda: stored.update(load_file(self.folder / f"{name}.safetensors")))
        for parameter_name, parameter in self._trainable():
            copy_from_main(parameter, stored.get(parameter_name))

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        model: Any = self.trainer.accelerator.unwrap_model(self.trainer.model)
        reshard(model)
        return [(n, p) for n, p in model.named_parameters() if p.requires_grad]
