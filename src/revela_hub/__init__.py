"""Train, publish and use retrievers that learn from raw text, inside the Hugging Face ecosystem.

The public names are listed in `__init__.pyi` and imported on first use, so that `import revela_hub` is fast.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
