"""`revela-hub adapt`: tries several ways to adapt a retriever to a text, and keeps what held-out queries prove to be better.

Attributes:
    REPORT: file of the output folder with all results.
    SETTINGS: file of the output folder with the options.
"""

REPORT, SETTINGS = "adapt.json", "settings.json"
