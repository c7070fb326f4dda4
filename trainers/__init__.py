"""One file per training method: its training arguments and its trainer.

The names below are imported when they are first used: no method pays for the libraries of the others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from revela_hub.trainers.nvembed_config import NVEmbedTrainingArguments
    from revela_hub.trainers.nvembed_trainer import NVEmbedTrainer
    from revela_hub.trainers.retromae_checkpoint import RetroMAECheckpoint, load_retromae_checkpoint
    from revela_hub.trainers.retromae_config import RetroMAETrainingArguments
    from revela_hub.trainers.retromae_trainer import RetroMAETrainer
    from revela_hub.trainers.revela_backbones import RevelaBackbones, load_backbones, load_checkpoint
    from revela_hub.trainers.revela_config import RevelaTrainingArguments
    from revela_hub.trainers.revela_trainer import RevelaTrainer, similarity_statistics

__all__ = [
    "NVEmbedTrainer",
    "NVEmbedTrainingArguments",
    "RetroMAECheckpoint",
    "RetroMAETrainer",
    "RetroMAETrainingArguments",
    "RevelaBackbones",
    "RevelaTrainer",
    "RevelaTrainingArguments",
    "load_backbones",
    "load_checkpoint",
    "load_retromae_checkpoint",
    "similarity_statistics",
]

_MODULES = {
    "NVEmbedTrainer": "nvembed_trainer",
    "NVEmbedTrainingArguments": "nvembed_config",
    "RetroMAECheckpoint": "retromae_checkpoint",
    "RetroMAETrainer": "retromae_trainer",
    "RetroMAETrainingArguments": "retromae_config",
    "RevelaBackbones": "revela_backbones",
    "RevelaTrainer": "revela_trainer",
    "RevelaTrainingArguments": "revela_config",
    "load_backbones": "revela_backbones",
    "load_checkpoint": "revela_backbones",
    "load_retromae_checkpoint": "retromae_checkpoint",
    "similarity_statistics": "revela_trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
