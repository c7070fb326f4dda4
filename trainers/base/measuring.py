"""Evaluates a run on a retrieval task before, during and after training, and keeps the best weights.

The queries are split in two. The dev half selects the best checkpoint and decides when to stop early. The test half compares
that checkpoint with the base model (paired bootstrap over queries, or the documents they were made from), so that selection does not inflate the result. If training
did not help, the base model's weights are exported.

With `--export last`, evaluations do not select: the last step is exported, and no run is stopped early.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from revela_hub.data.mixture.held_out import HELD_OUT
from revela_hub.data.sources.report import counted
from revela_hub.evaluation.hybrid_weight import PROBE, FittedHybrid, fit_hybrid, halves
from revela_hub.evaluation.retrieval import Rankings, RetrievalScores, bm25_run, score_run
from revela_hub.evaluation.significance import FEWEST_QUERIES, PairedDifference, compare_queries, too_few_queries
from revela_hub.files import atomic
from revela_hub.hub_cards.metadata import Result
from revela_hub.trainers.base.arguments import METRIC
from revela_hub.trainers.base.distributed import from_main, is_distributed
from revela_hub.trainers.base.encoder_in_training import rank_together

if TYPE_CHECKING:
    from revela_hub.trainers.base.trainer import MethodTrainer

MEASUREMENTS_FOLDER = "measured"
"""Folder in the output folder with the weights and scores of the base model and of the best step."""
MIN_QUERIES = 4
"""Smallest number of queries for a comparison: two for selection and two for testing."""
PATIENCE = 3
"""Number of consecutive evaluations not above the best one that stop the run."""


@dataclass(frozen=True)
class Outcome:
    """Results of a run, for the terminal, the model card and the disk."""

    task: str
    queries: tuple[int, int]  # number of queries in the test half, and of all queries
    base: RetrievalScores
    exported: RetrievalScores
    step: int  # of the exported weights; 0 is the base model
    last_step: int
    difference: PairedDifference  # nDCG@10 of the selected trained weights minus the base model's, on the test half
    bm25: RetrievalScores
    hybrid: FittedHybrid  # exported weights combined with BM25
    curve: Mapping[int, float]  # step -> mean nDCG@10 over all queries
    groups: Mapping[str, str]  # query id -> document, if several queries share one

    def _weights(self) -> str:
        return f"step {self.step} of {self.last_step}" if self.step else "the base model"

    def sentence(self) -> str:
        """Summarise the run in one sentence, with its 95% confidence interval."""
        d = self.difference
        made = "queries of the probe: titles, docstrings and sentences removed from the text"
        queries = {PROBE: made, HELD_OUT: "held-out queries"}.get(self.task, f"queries of {self.task}")
        found = {
            "better": f"improved nDCG@10 by {d.difference:.3f}",
            "worse": f"lowered nDCG@10 by {-d.difference:.3f}",
        }
        change = found.get(d.verdict, f"made no significant difference in nDCG@10: {d.difference:+.3f}")
        if not self.step and d.low == d.high == 0:
            return f"Training kept the base model: no step was better (on {self.queries[0]} {queries})."
        few = f" {too_few_queries([d])}" if d.queries < FEWEST_QUERIES else ""
        requested = " (--export last)" if self.step and d.high < 0 else ""
        return (
            f"Training {change} (95% interval {d.low:+.3f} to {d.high:+.3f}, on {self.queries[0]} {queries})."
            f"{few} Exported: {self._weights()}{requested}."
        )

    def advice(self) -> str:
        """Recommend a hybrid with BM25 if it is significantly better; each query is scored with a weight tuned on other queries."""
        weight = self.hybrid.weight
        d = compare_queries(self.exported.per_query[METRIC], self.hybrid.scores.per_query[METRIC], self.groups)
        if not weight or d.verdict != "better":
            return ""
        return (
            f"A hybrid with BM25 (search --mode hybrid --weights {1 - weight:.1f} {weight:.1f}) improves nDCG@10 by another"
            f" {d.difference:.3f} (95% interval {d.low:+.3f} to {d.high:+.3f}, on all {d.queries} queries)."
        )

    def report(self) -> str:
        """Return the scores over all queries as a table, the summary and the recommendation."""
        trained = f"trained ({self._weights()})" if self.step else "exported (base model)"
        rows = self._rows(trained)
        width = max(map(len, rows))
        lines = [f"{self.task}: {counted(self.queries[1], 'query')}, {counted(self.base.documents, 'passage')}"]
        lines.append(f"{'':<{width}}  nDCG@10  MRR@10  Recall@100")
        for name, s in rows.items():
            lines.append(f"{name:<{width}}  {s.ndcg_at_10:7.3f}  {s.mrr_at_10:6.3f}  {s.recall_at_100:10.3f}")
        return "\n".join(filter(None, [*lines, self.sentence(), self.advice()]))

    def _rows(self, trained: str) -> dict[str, RetrievalScores]:
        weight = self.hybrid.weight
        hybrid = f"hybrid (weights {1 - weight:.1f} dense, {weight:.1f} BM25)"
        return {"base model": self.base, trained: self.exported, "BM25": self.bm25, hybrid: self.hybrid.scores}

    def card(self) -> dict[str, Any]:
        """Return the results as fields of `ModelCardMetadata`."""
        results = [Result(self.task, dict(s.metrics), model=name or None) for name, s in self._rows("").items()]
        return {"results": results, "verdict": self.sentence(), "unchanged": not self.step}

    def write(self, file: Path) -> None:
        """Write everything as JSON: scores, difference with interval, hybrid weight and curve."""
        content = {
            "sentence": self.sentence(),
            "advice": self.advice(),
            "task": self.task,
            "step": self.step,
            "last_step": self.last_step,
            "difference": self.difference.to_dict(),
            "bm25_weight": self.hybrid.weight,
            "scores": {name: scores.to_dict() for name, scores in self._rows("exported").items()},
            "curve": self.curve,
        }
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def train_and_select(trainer: "MethodTrainer", output: Path, checkpoint: Path | None) -> Outcome | None:
    """Train, load the weights to export into the model, and return the results; None without a comparison with the base model."""
    best, task = None, trainer.retrieval_task
    if task is not None and len(task.queries) >= MIN_QUERIES:
        best = BestWeights(trainer, output)
        trainer.add_callback(best)
    if task is not None:
        trainer.evaluate()  # the base model: a resumed run, too, is built from it
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if best is None:
        return None
    if trainer.state.global_step not in best.scores:
        trainer.evaluate()
    return best.finish()


class BestWeights(TrainerCallback):
    """Records a trainer's evaluations, keeps the weights of the base model and the best step, and stops runs that no longer improve."""

    def __init__(self, trainer: "MethodTrainer", output: Path) -> None:
        assert trainer.retrieval_task is not None
        self.trainer, self.task = trainer, trainer.retrieval_task
        self.folder, self.main = output / MEASUREMENTS_FOLDER, trainer.args.should_save
        self.last = getattr(trainer.args, "export", "best") == "last"
        self.dev, self.test = halves(self.task.queries)
        self.scores: dict[int, RetrievalScores] = {}
        self.other_task_until = 0  # step of the last evaluation in the log that is of another task
        self.rankings: dict[int, Rankings] = {}  # of the base model and the best step, if evaluated by this process

    # --- during training

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Read the scores of the best step of a run that resumes, unless it resumes from an earlier step."""
        stored = from_main(lambda: self._stored(state.global_step))
        self.scores |= {step: scores for step, scores in stored.items() if step <= state.global_step}
        self.other_task_until = 0 if stored else state.global_step

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Record an evaluation, and stop the run if it no longer improves."""
        if f"eval_{METRIC}" not in given["metrics"]:  # the loss of a data set
            return
        step = state.global_step
        self.scores[step], self.rankings[step] = self.trainer.measurement
        self.rankings = {kept: found for kept, found in self.rankings.items() if kept in (0, self.best_step)}
        if step in (0, self.best_step):
            self.store(step)
        best = max(self.scores, key=self._dev_mean)
        later = [known for known in self._curve(state) if known > best]
        if len(later) >= PATIENCE and step < state.max_steps and not self.last:
            self.trainer.args.log(f"stopped at step {step}: the last {PATIENCE} evaluations are not above the best one")
            control.should_training_stop = True

    @property
    def best_step(self) -> int:
        """The best step after training started, or the last one with `--export last`; 0 before the first evaluation."""
        steps = [step for step in sorted(self.scores) if step]
        return max(steps, key=int if self.last else self._dev_mean, default=0)

    def _dev_mean(self, step: int) -> float:
        scores = self.scores[step].per_query[METRIC]
        return sum(scores[query] for query in sorted(self.dev)) / len(self.dev)

    def _curve(self, state: TrainerState) -> dict[int, float]:
        """Return step -> nDCG@10 of all evaluations, also of those before a resume, which only the log has."""
        key, first = f"eval_{METRIC}", self.other_task_until + 1
        log = [entry for entry in state.log_history if key in entry and entry["step"] >= first]
        logged = {int(entry["step"]): entry[key] for entry in log}
        return dict(sorted((logged | {step: scores.ndcg_at_10 for step, scores in self.scores.items()}).items()))

    # --- after training

    def finish(self) -> Outcome:
        """Load the weights to export into the model and return the results of the run."""
        base, trained = self.scores[0], self.scores[self.best_step]
        before, after = ({query: scores.per_query[METRIC][query] for query in self.test} for scores in (base, trained))
        difference = compare_queries(before, after, self.task.groups)
        # If the test half shows no significant difference, the mean over all queries decides.
        higher = difference.high >= 0 and trained.ndcg_at_10 > base.ndcg_at_10
        step = self.best_step if self.last or higher or difference.low > 0 else 0
        self.load(step)
        dense = self.rankings.get(step) or rank_together(self.trainer.retriever, self.task, self._model)
        bm25 = bm25_run(self.task)
        return Outcome(
            task=self.task.name,
            queries=(len(self.test), len(self.task.queries)),
            base=base,
            exported=score_run(dense, self.task),
            step=step,
            last_step=max(self.scores),
            difference=difference,
            bm25=score_run(bm25, self.task),
            hybrid=fit_hybrid(dense, bm25, self.task),
            curve=self._curve(self.trainer.state),
            groups=self.task.groups,
        )

    # --- files

    def _stored(self, last: int) -> dict[int, RetrievalScores]:
        """Return the scores of stored weights that were evaluated on the same queries, and delete the weights of later steps."""
        found: dict[int, RetrievalScores] = {}
        for file in self.folder.glob("step-*.safetensors"):
            with safe_open(file, framework="pt") as weights:
                metadata: Any = weights.metadata()
            scores = RetrievalScores(**json.loads(metadata["scores"]))
            step, asked = int(file.stem.removeprefix("step-")), json.loads(metadata.get("queries", "{}"))
            if step and scores.name == self.task.name and asked == self.task.queries:
                found[step] = scores
            if step > last:
                file.unlink()
        return found

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step}.safetensors"

    @property
    def _model(self) -> nn.Module:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)  # type: ignore[no-any-return]

    def store(self, step: int) -> None:
        """Store trainable weights, which FSDP2 may have sharded, and scores in place of an earlier step's. All processes must call it."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        weights: Any = get_model_state_dict(self._model, options=options)  # empty except on the main process
        if self.main:
            trained = [key for key, weight in self._model.named_parameters() if weight.requires_grad]  # ties once
            metadata = {"scores": json.dumps(asdict(self.scores[step])), "queries": json.dumps(self.task.queries)}
            with atomic(self._file(step)) as part:
                save_file({key: weights[key].contiguous().clone() for key in trained}, part, metadata)
            for other in self.folder.glob("step-*.safetensors") if step else ():
                if other not in (self._file(0), self._file(step)):
                    other.unlink()

    def load(self, step: int) -> None:
        """Load stored weights into the model, on all processes from the main process's files."""
        weights = load_file(self._file(step)) if self.main else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_distributed(), strict=False)
        set_model_state_dict(self._model, weights, options=options)  # type: ignore[arg-type]
