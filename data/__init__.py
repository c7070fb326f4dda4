"""Raw text to chunks, groups and batches.

    sources --read_documents--> Document --chunk_document--> Chunk --build_groups--> Dataset --RevelaCollator--> batch

The names below are imported when they are first used: reading and cutting documents needs neither torch nor datasets.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from revela_hub.data.arguments import RevelaDataArguments, load_groups
    from revela_hub.data.chunks import Chunk, chunk_document
    from revela_hub.data.collator import RevelaCollator
    from revela_hub.data.documents import read_documents
    from revela_hub.data.groups import GroupSettings, build_groups, mix_groups
    from revela_hub.data.report import ReadReport
    from revela_hub.data.sources import Document, Source, parse_source

__all__ = [
    "Chunk",
    "Document",
    "GroupSettings",
    "ReadReport",
    "RevelaCollator",
    "RevelaDataArguments",
    "Source",
    "build_groups",
    "chunk_document",
    "load_groups",
    "mix_groups",
    "parse_source",
    "read_documents",
]

_MODULES = {
    "Chunk": "chunks",
    "Document": "sources",
    "GroupSettings": "groups",
    "ReadReport": "report",
    "RevelaCollator": "collator",
    "RevelaDataArguments": "arguments",
    "Source": "sources",
    "build_groups": "groups",
    "chunk_document": "chunks",
    "load_groups": "arguments",
    "mix_groups": "groups",
    "parse_source": "sources",
    "read_documents": "documents",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
