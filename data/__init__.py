"""Raw text, pairs and labels to data sets and batches.

    sources --read_documents--> Document --chunk_document--> Chunk --build_groups--> Dataset --RevelaCollator--> batch
                                    |------------------------------build_spans-----> Dataset --RetroMAECollator--> batch
    tasks in YAML --load_mixture--> Dataset[task, anchor, positive, negative_1 .. negative_N, prompts]

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
    from revela_hub.data.instructions import query_prompt
    from revela_hub.data.mixture import Mixture, load_mixture
    from revela_hub.data.report import ReadReport
    from revela_hub.data.retromae_arguments import RetroMAEDataArguments, load_spans
    from revela_hub.data.retromae_collator import RetroMAECollator
    from revela_hub.data.sources import Document, Source, parse_source
    from revela_hub.data.spans import build_spans
    from revela_hub.data.synthetic import SynthesisSettings, synthesize

__all__ = [
    "Chunk",
    "Document",
    "GroupSettings",
    "Mixture",
    "ReadReport",
    "RetroMAECollator",
    "RetroMAEDataArguments",
    "RevelaCollator",
    "RevelaDataArguments",
    "Source",
    "SynthesisSettings",
    "build_groups",
    "build_spans",
    "chunk_document",
    "load_groups",
    "load_mixture",
    "load_spans",
    "mix_groups",
    "parse_source",
    "query_prompt",
    "read_documents",
    "synthesize",
]

_MODULES = {
    "Chunk": "chunks",
    "Document": "sources",
    "GroupSettings": "groups",
    "Mixture": "mixture",
    "ReadReport": "report",
    "RetroMAECollator": "retromae_collator",
    "RetroMAEDataArguments": "retromae_arguments",
    "RevelaCollator": "collator",
    "RevelaDataArguments": "arguments",
    "Source": "sources",
    "SynthesisSettings": "synthetic",
    "build_groups": "groups",
    "build_spans": "spans",
    "chunk_document": "chunks",
    "load_groups": "arguments",
    "load_mixture": "mixture",
    "load_spans": "retromae_arguments",
    "mix_groups": "groups",
    "parse_source": "sources",
    "query_prompt": "instructions",
    "read_documents": "documents",
    "synthesize": "synthetic",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
