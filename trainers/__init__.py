"""One file per training method: its training arguments and its trainer."""

from revela_hub.trainers.revela_backbones import RevelaBackbones, load_backbones, load_checkpoint
from revela_hub.trainers.revela_config import RevelaTrainingArguments
from revela_hub.trainers.revela_trainer import RevelaTrainer, similarity_statistics

__all__ = [
    "RevelaBackbones",
    "RevelaTrainer",
    "RevelaTrainingArguments",
    "load_backbones",
    "load_checkpoint",
    "similarity_statistics",
]
