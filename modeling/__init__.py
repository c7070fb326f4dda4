"""Models: flat and self-contained, because the Hub runs these files without the rest of the package.

Inside this folder: torch, transformers and `from .sibling import name` only.
"""

from .configuration_revela import RevelaConfig
from .modeling_revela import RevelaForCausalLM, RevelaOutput

__all__ = ["RevelaConfig", "RevelaForCausalLM", "RevelaOutput"]
