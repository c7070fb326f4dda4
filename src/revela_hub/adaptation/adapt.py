"""Adapt a retriever to a text: measure baselines, try candidates within a time budget, select on the dev half, report on the test half.

Everything is kept in `work/` of the output folder: the probe, the rankings of each system, and the runs. A repeated command skips what is
there, so it can be stopped at any time.
"""

import contextlib
import io
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from revela_hub.adaptation import UNTRAINED, candidates, combined
from revela_hub.adaptation.inspection import Inspection
from revela_hub.adaptation.labels import hold_out_labels
from revela_hub.adaptation.systems import (
    System,
    best_of,
    best_on,
    compare,
    hybrid_run,
    measured_in_training,
    select,
    split_by_document,
)
from revela_hub.adaptation.verdict import Verdict
from revela_hub.data.sources.report import ReadReport
from revela_hub.errors import UserError
from revela_hub.evaluation.hybrid_weight import fit_weight
from revela_hub.evaluation.probe import MIN_QUERIES, Probe, ProbeSettings, build_probe
from revela_hub.evaluation.probe_folder import write_probe
from revela_hub.evaluation.retrieval import Rankings, bm25_run, rerank_run, retrieval_run
from revela_hub.files import atomic, key_of, write_text
from revela_hub.interrupts import Interrupted, status_of
from revela_hub.retrieval.encoder import length_limit
from revela_hub.retrieval.encoding import encode_texts
from revela_hub.retrieval.hybrid import BM25_WEIGHT
from revela_hub.retrieval.rerank import OWN_WEIGHT, Reranker, has_tokens
from revela_hub.trainers.base.retriever import RETRIEVER, load_retriever

WORK, STATE, BASE, LABELS = "work", "state.json", "base", "labels.jsonl"
PASSAGES, FEWEST_PASSAGES = 1000, 200
QUERIES_PER_PASSAGE = 0.8
TIME_SHARES = {"natural_pairs": 0.4, "labelled_pairs": 0.3, "distillation": 0.3, "revela": 0.4}
"""Relative time of each candidate."""
CANDIDATES: dict[str, candidates.Train] = {
    "labelled_pairs": candidates.labelled_pairs,
    "natural_pairs": candidates.natural_pairs,
    "distillation": candidates.distillation,
    "revela": candidates.revela,
}
"""The candidates, the most promising first."""
TOKEN_ERRORS = 2.0
"""Standard errors by which another weight of late interaction must beat its default, which gained or changed nothing on all labelled
collections (benchmarks/adaptation)."""
MEASURING_SHARE = 0.4
"""Part of the budget for measuring: the number of passages is chosen so that it suffices."""
STEPS, PASSES, SHORTEST = 20, 4, 64
"""Steps that a training should have; how many times longer a step takes than encoding its passages; tokens that texts keep at least."""
ENCODINGS_PER_CANDIDATE = 2.5
"""Number of times that the passages are encoded per candidate: about a quarter of them five times in training, and all of them at the end."""


