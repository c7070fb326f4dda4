"""The result of `adapt`: all systems on the test half, the selected one and the exported one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.util import get_device_name

from revela_hub.adaptation import HYBRID, REPORT
from revela_hub.adaptation.options import AdaptOptions
from revela_hub.adaptation.systems import System, compare, select
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.significance import PairedDifference
from revela_hub.files import atomic, write_text
from revela_hub.hub_cards import ModelCardMetadata, Result, write_card
from revela_hub.hub_cards.export import make_readable
from revela_hub.trainers.base.callbacks import clock
from revela_hub.trainers.base.retriever import RETRIEVER, load_retriever
from revela_hub.trainers.base.run import for_card, hardware


@dataclass
class Verdict:
    """Result of `adapt`.

    Attributes:
        systems: all systems; the first is the base retriever with BM25.
        chosen: the exported system: a better one, or one with the base retriever.
        best: the system of the verdict: the exported one, or the one selected on the dev half if the base with BM25 is exported.
        dev: the dev half.
        test: the test half.
    """

    systems: Sequence[System]
    chosen: System
    best: System
    dev: RetrievalTask
    test: RetrievalTask

    @property
    def base(self) -> System:
        """The base retriever with BM25."""
        return self.systems[0]

    @cached_property
    def difference(self) -> PairedDifference:
        """Difference of the best system and the base, on the test half."""
        return compare(self.base, self.best, self.test)

    @property
    def word(self) -> str:
        """`BETTER`, `WORSE` or `NO DIFFERENCE`."""
        return {"better": "BETTER", "worse": "WORSE"}.get(self.difference.verdict, "NO DIFFERENCE")

    def line(self, folder: Path) -> str:
        """Return the last line of the output, for scripts."""
        weight = f"bm25_weight {self.chosen.bm25_weight:.1f}"
        return f"VERDICT: {self.word} {interval(self.difference)} nDCG@10 | retriever {folder} | {weight}"

    def sentence(self) -> str:
        """Return the verdict as a sentence, for the model card."""
        if self.best is self.base:
            return "No training was better than the base retriever on the queries that select."
        d, retriever = self.difference, self.best.name if self.best.trained else self.base.name
        return (
            f"The selected system ({retriever}, with {with_what(self.best)}) differs from the base retriever with BM25 by"
            f" {d.difference:+.3f} (95% interval {d.low:+.3f} to {d.high:+.3f}, {d.queries} queries) in nDCG@10 on held-out"
            " queries, which also decide whether a training is exported."
        )

    def cost(self) -> str:
        """Return the time of training and the hardware as a sentence, for the model card."""
        seconds = sum(system.seconds or 0 for system in self.systems)
        return f"Training all candidates took {clock(seconds)} on {hardware(torch.device(get_device_name()))}."

    def means(self) -> dict[str, float]:
        """Return mean nDCG@10 on the test half of BM25 and the base retriever alone, and of all systems."""
        names = {True: "BM25, identifiers split", False: "BM25"}
        rows = {names[each.bm25_settings.split_identifiers]: each.mean(self.test, 1.0) for each in self.systems}
        rows["base retriever alone"] = self.base.mean(self.test, 0.0)
        return rows | {each.label: each.mean(self.test) for each in self.systems}

    def table(self) -> str:
        """Format all systems with their scores, weights and intervals."""
        bm25 = {name: mean for name, mean in self.means().items() if name.startswith("BM25")}
        width = max(map(len, [*bm25, *(system.name for system in self.systems)]))
        lines = [f"{'test half':<{width}}  alone  combined  BM25 weight  token weight  difference"]
        lines += [f"{name:<{width}}  {score:5.3f}" for name, score in bm25.items()]
        for system in self.systems:
            alone, combined = system.mean(self.test, 0.0), system.mean(self.test)
            tokens = f"{system.token_weight:.1f}" if system.tokens else "-"
            row = f"{system.name:<{width}}  {alone:5.3f}  {combined:8.3f}  {system.bm25_weight:11.1f}  {tokens:>12}"
            if system.trained and system.dense == self.base.dense:  # no gain on the dev half
                row += "  none: base retriever kept"
            elif system is not self.base:
                row += f"  {interval(compare(self.base, system, self.test))}"
            lines.append(row + ("  <- exported" if system is self.chosen else ""))
        return "\n".join(lines)

    def parts(self) -> dict[str, PairedDifference]:
        """Return what BM25, split identifiers, late interaction and training add, one after the other, to the base retriever alone."""
        chosen, of_base = self.chosen, [system for system in self.systems if not system.trained]
        split = next(system for system in of_base if system.bm25_settings == chosen.bm25_settings)
        tokens = next((system for system in of_base if system.token_weight and chosen.token_weight), split)
        steps = {
            f"BM25, weight {self.base.bm25_weight:.1f}": self.base,
            "identifiers split": split,
            f"late interaction, weight {tokens.token_weight:.1f}": tokens,
            chosen.name: chosen,
        }
        before = alone = replace(self.base, bm25_weight=0.0)
        found = {}
        for name, after in steps.items():
            if after is not before:
                found[name] = compare(before, after, self.test)
            before = after
        return found | {"together": compare(alone, chosen, self.test)}

    def summary(self) -> str:
        """Format `parts`."""
        parts, chosen = self.parts(), self.chosen
        width = max(map(len, parts))
        names = [chosen.name if chosen.trained else self.base.name, "BM25"]
        names += ["late interaction"] if chosen.token_weight else []
        before, after = self.base.mean(self.test, 0.0), chosen.mean(self.test)
        lines = [f"nDCG@10 on the test half: {before:.3f} ({self.base.name}) -> {after:.3f} ({', '.join(names)})"]
        lines += [f"  {name:<{width}}  {interval(d)}" for name, d in parts.items()]
        if not chosen.trained and any(system.trained for system in self.systems):
            lines.insert(-1, f"  {'training':<{width}}  not kept")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary, for JSON."""
        return {
            "verdict": self.word,
            "difference": self.difference.to_dict(),
            "exported": self.chosen.name,
            "trained": self.chosen.trained,
            **self.hybrid(),
            "parts": {name: d.to_dict() for name, d in self.parts().items()},
            "queries": {"dev": len(self.dev.queries), "test": len(self.test.queries)},
            "ndcg_at_10": self.means(),
            "systems": [
                {
                    "name": each.name,
                    "bm25_weight": each.bm25_weight,
                    "token_weight": each.token_weight,
                    "seconds": round(each.seconds or 0, 1),
                    "difference": compare(self.base, each, self.test).to_dict(),
                }
                for each in self.systems
            ],
            "cost": self.cost(),
        }

    def hybrid(self) -> dict[str, Any]:
        """Return the weights and the settings of BM25 of the exported system."""
        settings = self.chosen.bm25_settings
        bm25 = {name: getattr(settings, name) for name in ("stemmer", "stopwords", "split_identifiers")}
        return {"bm25_weight": self.chosen.bm25_weight, "token_weight": self.chosen.token_weight, "bm25": bm25}

    def write(self, options: AdaptOptions, max_length: int | None) -> None:
        """Write the retriever with its card, the settings of the hybrid and the report."""
        folder = options.output / RETRIEVER
        model = load_retriever(self.chosen.folder, max_length=max_length, trust_remote_code=options.trust_remote_code)
        with atomic(folder) as part:
            model.save_pretrained(str(part), create_model_card=False)
            make_readable(part)
        write_card(folder, self.card(options))
        write_text(options.output / HYBRID, json.dumps(self.hybrid(), indent=2) + "\n")
        report = self.to_dict() | {"settings": portable(options)}
        write_text(options.output / REPORT, json.dumps(report, indent=2) + "\n")  # the last: marks a finished run

    def card(self, options: AdaptOptions) -> ModelCardMetadata:
        """Return the metadata of the model card."""
        task = f"held-out {'labelled queries' if self.test.name == 'labels' else 'queries of the text'} (test half)"
        # BM25 is not published with the model: the model's own score is without it.
        with_parts = f"this model, with {with_what(self.chosen)}"
        means: list[tuple[str | None, float]] = [(None, self.chosen.mean(self.test, 0.0))]
        means += [(with_parts, self.chosen.mean(self.test)), *self.means().items()]
        return ModelCardMetadata(
            description=(
                f"A retriever adapted to a text {'and labelled pairs' if options.labels else 'without labels'} by `revela-hub adapt`."
                if self.chosen.trained
                else "The base retriever, unchanged: no training on the text was significantly better."
            ),
            base_model=None if Path(options.retriever).exists() else options.retriever,
            training_data=f"Queries and passages made from raw text{', and labelled pairs' if options.labels else ''}.",
            training_run=self.cost(),
            command="revela-hub adapt",
            config=json.dumps(portable(options), indent=2),
            results=[Result(task, {"ndcg_at_10": mean}, model=name) for name, mean in means],
            verdict=self.sentence(),
        )


