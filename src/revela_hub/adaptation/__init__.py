"""`revela-hub adapt`: tries several ways to adapt a retriever to a text, and keeps what held-out queries prove to be better.

Attributes:
    HYBRID: file of its output folder with the weights of BM25 and late interaction.
    REPORT: file with all its results.
    SETTINGS: file with its options.
"""

HYBRID, REPORT, SETTINGS = "hybrid.json", "adapt.json", "settings.json"
