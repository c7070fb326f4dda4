"""Results of a run: its scores compared with the base model and BM25, for the terminal, the model card and the disk."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from revela_hub.data.mixture.held_out import HELD_OUT
from revela_hub.data.sources.report import counted
from revela_hub.evaluation.hybrid_weight import PROBE, FittedHybrid
from revela_hub.evaluation.retrieval import RetrievalScores
from revela_hub.evaluation.significance import PairedDifference, compare_queries
from revela_hub.trainers.base.arguments import METRIC

if TYPE_CHECKING:
    from revela_hub.hub_cards.metadata import Figure, Result

RETRIEVAL_CURVE = "retrieval_curve.png"
OUTCOME_FILE = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """Results of a run.

    Attributes:
        task: name of the evaluation task.
        queries: number of queries in the test half, and of all queries.
        base: scores of the base model.
        chosen: scores of the exported weights.
        step: step of the exported weights; 0 is the base model.
        last_step: last evaluated step.
        difference: nDCG@10 of the selected trained weights minus the base model's, on the test half.
        bm25: scores of BM25.
        hybrid: scores of the exported weights combined with BM25.
        curve: step -> mean nDCG@10 over all queries.
    """

    task: str
    queries: tuple[int, int]
    base: RetrievalScores
    chosen: RetrievalScores
    step: int
    last_step: int
    difference: PairedDifference
    bm25: RetrievalScores
    hybrid: FittedHybrid
    curve: Mapping[int, float]

    def sentence(self) -> str:
        """Summarise the run in one sentence, with its 95% confidence interval."""
        d = self.difference
        made = "titles, docstrings and sentences removed from the text"
        named = {PROBE: f"queries of the probe: {made}", HELD_OUT: "held-out queries"}.get(
            self.task, f"queries of {self.task}"
        )
        interval = f"(95% interval {d.low:+.3f} to {d.high:+.3f}, on {self.queries[0]} {named})"
        found = {
            "better": f"Training improved nDCG@10 by {d.difference:.3f}",
            "worse": f"Training lowered nDCG@10 by {-d.difference:.3f}",
        }.get(d.verdict, f"Training made no significant difference in nDCG@10: {d.difference:+.3f}")
        requested = " (--export last)" if self.step and d.verdict == "worse" else ""
        return f"{found} {interval}. Exported: {self._weights()}{requested}."

    def _weights(self) -> str:
        """Return the name of the exported weights."""
        return f"step {self.step} of {self.last_step}" if self.step else "the base model"

    def advice(self) -> str:
        """Recommend a hybrid with BM25 if it is significantly better; each query is scored with a weight tuned on other queries."""
        weight = self.hybrid.weight
        d = compare_queries(self.chosen.per_query[METRIC], self.hybrid.scores.per_query[METRIC])
        if not weight or d.verdict != "better":
            return ""
        return (
            f"A hybrid with BM25 (search --mode hybrid --weights {1 - weight:.1f} {weight:.1f}) improves nDCG@10 by another"
            f" {d.difference:.3f} (95% interval {d.low:+.3f} to {d.high:+.3f}, on all {d.queries} queries)."
        )

    def report(self) -> str:
        """Return the table, the summary and the recommendation."""
        return "\n".join(filter(None, [self.table(), self.sentence(), self.advice()]))

    def table(self) -> str:
        """Format the scores of the base model, the exported weights, BM25 and the hybrid, over all queries."""
        exported = f"trained ({self._weights()})" if self.step else "exported (base model)"
        rows = {"base model": self.base, exported: self.chosen, **self._compared()}
        width = max(map(len, rows))
        lines = [f"{self.task}: {counted(self.queries[1], 'query')}, {counted(self.base.documents, 'passage')}"]
        lines.append(f"{'':<{width}}  nDCG@10  MRR@10  Recall@100")
        for name, s in rows.items():
            lines.append(f"{name:<{width}}  {s.ndcg_at_10:7.3f}  {s.mrr_at_10:6.3f}  {s.recall_at_100:10.3f}")
        return "\n".join(lines)

    def _compared(self) -> dict[str, RetrievalScores]:
        """Return the scores of BM25 and of the hybrid."""
        weight = self.hybrid.weight
        hybrid = f"hybrid (weights {1 - weight:.1f} dense, {weight:.1f} BM25)"
        return {"BM25": self.bm25, hybrid: self.hybrid.scores}

    def results(self) -> "list[Result]":
        """Return the rows of the model card's results table."""
        from revela_hub.hub_cards.metadata import Result

        rows = [(None, self.chosen), ("base model", self.base), *self._compared().items()]
        return [
            Result(self.task, {m: getattr(s, m) for m in (METRIC, "mrr_at_10", "recall_at_100")}, model=name)
            for name, s in rows
        ]

    def write(self, file: Path) -> None:
        """Write everything as JSON: scores, difference with interval, hybrid weight and curve."""
        rows = {"base": self.base, "chosen": self.chosen, "bm25": self.bm25, "hybrid": self.hybrid.scores}
        content = {
            "sentence": self.sentence(),
            "advice": self.advice(),
            "task": self.task,
            "step": self.step,
            "last_step": self.last_step,
            "difference": self.difference.to_dict(),
            "bm25_weight": self.hybrid.weight,
            "scores": {name: scores.to_dict() for name, scores in rows.items()},
            "curve": {str(step): score for step, score in self.curve.items()},
        }
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def figure(self, folder: Path) -> "Figure":
        """Plot nDCG@10 over the steps of the run."""
        from matplotlib.figure import Figure as Canvas

        from revela_hub.hub_cards.metadata import Figure

        canvas = Canvas(figsize=(6, 3.2), layout="constrained")
        axes = canvas.subplots()
        axes.plot(list(self.curve), list(self.curve.values()), marker="o", color="#2a6f97", label="retriever")
        axes.axhline(self.bm25.ndcg_at_10, color="#999999", linestyle="--", label="BM25")
        axes.axvline(self.step, color="#c0392b", linestyle=":", label="exported")
        axes.set(xlabel="step", ylabel="nDCG@10")
        axes.grid(alpha=0.3)
        axes.legend()
        canvas.savefig(folder / RETRIEVAL_CURVE, dpi=150)
        return Figure(str(folder / RETRIEVAL_CURVE), f"nDCG@10 on {self.task} during training")