def decide(systems: Sequence[System], untrained: System, dev: RetrievalTask, test: RetrievalTask) -> Verdict:
    """Select a system on the dev half, and confirm it on the test half.

    `untrained` is the system with the base retriever that is exported if no training helps.
    """
    base = systems[0]
    selected = select(untrained, [system for system in systems if system.trained], dev)
    kept = without_harm(untrained, systems, test)
    # The whole must be better, and so must the training's part: late interaction and split identifiers need no training.
    better = selected is not untrained and compare(base, selected, test).verdict == "better"
    chosen = select(kept, [selected], test) if better else kept
    return Verdict(systems, chosen, selected if chosen is base else chosen, dev, test)


def without_harm(untrained: System, systems: Sequence[System], test: RetrievalTask) -> System:
    """Return an untrained system without late interaction and split identifiers, if they are significantly worse on the test half."""
    same = [each for each in systems if not each.trained and not each.tokens]
    with_its_bm25 = [each for each in same if each.bm25_settings == untrained.bm25_settings]
    for simpler in (*with_its_bm25, systems[0]):
        if compare(simpler, untrained, test).verdict == "worse":
            untrained = simpler
    return untrained


def interval(d: PairedDifference) -> str:
    """Format a difference: `+0.024 [+0.006, +0.043]`."""
    return f"{d.difference:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"


def with_what(system: System) -> str:
    """Describe what a system adds to its retriever."""
    split = " and split identifiers" if system.bm25_settings.split_identifiers else ""
    tokens = f" and late interaction (weight {system.token_weight:.1f})" if system.token_weight else ""
    return f"BM25 (weight {system.bm25_weight:.1f}{split}){tokens}"


def portable(options: AdaptOptions) -> dict[str, Any]:
    """Return the options without paths of this machine."""
    left_out = ("output_dir", "cache_dir", "dry_run", "data")
    values = {name: for_card(name, value) for name, value in vars(options).items() if name not in left_out}
    return {name: value for name, value in values.items() if value not in (None, [], False)}
