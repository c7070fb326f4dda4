"""`revela-hub adapt`: tries several ways to adapt a retriever to a text, and keeps what held-out queries prove to be better.

Attributes:
    HYBRID: file of its output folder with the weights of BM25 and late interaction.
    REPORT: file with all its results.
    SETTINGS: file with its arguments.
    UNTRAINED: names of the systems whose retriever is the base retriever: with BM25; with BM25 and split identifiers; with the
        better of these and late interaction.
"""

HYBRID, REPORT, SETTINGS = "hybrid.json", "adapt.json", "settings.json"
UNTRAINED = ("base retriever", "base, identifiers split", "base, late interaction")


def combined(name: str, token_weight: float) -> str:
    """Return the name of a system as combined with BM25 and, with a weight, late interaction.

    >>> combined("natural pairs", 0.0), combined("natural pairs", 0.5)
    ('natural pairs, with BM25', 'natural pairs, with BM25 and late interaction')
    """
    tokens = " and late interaction" if token_weight and name != UNTRAINED[2] else ""
    return f"{name}, with BM25{tokens}"
