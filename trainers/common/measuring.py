"""Whether a run helped: measured at its start, on its way and at its end, the best weights kept, and said with an interval.

The queries are in two halves. One chooses: which of the measured moments is the best, and when the run has got so much worse
that it ends. The other tells what that one is worth beside the start (paired bootstrap over its queries), so that choosing
among many does not flatter the result. A result that is worse than the start is not handed out: the weights of the start
are put back.

A retriever that is adapted is also measured with the mean of the start's and the best weights (Wortsman et al., arXiv
2109.01903), which forgets less of what the queries do not ask for. It is handed out unless the best is better by more than one
standard error.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from revela_hub.data.own_folder import claim, names_in
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.hybrid_weight import fit_hybrid, halves
from revela_hub.evaluation.retrieval import Rankings, RetrievalScores, bm25_run, retrieval_run, score_run
from revela_hub.evaluation.significance import PairedDifference, compare_queries
from revela_hub.retrieval.encoder import Encoder
from revela_hub.trainers.common.early import METRIC
from revela_hub.trainers.common.outcome import Outcome
from revela_hub.trainers.common.processes import copy_from_main, from_main

MEASURED = "scores.json"
KEPT = "measured"
MIN_QUERIES = 4
"""Of a task: two that choose and two that tell, or nothing can be said of chance."""

CLEARLY_WORSE = 2
"""So many measurements in succession, each significantly below the best, end the run."""


@dataclass
class _Memory:
    """What was measured: update to metric to query to score; kept on disk, so that a resumed run knows it."""

    scores: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    best: int = 0  # of the trained ones; 0 before the first is measured

    @classmethod
    def read(cls, file: Path) -> "_Memory":
        values = json.loads(file.read_text(encoding="utf-8"))
        return cls({int(step): scores for step, scores in values["scores"].items()}, values["best"])

    def write(self, file: Path) -> None:
        beside = file.with_suffix(".part")
        beside.write_text(json.dumps({"scores": self.scores, "best": self.best}), encoding="utf-8")
        beside.replace(file)


@dataclass(frozen=True)
class _Moment:
    """What might be handed out: a measured update's weights, or their mean with the start's, and their hits if they are known."""

    step: int
    scores: RetrievalScores
    run: Rankings | None
    averaged: bool = False

    @property
    def weights(self) -> tuple[str, ...]:
        """The names under which they were kept."""
        if not self.step:
            return ("start",)
        return ("start", "best") if self.averaged else ("best",)


def _is_kept(difference: PairedDifference, start: RetrievalScores, trained: RetrievalScores) -> bool:
    """Whether training helped; where the half that tells cannot say which is better, the mean over both halves does."""
    if difference.verdict == "no difference":
        return trained.ndcg_at_10 > start.ndcg_at_10
    return difference.verdict == "better"


class Measured(TrainerCallback):
    """Notes what a trainer's evaluations measure, and keeps the best weights.

    Args:
        model: what is trained; its trainable weights at the start and at the best moment are kept in `folder`.
        encoder: the retriever in it as it stands, at any time.
        task: what is measured on.
        latest: the scores and the hits of the trainer's last evaluation.
        folder: the run's output folder.
        averages: whether the mean of the start's and the best weights may be handed out: of a start that is a retriever.
        resumed: whether the run goes on from a checkpoint, and what was measured before counts.
        main: whether this process writes.
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
        resumed: bool = False,
        main: bool = True,
    ) -> None:
        self.model, self.encoder, self.task, self.latest = model, encoder, task, latest
        self.averages = averages
        self.folder, self.main = folder / KEPT, main
        self.choosing, self.telling = halves(task.queries)
        file = self.folder / MEASURED
        # Decisions are made on what the main process knows, so that all processes make the same.
        self.memory = from_main(lambda: _Memory.read(file) if resumed and file.is_file() else _Memory())
        self.runs: dict[int, Rankings] = {}  # the hits of the start and of the best, if this process measured them

    @property
    def keeps(self) -> bool:
        """Not of weights in shards (FSDP's, ZeRO-3's), of which no process has all: such a run ends with what it ends with."""
        return not any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in self.model.parameters())

    def note(self, step: int, scores: RetrievalScores, run: Rankings) -> None:
        """Notes the scores of the weights as they are, and keeps them if none since the start were better."""
        self.memory.scores[step] = {metric: dict(by_query) for metric, by_query in scores.per_query.items()}
        if step and (not self.memory.best or self._mean(step) > self._mean(self.memory.best)):
            self.memory.best = step
            self._save("best")
        if not step:
            self._save("start")
        self.runs = {kept: hits for kept, hits in (self.runs | {step: run}).items() if kept in (0, self.memory.best)}
        if self.main:
            self.memory.write(claim_kept(self.folder) / MEASURED)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Notes what was measured, and ends a run that got clearly worse."""
        self.note(state.global_step, *self.latest())
        if self._clearly_worse():
            control.should_training_stop = True

    def finish(self, step: int, *, keep_worse: bool = False) -> Outcome:
        """Puts the best weights into the model, and says what the run was worth.

        Args:
            step: the last update, which has been measured, and so has the start.
            keep_worse: leave the best of the trained weights also where the start is better.
        """
        start, trained = self._moment(0), self._choose()
        difference = compare_queries(self._told(start.scores), self._told(trained.scores))
        if not self.keeps:
            chosen = self._moment(step)
        else:
            chosen = trained if keep_worse or _is_kept(difference, start.scores, trained.scores) else start
            self._load(*chosen.weights)
        dense = chosen.run or self._run()
        bm25 = bm25_run(self.task)
        return Outcome(
            task=self.task.name,
            queries=(len(self.telling), len(self.task.queries)),
            start=start.scores,
            chosen=score_run(dense, self.task),
            step=chosen.step,
            averaged=chosen.averaged,
            last_step=step,
            difference=difference,
            bm25=score_run(bm25, self.task),
            hybrid=fit_hybrid(dense, bm25, self.task),
            curve={s: self._scores(s).ndcg_at_10 for s in sorted(self.memory.scores)},
        )

    def _choose(self) -> "_Moment":
        """Of the trained weights the best, or their mean with the start's where that may be and is as good."""
        best = self._moment(self.memory.best)
        if not (self.averages and self.keeps and best.step and self._has_mean()):
            return best
        self._load("start", "best")
        run = self._run()
        mean = _Moment(best.step, score_run(run, self.task), run, averaged=True)
        return mean if self._as_good(mean.scores, best.scores) else best

    def _moment(self, step: int) -> "_Moment":
        return _Moment(step, self._scores(step), self.runs.get(step))

    def _run(self) -> Rankings:
        """The hits of the retriever as it stands: the main process's, for what others find may differ in the last bits."""
        run = retrieval_run(self.encoder, self.task)
        return from_main(lambda: run)

    def _scores(self, step: int) -> RetrievalScores:
        per_query = self.memory.scores[step]
        means = {metric: sum(values.values()) / len(values) for metric, values in per_query.items()}
        return RetrievalScores(
            self.task.name,
            **means,
            queries=len(self.task.queries),
            documents=len(self.task.corpus),
            unanswered=0,  # vectors always find something
            per_query=per_query,
        )

    def _mean(self, step: int) -> float:
        """On the half that chooses."""
        scores = self.memory.scores[step][METRIC]
        return sum(scores[query] for query in sorted(self.choosing)) / len(self.choosing)

    def _told(self, scores: RetrievalScores) -> dict[str, float]:
        return {query: scores.per_query[METRIC][query] for query in self.telling}

    def _as_good(self, mean: RetrievalScores, best: RetrievalScores) -> bool:
        """Whether the best is better by no more than one standard error, on the half that chooses."""
        of_best, of_mean = best.per_query[METRIC], mean.per_query[METRIC]
        lost = np.array([of_best[query] - of_mean[query] for query in sorted(self.choosing)])
        return bool(lost.mean() <= lost.std(ddof=1) / len(lost) ** 0.5)

    def _clearly_worse(self) -> bool:
        reference = max((0, self.memory.best), key=self._mean)
        last = sorted(self.memory.scores)[-CLEARLY_WORSE:]
        if len(last) < CLEARLY_WORSE or reference in last:
            return False

        def of(step: int) -> dict[str, float]:
            return {query: self.memory.scores[step][METRIC][query] for query in self.choosing}

        found = [compare_queries(of(reference), of(step), samples=1000) for step in last]
        return all(each.verdict == "worse" for each in found)

    def _save(self, name: str) -> None:
        if self.main and self.keeps:
            weights = {n: p.detach().cpu().contiguous().clone() for n, p in self._trained()}
            beside = claim_kept(self.folder) / f"{name}.part"
            save_file(weights, beside)
            os.replace(beside, self.folder / f"{name}.safetensors")

    @torch.no_grad()
    def _load(self, *names: str) -> None:
        """Puts the mean of what was kept under these names into the model, on every process that of the main one's files.

        Of an adapter B A, which starts with B = 0, it is the mean of the whole weights: A is the last one's, B the mean.
        """
        weights: list[dict[str, Tensor]] = []
        from_main(lambda: weights.extend(load_file(self.folder / f"{name}.safetensors") for name in names))
        for n, parameter in self._trained():
            if weights:
                of = weights[-1:] if ".lora_A." in n else weights
                parameter.copy_(torch.stack([each[n] for each in of]).mean(0))
            copy_from_main(parameter)

    def _has_mean(self) -> bool:
        """Whether the mean with the start is one of adapters of this rank: where they start as nothing (B = 0), unlike PiSSA's."""

        def plain() -> bool:
            start = load_file(self.folder / "start.safetensors")
            adapters = {name: value for name, value in start.items() if ".lora_" in name}
            known = all(".lora_A." in name or ".lora_B." in name for name in adapters)
            return known and not any(value.any() for name, value in adapters.items() if ".lora_B." in name)

        return from_main(plain)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]


def claim_kept(folder: Path) -> Path:
    """Make the folder for what was measured, unless files of the user are in it; those of earlier versions are known by name.

    Raises:
        UserError: There are.
    """
    names = {MEASURED, "scores.part", "start.safetensors", "best.safetensors"}
    return claim(folder, "--output_dir", lambda folder: names_in(folder) <= names)
