"""`revela-hub adapt`: tries several ways to adapt a retriever to a text, and keeps what held-out queries prove to be better.

Attributes:
    HYBRID: file of its output folder with the weight of BM25.
    REPORT: file with all its results.
    SETTINGS: file with its arguments.
    UNTRAINED: names of the systems whose retriever is the base retriever: with BM25; with BM25 and split identifiers; with the
        better of these and late interaction.
"""

HYBRID, REPORT, SETTINGS = "hybrid.json", "adapt.json", "settings.json"
UNTRAINED = ("base retriever", "base, identifiers split", "base, late interaction")
