"""The report of an adaptation, as `revela-hub adapt` writes it."""

from typing import Any


def adapt_report(verdict: str = "BETTER", *, trained: bool = True) -> dict[str, Any]:
    """The parts of `adapt.json` that others read."""
    return {
        "verdict": verdict,
        "difference": {"difference": 0.05, "low": 0.03, "high": 0.07, "queries": 182, "verdict": verdict.lower()},
        "exported": "natural pairs" if trained else "base retriever",
        "trained": trained,
        "bm25_weight": 0.2,
        "token_weight": 0.0,
        "bm25": {"stemmer": "english", "stopwords": "en", "split_identifiers": False},
        "systems": [{"name": "base retriever", "bm25_weight": 0.3, "seconds": 0.0}],
        "settings": {"retriever": "all-MiniLM-L6-v2", "budget": "6m"},
    }
