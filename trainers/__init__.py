"""One folder per training method (arguments, collator, loss, trainer, checkpoint), and `common/` for what two share.

The public names stand in `__init__.pyi` and are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
