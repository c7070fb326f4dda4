"""The settings of an adaptation, as `revela-hub adapt` writes them into the model."""

from typing import Any


def adapt_report(verdict: str = "BETTER", *, trained: bool = True) -> dict[str, Any]:
    """The content of hybrid.json."""
    return {
        "verdict": verdict,
        "difference": {"difference": 0.05, "low": 0.03, "high": 0.07, "queries": 182, "verdict": verdict.lower()},
        "trained": trained,
        "bm25_weight": 0.2,
        "token_weight": 0.0,
        "bm25": {"stemmer": "english", "stopwords": "en", "split_identifiers": False},
        "base": None,
    }
