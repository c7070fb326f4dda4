"""Searching: an index of passages with file and line, and hard negatives from corpora of any size."""

from revela_hub.search.cache import VectorCache, default_cache_folder
from revela_hub.search.index import BM25Index, PassageIndex, read_passages
from revela_hub.search.mining import MinedNegatives, MiningReport, MiningSettings, RankerSettings, mine_negatives
from revela_hub.search.passages import Hit, Passages, collect_passages

__all__ = [
    "BM25Index",
    "Hit",
    "MinedNegatives",
    "MiningReport",
    "MiningSettings",
    "PassageIndex",
    "Passages",
    "RankerSettings",
    "VectorCache",
    "collect_passages",
    "default_cache_folder",
    "mine_negatives",
    "read_passages",
]
