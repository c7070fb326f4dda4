"""Train, publish and use retrievers that learn from raw text, inside the Hugging Face ecosystem.

The public names stand in `__init__.pyi` and are imported when they are first used, so that `import revela_hub` costs next
to nothing.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
