"""Train, publish and use text retrievers: five published methods as transformers models and Trainers,
and one command that improves search over your own text.

The public names are listed in `__init__.pyi` and imported on first use, so that `import revela_hub` is fast.
"""  # noqa: D205 (the first sentence is the description of the package)

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
