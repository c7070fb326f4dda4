"""From a checkpoint to the Hub: export, verification, model card, upload."""

from revela_hub.hub_cards.assemble import Assembly
from revela_hub.hub_cards.card import collection_card, write_card
from revela_hub.hub_cards.export import export_checkpoint, export_retriever
from revela_hub.hub_cards.facts import Figure, ModelCardFacts, Paper, Result, describe
from revela_hub.hub_cards.publish import Destination, Published, check, publish
from revela_hub.hub_cards.tokenizers import with_eos
from revela_hub.hub_cards.verify import as_table, verify
from revela_hub.hub_cards.verify_files import Check

__all__ = [
    "Assembly",
    "Check",
    "Destination",
    "Figure",
    "ModelCardFacts",
    "Paper",
    "Published",
    "Result",
    "as_table",
    "check",
    "collection_card",
    "describe",
    "export_checkpoint",
    "export_retriever",
    "publish",
    "verify",
    "with_eos",
    "write_card",
]