@dataclass
class Adaptation:
    """The steps of `adapt`, each of which is skipped if its result is in the work folder.

    Attributes:
        inputs: the inputs that all candidates share.
        budget: seconds of training and evaluation in all.
        log: prints a line.
        systems: what has been scored so far; the first is the base retriever with BM25.
        baseline: the untrained system that is exported if no training helps.
        stopped: whether Ctrl-C ended the trainings.
        sizes: how many passages are encoded, and the lengths of texts, once they are known.
    """

    inputs: candidates.Inputs
    budget: float
    log: Callable[[str], None]
    systems: list[System] = field(default_factory=list)
    baseline: System | None = None
    stopped: bool = False
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def work(self) -> Path:
        """Folder of the intermediate results."""
        return self.inputs.output

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens per text of the exported retriever; None for that in its folder."""
        return self.inputs.max_length or self.sizes.get("max_length")

    @property
    def measuring(self) -> float:
        """Seconds of measuring; more than the budget allows if even the fewest passages take longer."""
        return self.sizes.get("measuring", self.budget * MEASURING_SHARE)

    def names(self) -> list[str]:
        """Return the names of the candidates that the inputs allow."""
        # Revela trains a transformer.
        given = {"labelled_pairs": self.inputs.labels, "revela": self.inputs.lm and not self.inputs.static}
        return [name for name in CANDIDATES if name not in given or given[name]]

    def seconds(self) -> dict[str, float]:
        """Return the training time of each candidate."""
        names = self.names()
        whole = sum(TIME_SHARES[name] for name in names)
        return {name: self.budget * (1 - MEASURING_SHARE) * TIME_SHARES[name] / whole for name in names}

    def probe(self, sources: Any, found: Inspection, *, write: bool = True) -> Probe:
        """Make the probe of at most half of the natural pairs, or of the labels, and write its dev half for the runs."""
        self.sizes = self._state("probe") or self._measured_sizes(found)
        passages = self.sizes["passages"]
        self.inputs = replace(self.inputs, passages=passages, training_length=self.sizes.get("training_length"))
        most = int(passages * QUERIES_PER_PASSAGE)
        queries = max(MIN_QUERIES, min(most, found.natural_pairs // 2))
        settings, unprinted = ProbeSettings(queries, passages, seed=0), ReadReport()  # `inspect` reported the same
        probe = build_probe(sources, settings, examples=self.inputs.examples, report=unprinted)
        if self.inputs.pairs:
            rows, report = self.inputs.pairs
            self.log(f"labels: {report}")
            left = self.work / LABELS
            kept = left if write else Path(os.devnull)
            if task := hold_out_labels(rows, probe.task.corpus, most, passages, kept, log=self.log):
                probe = replace(probe, task=task)
                self.inputs = replace(self.inputs, labels=str(left))
        self.dev, self.test = split_by_document(probe, self.log)
        self.task = probe.task
        self._check_same_text(write=write)
        if write and not self.inputs.probe.exists():
            # With all queries, although only some have judgements: runs train on no pair that asks one of them.
            measured = measured_in_training(self.dev)
            measured = replace(measured, queries=measured.queries | probe.task.queries)
            with atomic(self.inputs.probe) as part:
                write_probe(replace(probe, task=measured), part)
        return probe

    def _check_same_text(self, *, write: bool) -> None:
        """Check that the kept rankings are of this task: its ids are numbers, so those of another text would match silently."""
        known, digest = self._state("probe"), key_of(self.task.corpus, self.task.queries, self.task.qrels)
        if known.get("task", digest) != digest:
            raise UserError(
                f"the text or the labels have changed since the earlier run in {self.work.parent}: restore them, or use a new"
                " --output_dir"
            )
        if write and "task" not in known:  # only now: the sizes are those of a run with these options
            self.work.mkdir(parents=True, exist_ok=True)
            self._remember("probe", self.sizes | {"task": digest})

    def _measured_sizes(self, found: Inspection) -> dict[str, int]:
        """Return how many passages can be encoded as often as needed, and the length of training texts."""
        if not found.sample:  # making the probe will say why that is too little
            return {"passages": FEWEST_PASSAGES}
        model = self._load(self.inputs.retriever)
        texts = list(found.sample)
        encode_texts(model, texts[:8], "document")  # the first call is slower
        began = time.monotonic()
        encode_texts(model, texts, "document")
        each = (time.monotonic() - began) / len(texts)
        trained = len(self.names())
        # And the base model and the average; late interaction encodes the passages of all but one of these again.
        times = ENCODINGS_PER_CANDIDATE * trained + 2 + (trained + 1 if has_tokens(model) else 0)
        affordable = int(self.budget * MEASURING_SHARE / times / each)
        sizes = {"passages": min(PASSAGES, max(FEWEST_PASSAGES, affordable))}
        if affordable < FEWEST_PASSAGES:
            sizes["measuring"] = math.ceil(FEWEST_PASSAGES * times * each)
        longest = length_limit(model)
        seconds = max(self.seconds().values(), default=self.budget)
        if longest and (cut := training_length(longest, seconds, each)) < longest:
            sizes |= {"max_length": longest, "training_length": cut}
        return sizes

    def baselines(self, *, code: bool = False) -> None:
        """Rank with BM25 and the base retriever, and fit the weight of their hybrid; then that of late interaction.

        If the text has code, BM25 with split identifiers is tried, too, and used below if it is better.
        """
        self.systems = [self._system(UNTRAINED[0], BASE, self.inputs.retriever, 0.0)]
        if code:
            self.inputs = replace(self.inputs, bm25=replace(self.inputs.bm25, split_identifiers=True))
            self.systems.append(self._system(UNTRAINED[1], BASE, self.inputs.retriever, 0.0))
        self.baseline = best_on(self.dev, self.systems)
        self.inputs = replace(self.inputs, bm25=self.baseline.settings, bm25_weight=self.baseline.weight)
        if has_tokens(self._load(self.inputs.retriever)):
            with_tokens = self._with_tokens(replace(self.baseline, name=UNTRAINED[2]), OWN_WEIGHT)
            self.systems.append(with_tokens)
            self.baseline = with_tokens if with_tokens.token_weight else self.baseline

    def try_candidates(self) -> None:
        """Train and score the candidates; Ctrl-C ends the current one and skips the rest."""
        for name, seconds in self.seconds().items():
            if self._folder(name) or not self.stopped:
                with self._ending_on_ctrl_c():
                    try:
                        self._try(name, seconds)
                    except UserError as error:  # such as a retriever that a method does not support
                        self.log(f"{_title(name)}: skipped, because {error}")

    def _try(self, name: str, seconds: float) -> None:
        folder = self._folder(name)
        if folder is None:
            self.log(f"{_title(name)}: training for {seconds / 60:.1f} min")
            started = time.monotonic()
            with contextlib.redirect_stdout(io.StringIO()):  # the run's own report
                folder = CANDIDATES[name](self.inputs, seconds)
            kept = str(folder.relative_to(self.work))
            self._remember(name, {"folder": kept, "seconds": time.monotonic() - started})
        self._add(_title(name), name, folder, self._state(name)["seconds"])

    @contextlib.contextmanager
    def _ending_on_ctrl_c(self) -> Iterator[None]:
        """Stop the trainings and measurements on Ctrl-C, without an error: the verdict follows."""
        try:
            yield
        except KeyboardInterrupt as error:
            if status_of(error) != 128 + signal.SIGINT:
                # Without the message of the training, which names an option that adapt does not have.
                raise Interrupted("", status_of(error) - 128) from error
            self.stopped = True
            self.log("stopped: the verdict is on what has finished; repeat the command to resume")

    def average(self) -> None:
        """Average the candidates that are better than the base on the dev half, if there are several."""
        before = (self.baseline or self.systems[0]).mean(self.dev)
        helped = [system for system in self._trained() if system.mean(self.dev) > before]
        if len(helped) < 2 or self.stopped:
            return
        with self._ending_on_ctrl_c():
            folder = self.work / "average" / RETRIEVER
            if self._folder("average") is None:
                shutil.rmtree(folder, ignore_errors=True)
                candidates.average([self._load(system.folder) for system in helped], folder)
                kept = str(folder.relative_to(self.work))
                self._remember("average", {"folder": kept, "of": [system.name for system in helped]})
            self._add("average of " + " and ".join(system.name for system in helped), "average", folder, 0.0)

    def verdict(self) -> Verdict:
        """Select on the dev half, and compare with the base on the test half."""
        base, fitted = self.systems[0], self.baseline or self.systems[0]
        selected = select(fitted, self._trained(), self.dev)
        untrained = self._without_harm(fitted)
        # The whole must be better, and so must the training's part: late interaction and split identifiers need no training.
        better = selected is not fitted and compare(base, selected, self.test).verdict == "better"
        chosen = select(untrained, [selected], self.test) if better else untrained
        best = selected if chosen is base else chosen
        return Verdict(base, chosen, best, compare(base, best, self.test), self.systems, self.dev, self.test)

    def _without_harm(self, untrained: System) -> System:
        """Return an untrained system without late interaction and split identifiers, if they are significantly worse on the test half."""
        with_its_bm25 = [
            each for each in self.systems if each.name in UNTRAINED[:2] and each.settings == untrained.settings
        ]
        for simpler in (*with_its_bm25, self.systems[0]):
            if compare(simpler, untrained, self.test).verdict == "worse":
                untrained = simpler
        return untrained

    def _trained(self) -> list[System]:
        return [system for system in self.systems if system.name not in UNTRAINED]

    def _add(self, title: str, name: str, folder: Path, seconds: float) -> None:
        base, tried = self.systems[0], self._system(title, name, str(folder), seconds)
        gain = compare(base, tried, self.dev)
        self.systems.append(tried)  # only now: Ctrl-C may end the measuring
        found = f"{gain.difference:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}] nDCG@10 on the dev half"
        whole = combined(title, tried.token_weight)
        self.log(f"{title}: base retriever kept" if tried.dense == base.dense else f"{whole}: {found}")

    def _system(self, title: str, name: str, folder: str, seconds: float) -> System:
        dense = self._rankings(name, lambda: retrieval_run(self._load(folder), self.task))
        settings = self.inputs.bm25
        kept = "bm25-split" if settings.split_identifiers else "bm25"
        bm25 = self._rankings(kept, lambda: bm25_run(self.task, settings))
        # Without evidence, a candidate keeps the weight of the base retriever: another weight is a difference by chance.
        prior = self.baseline.weight if self.baseline else BM25_WEIGHT
        system = System(title, folder, dense, bm25, fit_weight(dense, bm25, self.dev, prior), seconds, settings)
        if self.baseline and self.baseline.token_weight:
            return self._with_tokens(system, self.baseline.token_weight, name)
        return system

    def _with_tokens(self, system: System, prior: float, name: str = BASE) -> System:
        """Add late interaction to a system, and fit its weight."""
        if self.systems and system.dense == self.systems[0].dense:  # the training kept the base retriever
            name = BASE
        best = best_of(hybrid_run(system.dense, system.bm25, self.task, system.weight))
        kept = f"{name}-tokens-{system.weight}"
        tokens = self._rankings(kept, lambda: rerank_run(best, self.task, Reranker(self._load(system.folder))))
        return replace(system, tokens=tokens, token_weight=fit_weight(best, tokens, self.dev, prior, TOKEN_ERRORS))

    def _load(self, folder: str) -> SentenceTransformer:
        return load_retriever(
            folder, max_length=self.max_length, trust_remote_code=self.inputs.options.get("trust_remote_code", False)
        )

    def _rankings(self, name: str, make: Callable[[], Rankings]) -> Rankings:
        file = self.work / "rankings" / f"{name}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(make()))
        found: Rankings = json.loads(file.read_text(encoding="utf-8"))
        return found

    def _states(self) -> dict[str, dict[str, Any]]:
        file = self.work / STATE
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def _state(self, name: str) -> dict[str, Any]:
        return self._states().get(name, {})

    def _folder(self, name: str) -> Path | None:
        """Return the retriever of a finished step, or None; it is recorded relative to the work folder, which may be moved."""
        kept = self._state(name).get("folder")
        return self.work / kept if kept and (self.work / kept).is_dir() else None

    def _remember(self, name: str, values: dict[str, Any]) -> None:
        write_text(self.work / STATE, json.dumps(self._states() | {name: values}, indent=2))


def training_length(longest: int, seconds: float, each: float) -> int:
    """Return the number of tokens to which training texts are cut, so that a slow machine takes about `STEPS` steps.

    `longest` is the retriever's maximum, and `each` the seconds to encode a passage.
    """
    steps = seconds / (PASSES * each * candidates.PAIRS["per_device_train_batch_size"])
    return min(longest, max(SHORTEST, int(longest * steps / STEPS)))


def _title(name: str) -> str:
    return name.replace("_", " ")
