"""Ranking: encoders, BM25, exact and approximate search over vectors on disk, and hard-negative mining.

The public names are listed in `__init__.pyi` and imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
