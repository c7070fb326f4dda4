"""Adapt a retriever to a text: measure baselines, try candidates within a time budget, select on the dev half, report on the test half.

Everything is kept in `work/` of the output folder: the probe, the rankings of each system, and the runs. A repeated command skips what is
there, so it can be stopped at any time.
"""

import contextlib
import io
import json
import math
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from sentence_transformers import SentenceTransformer
from transformers import AutoConfig

from revela_hub.adaptation import SETTINGS, candidates, plan
from revela_hub.adaptation.candidates import Inputs
from revela_hub.adaptation.labels import hold_out_labels
from revela_hub.adaptation.options import AdaptOptions
from revela_hub.adaptation.plan import Plan, inspect
from revela_hub.adaptation.systems import System, best_of, best_on, compare, measured_in_training, split_by_document
from revela_hub.adaptation.verdict import Verdict, decide, interval
from revela_hub.data.mixture.labelled import read_labelled_pairs
from revela_hub.data.sources.beir import read_queries
from revela_hub.data.sources.report import ReadReport
from revela_hub.errors import UserError
from revela_hub.evaluation.hybrid_weight import fit_weight, fuse_runs
from revela_hub.evaluation.probe import MIN_QUERIES, ProbeSettings, build_probe, write_probe
from revela_hub.evaluation.retrieval import Rankings, bm25_run, rerank_run, retrieval_run
from revela_hub.files import atomic, content_digest, key_of, local_path, write_text
from revela_hub.interrupts import Interrupted, status_of
from revela_hub.output import clock, is_quiet, note
from revela_hub.retrieval.bm25 import BM25, BM25Settings
from revela_hub.retrieval.hybrid import BM25_WEIGHT
from revela_hub.retrieval.rerank import OWN_WEIGHT, Reranker, has_tokens
from revela_hub.trainers.base.measuring import MEASUREMENTS_FOLDER
from revela_hub.trainers.base.retriever import RETRIEVER, load_retriever

WORK, STATE, BASE, LABELS = "work", "state.json", "base", "labels.jsonl"
QUERIES_PER_PASSAGE = 0.8
TOKEN_ERRORS = 2.0
"""Standard errors by which another weight of late interaction must beat its default, which gained or changed nothing on all labelled
collections (benchmarks/adaptation)."""


