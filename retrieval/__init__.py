"""What ranks: encoders, BM25, exact and indexed search over vectors on disk, and mining of hard negatives.

The public names stand in `__init__.pyi` and are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
