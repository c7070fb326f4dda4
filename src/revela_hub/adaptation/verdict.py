"""The result of `adapt`: all systems on the test half, the selected one and the exported one."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.util import get_device_name

from revela_hub.adaptation import UNTRAINED, combined
from revela_hub.adaptation.systems import System, compare
from revela_hub.data.sources.beir import RetrievalTask
from revela_hub.evaluation.significance import PairedDifference
from revela_hub.files import atomic
from revela_hub.hub_cards.export import make_readable
from revela_hub.retrieval.bm25 import BM25Settings
from revela_hub.trainers.base.callbacks import clock
from revela_hub.trainers.base.retriever import load_retriever
from revela_hub.trainers.base.run import hardware


@dataclass
class Verdict:
    """Result of `adapt`.

    Attributes:
        base: the base retriever with BM25.
        chosen: the exported system: a better one, or one with the base retriever.
        best: the system of the verdict: the exported one, or the one selected on the dev half if the base with BM25 is exported.
        difference: of that system and the base, on the test half.
        systems: all systems, the base first.
        dev: the dev half.
        test: the test half.
    """

    base: System
    chosen: System
    best: System
    difference: PairedDifference
    systems: list[System]
    dev: RetrievalTask
    test: RetrievalTask

    @property
    def word(self) -> str:
        """`BETTER`, `WORSE` or `NO DIFFERENCE`."""
        d = self.difference
        return "BETTER" if d.low > 0 else "WORSE" if d.high < 0 else "NO DIFFERENCE"

    def line(self, folder: Path) -> str:
        """Return the last line of the output, for scripts."""
        d = self.difference
        return (
            f"VERDICT: {self.word} {d.difference:+.3f} [{d.low:+.3f}, {d.high:+.3f}] nDCG@10 | retriever {folder} |"
            f" bm25_weight {self.chosen.weight:.1f}"
        )

    def sentence(self) -> str:
        """Return the verdict as a sentence, for the model card."""
        d = self.difference
        interval = f"{d.difference:+.3f} (95% interval {d.low:+.3f} to {d.high:+.3f}, {d.queries} queries)"
        if self.best is self.base:
            return "No training was better than the base retriever on the queries that select."
        retriever = self.base.name if self.best.name in UNTRAINED else self.best.name
        return (
            f"The selected system ({retriever}, with {with_what(self.best)}) differs from the base retriever"
            f" with BM25 by {interval} in nDCG@10 on held-out queries, which also decide whether a training is exported."
        )

    def cost(self) -> str:
        """Return the time of training and the hardware as a sentence, for the model card."""
        tried = sum(system.seconds for system in self.systems)
        return f"Training all candidates took {clock(tried)} on {hardware(torch.device(get_device_name()))}."

    def differences(self) -> dict[str, PairedDifference]:
        """Return each system's difference from the base with BM25 on the test half."""
        return {system.name: compare(self.base, system, self.test) for system in self.systems[1:]}

    def means(self) -> dict[str, float]:
        """Return mean nDCG@10 on the test half of the exported system, the baselines and the candidates."""
        rows = {
            "exported": self.chosen.mean(self.test),
            "base retriever alone": self.base.mean(self.test, 0.0),
            **self.of_bm25(),
        }
        return rows | {combined(each.name, each.token_weight): each.mean(self.test) for each in self.systems}

    def for_card(self) -> dict[str | None, float]:
        """Return `means` for the model card. None is the published model alone: BM25 is not published with it."""
        rows: dict[str | None, float] = {None: self.chosen.mean(self.test, 0.0)}
        for name, mean in self.means().items():
            rows[f"this model, with {with_what(self.chosen)}" if name == "exported" else name] = mean
        return rows

    def of_bm25(self) -> dict[str, float]:
        """Return mean nDCG@10 of BM25 on the test half, with each of the settings that were tried."""
        settings = {each.settings: each for each in self.systems}
        return {
            "BM25, identifiers split" if one.split_identifiers else "BM25": each.mean(self.test, 1.0)
            for one, each in settings.items()
        }

    def table(self) -> str:
        """Format all systems with their scores and intervals."""
        words = self.of_bm25()
        width = max(map(len, [*words, *(system.name for system in self.systems)]))
        lines = [f"{'test half':<{width}}  alone  combined  BM25  tokens  difference"]
        lines += [f"{name:<{width}}  {score:5.3f}" for name, score in words.items()]
        differences = self.differences()
        for system in self.systems:
            dense, hybrid = system.mean(self.test, 0.0), system.mean(self.test)
            tokens = f"{system.token_weight:.1f}" if system.tokens else "-"
            row = f"{system.name:<{width}}  {dense:5.3f}  {hybrid:8.3f}  {system.weight:4.1f}  {tokens:>6}"
            if d := differences.get(system.name):
                # No gain on the dev half: the training kept the base retriever's weights.
                same = system.name not in UNTRAINED and system.dense == self.base.dense
                row += "  none: base retriever kept" if same else f"  {d.difference:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"
            lines.append(row + ("  <- exported" if system is self.chosen else ""))
        return "\n".join(lines)

    def draw(self, file: Path) -> None:
        """Plot the difference of each system from the base retriever with BM25, with intervals."""
        from matplotlib.figure import Figure

        rows = self.differences()
        canvas = Figure(figsize=(6.4, 1 + 0.4 * len(rows)), layout="constrained")
        axes = canvas.subplots()
        for place, (name, d) in enumerate(reversed(rows.items())):
            color = "#c0392b" if name == self.chosen.name else "#2a6f97"
            axes.plot([d.low, d.high], [place, place], color=color, linewidth=2)
            axes.plot(d.difference, place, marker="o", color=color)
        axes.set_yticks(range(len(rows)), list(reversed(rows)))
        axes.axvline(0, color="#999999", linestyle="--")
        axes.set(xlabel="difference in nDCG@10 from the base retriever with BM25 (95% interval, test half)")
        canvas.savefig(file, dpi=150)

    def parts(self) -> dict[str, PairedDifference]:
        """Return what BM25, split identifiers, late interaction and training add, one after the other, to the base retriever alone."""
        alone = replace(self.base, weight=0.0)
        of_base = [system for system in self.systems if system.name in UNTRAINED]
        split = next(system for system in of_base if system.settings == self.chosen.settings)
        tokens = next((s for s in of_base if s.token_weight), split) if self.chosen.token_weight else split
        steps = {
            "": alone,
            f"BM25, weight {self.base.weight:.1f}": self.base,
            "identifiers split": split,
            f"late interaction, weight {tokens.token_weight:.1f}": tokens,
            self.chosen.name: self.chosen,
        }
        found = {
            name: compare(before, after, self.test)
            for (name, after), before in zip(list(steps.items())[1:], steps.values(), strict=False)
            if after is not before
        }
        return found | {"together": compare(alone, self.chosen, self.test)}

    def summary(self) -> str:
        """Format `parts`."""
        parts = self.parts()
        width = max(map(len, parts))
        alone, exported = self.base.mean(self.test, 0.0), self.chosen.mean(self.test)
        untrained = self.chosen.name in UNTRAINED
        names = [UNTRAINED[0] if untrained else self.chosen.name, "BM25"]
        names += ["late interaction"] if self.chosen.token_weight else []
        lines = [f"nDCG@10 on the test half: {alone:.3f} ({UNTRAINED[0]}) -> {exported:.3f} ({', '.join(names)})"]
        lines += [f"  {name:<{width}}  {d.difference:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" for name, d in parts.items()]
        if untrained and any(system.name not in UNTRAINED for system in self.systems):
            lines.insert(-1, f"  {'training':<{width}}  not kept")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary, for JSON."""
        return {
            "verdict": self.word,
            "difference": self.difference.to_dict(),
            "exported": self.chosen.name,
            "bm25_weight": self.chosen.weight,
            "token_weight": self.chosen.token_weight,
            "bm25": bm25_options(self.chosen.settings),
            "parts": {name: d.to_dict() for name, d in self.parts().items()},
            "queries": {"dev": len(self.dev.queries), "test": len(self.test.queries)},
            "ndcg_at_10": self.means(),
            "systems": [
                {
                    "name": each.name,
                    "bm25_weight": each.weight,
                    "token_weight": each.token_weight,
                    "seconds": round(each.seconds, 1),
                }
                | ({} if each is self.base else {"difference": compare(self.base, each, self.test).to_dict()})
                for each in self.systems
            ],
        }

    def export(self, folder: Path, *, max_length: int | None, trust: bool) -> Path:
        """Write the retriever of the chosen system; replaces an earlier one."""
        model = load_retriever(self.chosen.folder, max_length=max_length, trust_remote_code=trust)
        with atomic(folder) as part:
            model.save_pretrained(str(part), create_model_card=False)
            make_readable(part)
        return folder


def with_what(system: System) -> str:
    """Describe what a system adds to its retriever."""
    split = " and split identifiers" if system.settings.split_identifiers else ""
    tokens = f" and late interaction (weight {system.token_weight:.1f})" if system.token_weight else ""
    return f"BM25 (weight {system.weight:.1f}{split}){tokens}"


def bm25_options(settings: BM25Settings) -> dict[str, Any]:
    """Return the settings of BM25 that depend on the text, for JSON."""
    return {name: getattr(settings, name) for name in ("stemmer", "stopwords", "split_identifiers")}
