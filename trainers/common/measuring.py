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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from revela_hub.data.own_folder import claim, names_in
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.hybrid_weight import FittedHybrid, fit_hybrid, halves
from revela_hub.evaluation.retrieval import RetrievalScores, Run, bm25_run, retrieval_run, score_run
from revela_hub.evaluation.significance import PairedDifference, compare_queries
from revela_hub.retrieval.encoder import Encoder
from revela_hub.retrieval.encoding import batches, token_budget
from revela_hub.trainers.common.processes import copy_from_main, from_main

if TYPE_CHECKING:
    from revela_hub.hub_cards.facts import Figure, Result

MEASURED = "scores.json"
KEPT = "measured"
CURVE = "retrieval_curve.png"
OUTCOME = "outcome.json"
METRIC = "ndcg_at_10"
PROBE = "probe"
"""The name of a task that was made of the text."""
MIN_QUERIES = 4
"""Of a task: two that choose and two that tell, or nothing can be said of chance."""

CLEARLY_WORSE = 2
"""So many measurements in succession, each significantly below the best, end the run."""


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
        from revela_hub.hub_cards.facts import Result

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

        from revela_hub.hub_cards.facts import Figure

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
        latest: Callable[[], tuple[RetrievalScores, Run]],
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
        self.runs: dict[int, Run] = {}  # the hits of the start and of the best, if this process measured them

    @property
    def keeps(self) -> bool:
        """Not of weights in shards (FSDP's, ZeRO-3's), of which no process has all: such a run ends with what it ends with."""
        return not any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in self.model.parameters())

    def note(self, step: int, scores: RetrievalScores, run: Run) -> None:
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
        best = self.memory.best
        start, trained, dense = self._scores(0), self._scores(best), self.runs.get(best)
        averaged = False
        if self.averages and self.keeps and best and self._has_mean():
            self._load("start", "best")
            run = self._run()
            mean = score_run(run, self.task)
            if averaged := self._as_good(mean, trained):
                trained, dense = mean, run
        difference = compare_queries(self._told(start), self._told(trained))
        worse = difference.verdict == "worse"
        # Where the half that tells cannot say which is better, the mean over both halves does.
        back = worse or (difference.verdict == "no difference" and start.ndcg_at_10 >= trained.ndcg_at_10)
        chosen = (0 if back and not keep_worse else best) if self.keeps else step
        if self.keeps:
            trained_ones = ("start", "best") if averaged else ("best",)
            self._load(*(trained_ones if chosen else ("start",)))
        if chosen != best:
            dense, averaged = self.runs.get(chosen), False
        dense = dense or self._run()
        bm25 = bm25_run(self.task)
        return Outcome(
            task=self.task.name,
            queries=(len(self.telling), len(self.task.queries)),
            start=start,
            chosen=score_run(dense, self.task),
            step=chosen,
            averaged=averaged,
            last_step=step,
            difference=difference,
            bm25=score_run(bm25, self.task),
            hybrid=fit_hybrid(dense, bm25, self.task),
            curve={s: self._scores(s).ndcg_at_10 for s in sorted(self.memory.scores)},
        )

    def _run(self) -> Run:
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


class EncoderInTraining:
    """A retriever in the middle of its training, as an `Encoder`, whose vectors are trained to be compared by cosine.

    Args:
        model: its mode (training or not) is put back after encoding.
        embed: `(input_ids, attention_mask) -> (N, d)`.
        tokenizer: of the retriever.
        prompts: what goes before a `query` and a `document`.
        max_length: tokens of a text at most, as it is published.
    """

    similarity_fn_name = "cosine"  # of what in-batch attention and RetroMAE's export compare

    def __init__(
        self,
        model: nn.Module,
        embed: Callable[[Tensor, Tensor], Tensor],
        tokenizer: PreTrainedTokenizerBase,
        prompts: Mapping[str, str],
        max_length: int,
    ) -> None:
        self.model, self.embed, self.tokenizer = model, embed, tokenizer
        self.prompts, self.max_length = prompts, max_length

    def encode_query(self, texts: list[str], **kwargs: Any) -> NDArray[np.float32]:
        """Vectors (N, d) of queries."""
        return self._encode(texts, self.prompts.get("query", ""), **kwargs)

    def encode_document(self, texts: list[str], **kwargs: Any) -> NDArray[np.float32]:
        """Vectors (N, d) of documents."""
        return self._encode(texts, self.prompts.get("document", ""), **kwargs)

    @torch.no_grad()
    def _encode(self, texts: list[str], prompt: str, batch_size: int = 32, **_: Any) -> NDArray[np.float32]:
        texts, cut = [prompt + text for text in texts], {"truncation": True, "max_length": self.max_length}
        lengths_N = np.array([len(ids) for ids in self.tokenizer(texts, **cut)["input_ids"]])
        device = next(self.model.parameters()).device
        was_training, order, parts = self.model.training, [], []
        self.model.eval()
        for rows in batches(lengths_N, token_budget(device.type, batch_size), 8 * batch_size):
            batch = self.tokenizer([texts[row] for row in rows], padding=True, return_tensors="pt", **cut).to(device)
            parts.append(self.embed(batch["input_ids"], batch["attention_mask"]).float().cpu().numpy())
            order.append(rows)
        self.model.train(was_training)
        found: NDArray[np.float32] = np.concatenate(parts)[np.argsort(np.concatenate(order))]
        return found