class Adaptation:
    """The steps of `adapt`, each of which is skipped if its result is in the work folder; `log` prints a line.

    `state` keeps the plan, and the seconds of each finished training. `task` is the probe's task, or that of labelled queries; `dev`
    and `test` are its halves. Of the `systems`, the first is the base retriever alone, the second adds BM25; `baseline` is the
    untrained system that is exported if no training helps.
    """

    def __init__(self, options: AdaptOptions, log: Callable[[object], None]) -> None:
        rate = options.learning_rate or candidates.default_rate(options.retriever)
        self.options, self.log = replace(options, learning_rate=rate), log
        self.work = options.output / WORK
        state = self.work / STATE
        self.state: dict[str, Any] = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
        self.systems: list[System] = []
        self.baseline: System | None = None
        self.stopped = False

    def run(self) -> Verdict:
        """Return the verdict, after all steps."""
        has_code = self.prepare()
        if left := [seconds for name, seconds in self.plan.training.items() if name not in self.state]:
            end = time.localtime(time.time() + sum(left) + self.plan.measuring)
            self.log(f"expected end: {time.strftime('%H:%M', end)}")
        self._keep_probe()
        self.measure_baselines(code=has_code)
        self.try_candidates()
        return decide(self.systems, self.baseline or self.systems[1], self.dev, self.test)

    def prepare(self) -> bool:
        """Inspect the text, make the plan and the probe, and print them; return whether the text has code.

        The probe has at most half of the natural pairs, or held-out labels.
        """
        options = self.options
        language = BM25Settings(stemmer=options.bm25_stemmer, stopwords=options.bm25_stopwords)
        bm25 = BM25([""], language).settings  # an unknown name is an error before the work
        if options.lm:  # it is needed last, but an error in its name should come first
            AutoConfig.from_pretrained(options.lm, trust_remote_code=options.trust_remote_code)
        examples = list(read_queries(options.example_queries).values()) if options.example_queries else []
        pairs, labelled = read_labelled_pairs(options.labels) if options.labels else (None, None)
        report = ReadReport()
        self.text = text = inspect(options.sources(), report)
        self.log(text)
        note("; ".join(report.remarks()))  # the counts are in the lines above
        if made := self.state.get("plan"):
            self.plan = Plan(**made)
        else:
            model = self._load(options.retriever, options.max_length)
            self.plan = plan.make_plan(model, text.sample, options.seconds, candidates.possible(options))
        most = int(self.plan.passages * QUERIES_PER_PASSAGE)
        queries = max(MIN_QUERIES, (text.passages - text.pairs["none"]) // 2)
        settings = ProbeSettings(min(most, queries), self.plan.passages, seed=0)
        self.probe = build_probe(options.sources(), settings, examples=examples, report=ReadReport())
        labels = options.labels
        if pairs is not None:
            self.log(f"labels: {labelled}")
            left = self.work / LABELS
            if task := hold_out_labels(pairs, self.probe.task.corpus, most, self.plan.passages, left, self.log):
                self.probe, labels, queries = replace(self.probe, task=task), str(left), len({*pairs["anchor"]}) // 2
        self.task = self.probe.task
        self.dev, self.test = split_by_document(self.probe, self.log)
        self.inputs = Inputs(self.options, self.plan, self.work / "dev-probe", labels, bm25)
        most = (min(queries, int(plan.MAX_PASSAGES * QUERIES_PER_PASSAGE)) + 1) // 2
        self.most = max(most, len(self.test.queries))
        halves = f"dev half {len(self.dev.queries)}, test half {len(self.test.queries)}"
        self.log(f"{self.probe}; {halves} (at most {self.most} with a larger --budget)")
        self.log(self.plan)
        takes = self.plan.measuring + sum(self.plan.training.values())
        if takes > 1.1 * options.seconds:
            enough = math.ceil(self.plan.measuring / plan.MEASURING / 60)
            short = f"--budget {options.budget} is too short for this machine: it takes about {clock(takes)} instead, with the fewest"
            self.log(f"{short} test queries and shorter trainings; a full run needs --budget {enough}m")
        return text.has_code

    def _keep_probe(self) -> None:
        """Write the settings, the plan, the probe, and its dev half for the runs.

        Results of an earlier run are used only if all is the same: the ids of queries are numbers, and would match those of any text.
        """
        settings = _comparable(self.options) | {"task": key_of(self.task.corpus, self.task.queries, self.task.qrels)}
        file = self.options.output / SETTINGS
        if file.exists():
            before = json.loads(file.read_text(encoding="utf-8"))
            if (budget := before.get("budget", self.options.budget)) != self.options.budget:
                self._change_budget(self.options.seconds / replace(self.options, budget=budget).seconds)
                write_text(file, json.dumps(before := before | {"budget": self.options.budget}, indent=2) + "\n")
            if changed := [name for name, value in settings.items() if before.get(name) != value]:
                raise UserError(
                    f"{self.options.output} has results of another text, model or options ({', '.join(changed)} changed):"
                    " restore them, or use a new --output_dir"
                )
        else:
            self._remember("plan", asdict(self.plan))
            write_text(file, json.dumps(settings, indent=2) + "\n")
        if not (whole := self.work / "probe").exists():
            with atomic(whole) as part:
                write_probe(self.probe, part)
        if not self.inputs.probe.exists():
            # With all queries, although only some have judgements: runs train on no pair that asks one of them.
            measured = measured_in_training(self.dev)
            measured = replace(measured, queries=measured.queries | self.task.queries)
            with atomic(self.inputs.probe) as part:
                write_probe(replace(self.probe, task=measured), part)

    def _change_budget(self, factor: float) -> None:
        """Continue a run of another budget: its probe stays, and with more time, finished candidates are trained again."""
        longer = {name: factor * seconds for name, seconds in self.plan.training.items()}
        self.plan = self.inputs.plan = replace(self.plan, training=longer)
        for name in self.plan.training if factor > 1 else ():
            if self.state.pop(name, None) is not None:
                shutil.rmtree(self.work / name, ignore_errors=True)
                for rankings in (self.work / "rankings").glob(f"{name}*.json"):
                    rankings.unlink()
        self._remember("plan", asdict(self.plan))
        self.log(f"another budget: the probe of the earlier run stays; {self.plan}")

    def measure_baselines(self, *, code: bool = False) -> None:
        """Rank with the base retriever and BM25, and fit the weight of their hybrid; then that of late interaction.

        If the text has code, BM25 with split identifiers is tried, too, and used below if it is better.
        """
        retriever = self.options.retriever
        hybrid = self._system("base + BM25", BASE, retriever)
        self._add(replace(hybrid, name="base retriever", bm25_weight=0.0))
        self._add(hybrid)
        if code:
            self.inputs.bm25 = replace(self.inputs.bm25, split_identifiers=True)
            self._add(self._system("base + BM25 + split identifiers", BASE, retriever))
        best = self.baseline = best_on(self.dev, self.systems[1:])
        self.inputs.bm25, self.inputs.bm25_weight = best.bm25_settings, best.bm25_weight
        if has_tokens(self._model(retriever)):
            tokens = self._with_tokens(replace(best, name=f"{best.name} + late interaction"), OWN_WEIGHT, BASE)
            self._add(tokens)
            self.baseline = tokens if tokens.token_weight else best

    def try_candidates(self) -> None:
        """Train and score the candidates; Ctrl-C ends the current one and skips the rest."""
        for name, seconds in self.plan.training.items():
            if name in self.state or not self.stopped:
                try:
                    self._try(name, name.replace("_", " "), seconds)
                except UserError as error:  # such as a retriever that a method does not support
                    self.log(f"training with {name.replace('_', ' ')}: skipped, because {error}")
                except KeyboardInterrupt as error:
                    if status_of(error) != 128 + signal.SIGINT:
                        # Without the message of the training, which names an option that adapt does not have.
                        raise Interrupted("the same command resumes", status_of(error) - 128) from error
                    self.stopped = True
                    self.log("stopped: the verdict is on what has finished; repeat the command to resume")

    def _try(self, name: str, title: str, seconds: float) -> None:
        folder = self.work / name
        if name not in self.state:
            self.log(f"training with {title} for {seconds / 60:.1f} min")
            started = time.monotonic()
            with contextlib.redirect_stdout(io.StringIO()):  # the run's own report
                candidates.CANDIDATES[name](self.inputs, folder, seconds)
            self._remember(name, time.monotonic() - started)
            for part in (*folder.glob("checkpoint-*"), folder / MEASUREMENTS_FOLDER):
                shutil.rmtree(part, ignore_errors=True)
        system = self._system(f"trained with {title}", name, str(folder / RETRIEVER))
        self._add(replace(system, seconds=self.state[name]))

    def _add(self, system: System) -> None:
        """Add a system to the others, and print its scores on the dev half."""
        gain = f", {interval(compare(self.systems[0], system, self.dev))}" if self.systems else ""
        self.systems.append(system)  # only now: Ctrl-C may end the measuring
        self.log(f"{system.name}: nDCG@10 {system.mean(self.dev):.3f}{gain} on the dev half")

    def _system(self, title: str, name: str, folder: str) -> System:
        dense = self._rankings(name, lambda: retrieval_run(self._model(folder), self.task, not is_quiet()))
        settings = self.inputs.bm25
        of_bm25 = "bm25-split" if settings.split_identifiers else "bm25"
        bm25 = self._rankings(of_bm25, lambda: bm25_run(self.task, settings))
        # Without evidence, a candidate keeps the weight of the base retriever: another weight is a difference by chance.
        prior = self.baseline.bm25_weight if self.baseline else BM25_WEIGHT
        system = System(title, folder, dense, bm25, fit_weight(dense, bm25, self.dev, prior), settings)
        if self.baseline and self.baseline.token_weight:
            # A training that kept the base retriever has its token vectors.
            kept = BASE if dense == self.systems[0].dense else name
            return self._with_tokens(system, self.baseline.token_weight, kept)
        return system

    def _with_tokens(self, system: System, prior: float, name: str) -> System:
        """Add late interaction to a system, and fit its weight."""
        best = best_of(fuse_runs(system.dense, system.bm25, self.task, system.bm25_weight))
        file = f"{name}-tokens-{system.bm25_weight}"
        tokens = self._rankings(
            file, lambda: rerank_run(best, self.task, Reranker(self._model(system.folder)), not is_quiet())
        )
        return replace(system, tokens=tokens, token_weight=fit_weight(best, tokens, self.dev, prior, TOKEN_ERRORS))

    def _model(self, folder: str) -> SentenceTransformer:
        return self._load(folder, self.plan.max_length)

    def _load(self, name: str, max_length: int | None) -> SentenceTransformer:
        return load_retriever(name, max_length=max_length, trust_remote_code=self.options.trust_remote_code)

    def _rankings(self, name: str, make: Callable[[], Rankings]) -> Rankings:
        file = self.work / "rankings" / f"{name}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(make()))
        found: Rankings = json.loads(file.read_text(encoding="utf-8"))
        return found

    def _remember(self, name: str, value: object) -> None:
        self.state[name] = value
        write_text(self.work / STATE, json.dumps(self.state, indent=2))


def _comparable(options: AdaptOptions) -> dict[str, Any]:
    """Return the options that change the result, with digests of the models and files that they name."""
    ignored = ("output_dir", "cache_dir", "dry_run")
    settings = {name: value for name, value in vars(options).items() if name not in ignored}
    paths = {name: local_path(settings[name] or "") for name in ("retriever", "lm", "labels", "example_queries")}
    content = {name: content_digest(path)[:12] for name, path in paths.items() if settings[name] and path.exists()}
    return settings | {f"content of {name}": digest for name, digest in content.items()}
