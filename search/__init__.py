"""The passage index: chunks, cached vectors, ranked passages with file and line."""

from revela_hub.search.cache import VectorCache, default_cache_folder
from revela_hub.search.index import BM25Index, PassageIndex, read_passages
from revela_hub.search.passages import Hit, Passages, collect_passages

__all__ = [
    "BM25Index",
    "Hit",
    "PassageIndex",
    "Passages",
    "VectorCache",
    "collect_passages",
    "default_cache_folder",
    "read_passages",
]
