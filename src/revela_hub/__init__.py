"""Train, publish and use retrievers that learn from raw text, inside the Hugging Face ecosystem.

The names below are imported when they are first used, so that `import revela_hub` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from revela_hub.errors import UserError

if TYPE_CHECKING:
    from revela_hub.data import (
        RetroMAECollator,
        RevelaCollator,
        build_groups,
        build_spans,
        chunk_document,
        load_mixture,
        query_prompt,
        read_documents,
    )
    from revela_hub.evaluation import RetrievalScores, RetrievalTask, evaluate_bm25, evaluate_retrieval, read_beir
    from revela_hub.hub_cards import export_checkpoint, export_retriever
    from revela_hub.modeling import (
        NVEmbedConfig,
        NVEmbedModel,
        RetroMAEConfig,
        RetroMAEForPreTraining,
        RevelaConfig,
        RevelaForCausalLM,
    )
    from revela_hub.trainers import (
        NVEmbedTrainer,
        NVEmbedTrainingArguments,
        RetroMAETrainer,
        RetroMAETrainingArguments,
        RevelaTrainer,
        RevelaTrainingArguments,
    )

__version__ = "0.1.0"

_SUBPACKAGES = {
    "RetroMAECollator": "data",
    "RevelaCollator": "data",
    "build_groups": "data",
    "build_spans": "data",
    "chunk_document": "data",
    "load_mixture": "data",
    "query_prompt": "data",
    "read_documents": "data",
    "RetrievalScores": "evaluation",
    "RetrievalTask": "evaluation",
    "evaluate_bm25": "evaluation",
    "evaluate_retrieval": "evaluation",
    "read_beir": "evaluation",
    "export_checkpoint": "hub_cards",
    "export_retriever": "hub_cards",
    "NVEmbedConfig": "modeling",
    "NVEmbedModel": "modeling",
    "RetroMAEConfig": "modeling",
    "RetroMAEForPreTraining": "modeling",
    "RevelaConfig": "modeling",
    "RevelaForCausalLM": "modeling",
    "NVEmbedTrainer": "trainers",
    "NVEmbedTrainingArguments": "trainers",
    "RetroMAETrainer": "trainers",
    "RetroMAETrainingArguments": "trainers",
    "RevelaTrainer": "trainers",
    "RevelaTrainingArguments": "trainers",
}

__all__ = [
    "NVEmbedConfig",
    "NVEmbedModel",
    "NVEmbedTrainer",
    "NVEmbedTrainingArguments",
    "RetrievalScores",
    "RetrievalTask",
    "RetroMAECollator",
    "RetroMAEConfig",
    "RetroMAEForPreTraining",
    "RetroMAETrainer",
    "RetroMAETrainingArguments",
    "RevelaCollator",
    "RevelaConfig",
    "RevelaForCausalLM",
    "RevelaTrainer",
    "RevelaTrainingArguments",
    "UserError",
    "build_groups",
    "build_spans",
    "chunk_document",
    "evaluate_bm25",
    "evaluate_retrieval",
    "export_checkpoint",
    "export_retriever",
    "load_mixture",
    "query_prompt",
    "read_beir",
    "read_documents",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Imports a public name's module when the name is first used (PEP 562)."""
    if name not in _SUBPACKAGES:
        raise AttributeError(f"module 'revela_hub' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"revela_hub.{_SUBPACKAGES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names too, before their first use."""
    return sorted({*globals(), *__all__})
