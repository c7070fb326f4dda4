"""From a model to the Hub: the folder format, cards, verification, upload. Takes models and folders, never a trainer.

The public names stand in `__init__.pyi` and are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
