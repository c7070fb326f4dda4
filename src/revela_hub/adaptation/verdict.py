"""The result of `adapt`: all systems on the test half compared with the base retriever alone, and the exported one."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from sentence_transformers.util import get_device_name

from revela_hub.adaptation import REPORT
from revela_hub.adaptation.options import AdaptOptions
from revela_hub.adaptation.systems import System, best_on, compare, select
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.significance import FEWEST_QUERIES, PairedDifference, compare_queries, too_few_queries
from revela_hub.files import atomic, write_text
from revela_hub.hub_cards import ModelCardMetadata, Result, write_card
from revela_hub.hub_cards.contents import HYBRID
from revela_hub.hub_cards.export import make_readable
from revela_hub.hub_cards.metadata import for_card, hub_model_id, is_local
from revela_hub.loading import hardware, hub_name
from revela_hub.output import clock
from revela_hub.trainers.base.retriever import RETRIEVER, load_retriever


@dataclass
class Verdict:
    """Result of `adapt`: all systems (the first is the base retriever alone, the second adds BM25), and the exported one."""

    systems: Sequence[System]
    chosen: System
    dev: RetrievalTask
    test: RetrievalTask

    @cached_property
    def difference(self) -> PairedDifference:
        """Difference of the exported system and the base retriever alone, on the test half."""
        return compare(self.systems[0], self.chosen, self.test)

    @property
    def word(self) -> str:
        """`BETTER`, `WORSE` or `NO DIFFERENCE`."""
        return {"better": "BETTER", "worse": "WORSE"}.get(self.difference.verdict, "NO DIFFERENCE")

    def line(self, folder: Path) -> str:
        """Return the last line of the output, for scripts."""
        weight = f"bm25_weight {self.chosen.bm25_weight:.1f}"
        return f"VERDICT: {self.word} {interval(self.difference)} nDCG@10 | retriever {folder} | {weight}"

    def sentence(self) -> str:
        """Return the verdict as a sentence."""
        if self.chosen is self.systems[0]:
            return f"Kept the base model: nothing was better with {self.difference.queries} held-out queries."
        d, retriever = self.difference, f"retriever {self.chosen.name}" if self.chosen.trained else "base retriever"
        change = f"The {'loss' if d.difference < 0 else 'gain'} of {interval(d)} over the base retriever alone is"
        change += f" {'not ' if self.word == 'NO DIFFERENCE' else ''}significant with {d.queries} held-out queries"
        few = " (too few for a claim)" if d.queries < FEWEST_QUERIES else ""
        bm25 = compare_queries(self.chosen.scores(self.test, 1.0), self.chosen.scores(self.test), self.test.groups)
        return f"{change}{few}; over BM25 alone, it is {interval(bm25)}. Exported: {retriever}{with_what(self.chosen)}."

    def cost(self) -> str:
        """Return the time of training and the hardware as a sentence, for the model card."""
        seconds = sum(system.seconds or 0 for system in self.systems)
        return f"Training all candidates took {clock(seconds)} on {hardware(torch.device(get_device_name()))}."

    def bm25(self) -> dict[str, float]:
        """Return mean nDCG@10 of BM25 alone on the test half, by its settings."""
        names = {True: "BM25 + split identifiers", False: "BM25"}
        return {names[each.bm25_settings.split_identifiers]: each.mean(self.test, 1.0) for each in self.systems}

    def table(self) -> str:
        """Format all systems with their scores, weights, and differences from the base retriever alone, and a legend."""
        base, bm25, title = self.systems[0], self.bm25(), "nDCG@10, test half"
        width = max(map(len, [title, *bm25, *(system.name for system in self.systems)]))
        lines = [f"{title:<{width}}  alone  combined  weights   difference"]
        lines += [f"{name:<{width}}  {score:5.3f}" for name, score in bm25.items()]
        for system in self.systems:
            if system.trained and system.dense == base.dense:
                lines.append(f"{system.name:<{width}}  training did not help")
                continue
            row = f"{system.name:<{width}}  {system.mean(self.test, 0.0):5.3f}"
            if system is not base:
                weights = f"{system.bm25_weight:.1f}{f', {system.token_weight:.1f}' if system.tokens else ''}"
                row += f"  {system.mean(self.test):8.3f}  {weights:<8}  {interval(compare(base, system, self.test))}"
            lines.append(row + ("  <- exported" if system is self.chosen else ""))
        lines.append("alone: vectors; combined: also BM25 and late interaction (token vectors), with these weights")
        lines.append("difference: combined, compared with the base retriever alone (95% interval)")
        if len(bm25) > 1:
            no = "" if self.systems[2].mean(self.dev) > self.systems[1].mean(self.dev) else "not "
            lines.append(f'split identifiers: "header" finds parse_header; {no}better on the dev half: {no}used below')
        if self.test.name != "labels":
            lines.append("A low nDCG@10 is normal: the queries were cut out of the passages. Only differences matter.")
        return "\n".join(lines)

    def parts(self) -> dict[str, PairedDifference]:
        """Return what BM25, split identifiers, late interaction and training add, one after the other, to the base retriever alone."""
        chosen, used = self.chosen, (self.systems[1].bm25_settings, self.chosen.bm25_settings)
        before = self.systems[: next(place for place, system in enumerate(self.systems) if system is chosen)]
        steps = [
            each
            for each in before
            if not each.trained and each.bm25_settings in used
            if not each.tokens or (each.token_weight and chosen.token_weight)
        ]
        return {
            "training" if b.trained else b.name.rpartition(" + ")[2]: compare(a, b, self.test)
            for a, b in pairwise([*steps, chosen])
        } | {"together": self.difference}

    def not_kept(self) -> dict[str, PairedDifference]:
        """Return what late interaction and the training that the dev half selects would add to the exported system."""
        chosen, found = self.chosen, {}
        plain = {str(each.bm25_settings): each for each in self.systems if not each.trained and not each.tokens}
        for each in self.systems:
            if each.tokens and each.token_weight and not each.trained and not chosen.token_weight:
                found["late interaction"] = compare(plain[str(each.bm25_settings)], each, self.test)
        trained = [each for each in self.systems if each.trained and each.dense != self.systems[0].dense]
        if trained and not chosen.trained:
            best = best_on(self.dev, trained)
            found[best.name.replace("trained", "training")] = compare(chosen, best, self.test)
        return found

    def summary(self, most: int) -> str:
        """Format `parts`, and how many queries would suffice if these are too few, of `most` that the text yields."""
        parts, left = self.parts(), self.not_kept()
        before, after = self.systems[0].mean(self.test), self.chosen.mean(self.test)
        width = max(map(len, [*parts, *left]))
        lines = [f"nDCG@10 on the test half: {before:.3f} (base retriever alone) -> {after:.3f} (exported); gains:"]
        unproven = "  (not significant on its own: confirm it with real queries)"
        slow = "  (not significant: search --rerank none turns it off)"
        for name, d in parts.items():
            why = slow if name == "late interaction" else unproven if name == "training" else ""
            lines.append(f"  {name:<{width}}  {interval(d)}{why if d.low <= 0 else ''}")
        for name, d in left.items():
            lines.insert(-1, f"  {name:<{width}}  not kept: {interval(d)}")
        if few := too_few_queries(compare(self.chosen, system, self.test) for system in self.systems):
            longer = f"; a larger --budget (with a new --output_dir) gives at most {most:,} from this text"
            more = longer if most > 1.1 * len(self.test.queries) else ""  # not for a query more
            lines.append(f"{few} More documents, or 200 labelled queries, give more{more}.")
        return "\n".join(lines)

    def settings(self, options: AdaptOptions) -> dict[str, Any]:
        """Return what `search`, `evaluate` and `demo` need of the exported system, also after it is published."""
        bm25 = asdict(self.chosen.bm25_settings)
        return {
            "bm25_weight": self.chosen.bm25_weight,
            "token_weight": self.chosen.token_weight,
            "bm25": {name: bm25[name] for name in ("stemmer", "stopwords", "split_identifiers")},
            "base": None if is_local(base := hub_name(options.retriever)) else base,
            "trained": self.chosen.trained,
            "verdict": self.word,
            "difference": self.difference.to_dict(),
        }

    def to_dict(self, options: AdaptOptions) -> dict[str, Any]:
        """Return a plain dictionary, for JSON."""
        return {
            **self.settings(options),
            "exported": self.chosen.name,
            "parts": {name: d.to_dict() for name, d in self.parts().items()},
            "queries": {"dev": len(self.dev.queries), "test": len(self.test.queries)},
            "ndcg_at_10": self.bm25() | {each.name: each.mean(self.test) for each in self.systems},
            "systems": [
                {name: getattr(each, name) for name in ("name", "bm25_weight", "token_weight")}
                | {"seconds": round(each.seconds or 0, 1)}
                | {"difference": compare(self.systems[0], each, self.test).to_dict()}
                for each in self.systems
            ],
            "cost": self.cost(),
            "settings": portable(options),
        }

    def write(self, options: AdaptOptions, max_length: int | None) -> None:
        """Write the retriever with its card and the settings of the hybrid, and the report."""
        folder = options.output / RETRIEVER
        model = load_retriever(self.chosen.folder, max_length=max_length, trust_remote_code=options.trust_remote_code)
        with atomic(folder) as part:
            model.save_pretrained(str(part), create_model_card=False)
            make_readable(part)
            write_text(part / HYBRID, json.dumps(self.settings(options), indent=2) + "\n")
        write_card(folder, self.card(options))
        report = json.dumps(self.to_dict(options), indent=2)
        write_text(options.output / REPORT, f"{report}\n")  # the last: marks a finished run

    def card(self, options: AdaptOptions) -> ModelCardMetadata:
        """Return the metadata of the model card."""
        task = f"held-out {'labelled queries' if self.test.name == 'labels' else 'queries of the text'} (test half)"
        # The scores of the Hub are those of the model alone.
        means: list[tuple[str | None, float]] = [(None, self.chosen.mean(self.test, 0.0))]
        means += [(f"this model{with_what(self.chosen)}", self.chosen.mean(self.test)), *self.bm25().items()]
        others = self.systems if self.chosen.trained else self.systems[1:]  # the first is the model alone
        means += [(each.name, each.mean(self.test)) for each in others if each is not self.chosen]
        return ModelCardMetadata(
            description=(
                f"A retriever adapted to a text {'and labelled pairs' if options.labels else 'without labels'} by `revela-hub adapt`."
                if self.chosen.trained
                else "No training on the text was significantly better; `hybrid.json` has search settings fitted to it."
            ),
            unchanged=not self.chosen.trained,
            base_model=hub_model_id(options.retriever),
            training_data=f"Queries and passages made from raw text{', and labelled pairs' if options.labels else ''}.",
            training_run=self.cost(),
            command="revela-hub adapt PATH --config config.yaml",
            config=yaml.safe_dump(portable(options), sort_keys=False, allow_unicode=True),
            results=[Result(task, {"ndcg_at_10": mean}, model=name) for name, mean in means],
            verdict=f"{self.sentence()} These queries also select the exported system. In brackets: 95% interval.",
        )


def decide(systems: Sequence[System], untrained: System, dev: RetrievalTask, test: RetrievalTask) -> Verdict:
    """Select a system on the dev half, and confirm it on the test half.

    `untrained` is the system with the base retriever that is exported if no training helps.
    """
    selected = select(untrained, [system for system in systems if system.trained], dev)
    kept = without_harm(untrained, systems, test)
    # The whole must be better than the base with BM25, and so must the training's part: the other parts need no training.
    better = selected is not untrained and compare(systems[1], selected, test).verdict == "better"
    chosen = select(kept, [selected], test) if better else kept
    return Verdict(systems if any(each is kept for each in systems) else [*systems, kept], chosen, dev, test)


def without_harm(untrained: System, systems: Sequence[System], test: RetrievalTask) -> System:
    """Return an untrained system without the parts (late interaction, split identifiers, BM25) that lower the score on the test half.

    Each is judged as `Verdict.parts` shows it, whatever the others gain.
    """

    def lowers(before: System, after: System) -> bool:
        return compare(before, after, test).difference < 0

    same = [each for each in systems if not each.trained and not each.tokens]
    base, own = same[0], next(each for each in same[1:] if each.bm25_settings == untrained.bm25_settings)
    if lowers(own, untrained):
        untrained = own
    if lowers(same[1], own):
        bm25 = {name: getattr(same[1], name) for name in ("bm25", "bm25_settings", "bm25_weight")}
        without = replace(untrained, name=untrained.name.replace(" + split identifiers", ""), **bm25)
        own, untrained = same[1], same[1] if untrained is own else without
    if lowers(base, own):
        untrained = base if untrained is own else replace(untrained, name="base + late interaction", bm25_weight=0.0)
    return untrained


def interval(d: PairedDifference) -> str:
    """Format a difference: `+0.024 [+0.006, +0.043]`."""
    return f"{d.difference:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"


def with_what(system: System) -> str:
    """Describe what a system adds to its retriever."""
    split = ", split identifiers" if system.bm25_settings.split_identifiers else ""
    bm25 = f" + BM25 (weight {system.bm25_weight:.1f}{split})" if system.bm25_weight else ""
    tokens = f" + late interaction (weight {system.token_weight:.1f})" if system.token_weight else ""
    return bm25 + tokens or " alone"


def portable(options: AdaptOptions) -> dict[str, Any]:
    """Return the options without paths of this machine."""
    left_out = ("output_dir", "cache_dir", "dry_run", "data")
    values = {name: for_card(name, value) for name, value in vars(options).items() if name not in left_out}
    return {name: value for name, value in values.items() if value not in (None, [], False)}
