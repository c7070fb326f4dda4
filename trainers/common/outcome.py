"""What a run was worth: its scores beside those of its start and of BM25, for people, the model card and the disk."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from revela_hub.evaluation.hybrid_weight import FittedHybrid
from revela_hub.evaluation.retrieval import RetrievalScores
from revela_hub.evaluation.significance import PairedDifference, compare_queries
from revela_hub.trainers.common.early import METRIC

if TYPE_CHECKING:
    from revela_hub.hub_cards.metadata import Figure, Result

CURVE = "retrieval_curve.png"
OUTCOME = "outcome.json"
PROBE = "probe"
"""The name of a task that was made of the text."""


@dataclass(frozen=True)
class Outcome:
    """What a run was worth.

    Attributes:
        task: name of what was measured on.
        queries: how many tell, and of how many.
        start: scores before the run.
        chosen: scores of the weights that are handed out.
        step: the update they are of; 0 is the start.
        averaged: whether they are the mean of that update's and the start's.
        last_step: the last update that was measured.
        difference: of what was chosen among the trained ones, beside the start, in nDCG@10 on the telling half.
        bm25: its scores.
        hybrid: what was chosen, together with BM25.
        curve: update to the mean nDCG@10 over all queries.
    """

    task: str
    queries: tuple[int, int]
    start: RetrievalScores
    chosen: RetrievalScores
    step: int
    averaged: bool
    last_step: int
    difference: PairedDifference
    bm25: RetrievalScores
    hybrid: FittedHybrid
    curve: Mapping[int, float]

    def sentence(self) -> str:
        """What is to be said of the run, with its interval."""
        d, on = self.difference, f"on {self.queries[0]} queries of {self.task}"
        size = f"nDCG@10 (95% interval {d.low:+.3f} to {d.high:+.3f}, {on})"
        if d.verdict == "better":
            kept = f"; {self._weights()} is kept" if self.averaged else ""
            return f"The training made the retriever better by {d.difference:.3f} {size}{kept}."
        if d.verdict == "no difference":
            kept = f"The training made no difference that can be told from chance: {d.difference:+.3f} {size}"
            return f"{kept}; {self._weights()} is kept."
        trained = self._weights() if self.averaged else "it"
        what = (
            "the start is what is exported" if self.step == 0 else f"{trained} is exported all the same, as asked for"
        )
        return f"The training made the retriever worse by {-d.difference:.3f} {size}: {what}."

    def _weights(self) -> str:
        """What is handed out."""
        update = f"update {self.step} of {self.last_step}"
        if not self.step:
            return "the start"
        return f"the mean of the start and {update}" if self.averaged else update

    def advice(self) -> str:
        """What BM25 beside it is worth, where that is more than chance; each query is ranked by a weight chosen without it."""
        weight = self.hybrid.weight
        d = compare_queries(self.chosen.per_query[METRIC], self.hybrid.scores.per_query[METRIC])
        if not weight or d.verdict != "better":
            return ""
        return (
            f"Together with BM25 (search --mode hybrid --weights {1 - weight:.1f} {weight:.1f}) it is better by {d.difference:.3f} "
            f"nDCG@10 (95% interval {d.low:+.3f} to {d.high:+.3f}, on all {d.queries} queries)."
        )

    def explained(self) -> str:
        """The sentence for those who did not see the run: with what a probe is."""
        if self.task != PROBE:
            return self.sentence()
        return f"{self.sentence()} The queries of a probe are titles, docstrings and sentences, taken out of the training text."

    def table(self) -> str:
        """The rows before, after, BM25 and hybrid, over all queries."""
        weight = self.hybrid.weight
        rows = {
            "before": self.start,
            f"after ({self._weights()})": self.chosen,
            "BM25": self.bm25,
            f"hybrid ({1 - weight:.1f} of it, {weight:.1f} of BM25)": self.hybrid.scores,
        }
        width = max(map(len, rows))
        lines = [f"{self.task}: {self.queries[1]} queries, {self.start.documents:,} passages"]
        lines.append(f"{'':<{width}}  nDCG@10  MRR@10  Recall@100")
        for name, s in rows.items():
            lines.append(f"{name:<{width}}  {s.ndcg_at_10:7.3f}  {s.mrr_at_10:6.3f}  {s.recall_at_100:10.3f}")
        return "\n".join(lines)

    def results(self) -> "list[Result]":
        """The rows of the model card."""
        from revela_hub.hub_cards.metadata import Result

        weight = self.hybrid.weight
        rows = {
            None: self.chosen,
            "before training": self.start,
            "BM25": self.bm25,
            f"hybrid ({1 - weight:.1f} of the model, {weight:.1f} of BM25)": self.hybrid.scores,
        }
        return [
            Result(self.task, {m: getattr(s, m) for m in (METRIC, "mrr_at_10", "recall_at_100")}, model=name)
            for name, s in rows.items()
        ]

    def write(self, file: Path) -> None:
        """Writes all of it as JSON: the rows, the difference with its interval, the hybrid's weight, the curve."""
        rows = {"start": self.start, "chosen": self.chosen, "bm25": self.bm25, "hybrid": self.hybrid.scores}
        content = {
            "sentence": self.sentence(),
            "advice": self.advice(),
            "task": self.task,
            "step": self.step,
            "averaged": self.averaged,
            "last_step": self.last_step,
            "difference": self.difference.to_dict(),
            "bm25_weight": self.hybrid.weight,
            "scores": {name: scores.to_dict() for name, scores in rows.items()},
            "curve": {str(step): score for step, score in self.curve.items()},
        }
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def figure(self, folder: Path) -> "Figure":
        """Draws the curve over the run."""
        from matplotlib.figure import Figure as Canvas

        from revela_hub.hub_cards.metadata import Figure

        canvas = Canvas(figsize=(6, 3.2), layout="constrained")
        axes = canvas.subplots()
        axes.plot(list(self.curve), list(self.curve.values()), marker="o", color="#2a6f97", label="the retriever")
        axes.axhline(self.bm25.ndcg_at_10, color="#999999", linestyle="--", label="BM25")
        axes.axvline(self.step, color="#c0392b", linestyle=":", label="what is exported")
        axes.set(xlabel="update", ylabel="nDCG@10")
        axes.grid(alpha=0.3)
        axes.legend()
        canvas.savefig(folder / CURVE, dpi=150)
        return Figure(str(folder / CURVE), f"nDCG@10 on {self.task} over the run")
