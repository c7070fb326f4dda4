"""The results of `revela-hub adapt`, read from its report for the page."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from revela_hub.adaptation import SETTINGS, UNTRAINED, combined
from revela_hub.errors import UserError
from revela_hub.retrieval.bm25 import BM25Settings

BASE = UNTRAINED[0]
HEADER = ("system", "nDCG@10", "weight of BM25", "training time", "difference, 95% interval")


@dataclass(frozen=True)
class Report:
    """The report of an adaptation, as sentences and a table with the columns of `HEADER`."""

    bm25_weight: float
    token_weight: float  # of the retriever's token vectors (late interaction); 0 without them
    exported: str  # name of the exported system
    verdict: str
    table: tuple[tuple[str, ...], ...]
    cost: str
    bm25: BM25Settings = field(default_factory=BM25Settings)

    @property
    def is_base(self) -> bool:
        """Whether the base retriever was exported, because no training was better."""
        return self.exported in UNTRAINED


def base_of(folder: Path) -> str | None:
    """Return the base retriever in the settings of an adaptation; None if they cannot be read."""
    try:
        base = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["retriever"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return base if isinstance(base, str) else None


def read_report(file: Path) -> Report:
    """Read the report that `revela-hub adapt` wrote."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return _report(values)
    except OSError as error:
        raise UserError(f"{file}: no such file: --report takes adapt.json of `revela-hub adapt`") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is not a report of `revela-hub adapt`, or is damaged: run that command again"
        ) from error


def _report(values: dict[str, Any]) -> Report:
    means, systems = values["ndcg_at_10"], values["systems"]
    rows = [("BM25", f"{means['BM25']:.3f}", "", "", ""), (BASE, f"{means[f'{BASE} alone']:.3f}", "", "", "")]
    for system in systems:
        name = str(system["name"])
        whole, weight = combined(name, system.get("token_weight", 0.0)), system["bm25_weight"]
        shown, mean = whole + (" (exported)" if name == values["exported"] else ""), means[whole]
        time = duration(system["seconds"]) if system["seconds"] else ""
        rows.append((shown, f"{mean:.3f}", f"{weight:.1f}", time, _interval(system.get("difference"))))
    return Report(
        float(values["bm25_weight"]),
        float(values.get("token_weight", 0.0)),
        values["exported"],
        _verdict(values),
        tuple(rows),
        _cost(values, systems),
        BM25Settings(**values.get("bm25", {})),
    )


def _verdict(values: dict[str, Any]) -> str:
    found = values["difference"]
    queries = f"{found['queries']} test queries"
    word = str(values["verdict"]).capitalize()
    if not found["difference"] and values["exported"] == BASE:
        return f"{word}: no training was better than the base retriever with BM25 ({queries})."
    return f"{word}: {_interval(found)} nDCG@10 compared with the base retriever with BM25 ({queries})."


def _cost(values: dict[str, Any], systems: list[dict[str, Any]]) -> str:
    whole = sum(system["seconds"] for system in systems)
    exported = next((system["seconds"] for system in systems if system["name"] == values["exported"]), 0)
    budget = values.get("settings", {}).get("budget")
    parts = [str(values.get("cost") or f"Training all candidates took {duration(whole)}.")]
    if exported:
        parts.append(f"The exported one took {duration(exported)}.")
    if budget:
        parts.append(f"The budget was {budget}, including the evaluation.")
    return " ".join(parts)


def _interval(found: dict[str, Any] | None) -> str:
    return "" if found is None else f"{found['difference']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def duration(seconds: float) -> str:
    """Return a duration for reading.

    >>> duration(42), duration(178.4), duration(7500)
    ('42 s', '3.0 min', '2.1 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
