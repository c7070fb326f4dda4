"""The report of an adaptation, as `revela-hub adapt` writes it."""

from typing import Any


def adapt_report(verdict: str = "BETTER", exported: str = "natural pairs", gain: float = 0.05) -> dict[str, Any]:
    """The content of `adapt.json`."""
    difference = {
        "difference": gain,
        "low": gain - 0.02,
        "high": gain + 0.02,
        "queries": 182,
        "verdict": verdict.lower(),
    }
    return {
        "verdict": verdict,
        "difference": difference,
        "exported": exported,
        "bm25_weight": 0.2,
        "queries": {"dev": 182, "test": 182},
        "ndcg_at_10": {
            "exported": 0.766,
            "base retriever alone": 0.701,
            "BM25": 0.522,
            "base retriever, with BM25": 0.712,
            "natural pairs, with BM25": 0.766,
        },
        "systems": [
            {"name": "base retriever", "bm25_weight": 0.3, "seconds": 0.0},
            {"name": "natural pairs", "bm25_weight": 0.2, "seconds": 178.4, "difference": difference},
        ],
        "settings": {"retriever": "all-MiniLM-L6-v2", "budget": "6m"},
    }
