"""Evaluates a run on a retrieval task before, during and after training, and keeps the best weights.

The queries are split in two. The dev half selects the best checkpoint and decides when to stop early. The test half compares
that checkpoint with the base model (paired bootstrap over queries), so that selection does not inflate the result. If training
did not help, the base model's weights are exported.

With `--export last`, evaluations do not select: the last step is exported, and no run is stopped early.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from revela_hub.evaluation.hybrid_weight import fit_hybrid, halves
from revela_hub.evaluation.retrieval import Rankings, RetrievalScores, bm25_run, score_run
from revela_hub.evaluation.significance import compare_queries
from revela_hub.files import atomic, write_text
from revela_hub.trainers.base.arguments import METRIC
from revela_hub.trainers.base.distributed import from_main, is_distributed
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


def train_and_select(trainer: "MethodTrainer", output: Path, checkpoint: Path | None) -> Outcome | None:
    """Train, load the weights to export into the model, and return the results; None without a comparison with the base model."""
    best, resume = None, None if checkpoint is None else str(checkpoint)
    if trainer.retrieval_task is not None and len(trainer.retrieval_task.queries) >= MIN_QUERIES:
        best = BestWeights(trainer, output, resumed=checkpoint is not None)
        best.store("base")  # a resumed run, too, is built from the base model
        trainer.add_callback(best)
    if trainer.retrieval_task is not None and checkpoint is None:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    if best is None:
        return None
    if trainer.state.global_step not in best.scores:
        trainer.evaluate()
    if 0 in best.scores:
        return best.finish(trainer.state.global_step)
    trainer.args.log("no comparison with the base model, which was not evaluated on this task")
    return None


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
            self.store("best")
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
            self.store("best")
        later = [known for known in self.scores if known > max(self.scores, key=self._dev_mean)]
        if len(later) >= PATIENCE and step < state.max_steps and not self.last:
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
        on_test = [{query: scores.per_query[METRIC][query] for query in self.test} for scores in (base, trained)]
        difference = compare_queries(*on_test)
        # If the test half shows no significant difference, the mean over all queries decides.
        higher = difference.verdict == "no significant difference" and trained.ndcg_at_10 > base.ndcg_at_10
        step = self.best_step if self.last or higher or difference.verdict == "better" else 0
        self.load("best" if step else "base")
        dense = self.rankings.get(step) or rank_together(self.trainer.retriever_now(), self.task, self._model)
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
        means = {metric: sum(values.values()) / len(values) for metric, values in per_query.items()}
        sizes = {"queries": len(self.task.queries), "documents": len(self.task.corpus)}
        return RetrievalScores(self.task.name, **means, **sizes, per_query=per_query)  # type: ignore[arg-type]

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
            content = {"task": self.identity, "last": self.last, "scores": self.scores}
            write_text(self.folder / SCORES, json.dumps(content))

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return model

    def store(self, name: str) -> None:
        """Store the trainable weights, which FSDP2 may have sharded. All processes must call it."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        weights: Any = get_model_state_dict(self._model, options=options)  # empty except on the main process
        if self.main:
            trained = [key for key, weight in self._model.named_parameters() if weight.requires_grad]  # ties once
            with atomic(self.folder / f"{name}.safetensors") as part:
                save_file({key: weights[key].contiguous().clone() for key in trained}, part)

    def load(self, name: str) -> None:
        """Load stored weights into the model, on all processes from the main process's files."""
        weights = load_file(self.folder / f"{name}.safetensors") if self.main else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_distributed(), strict=False)
        set_model_state_dict(self._model, weights, options=options)  # type: ignore[arg-type]
