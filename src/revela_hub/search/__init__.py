"""Search with any model: the options that commands share, the models that they name, and `Searcher`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
