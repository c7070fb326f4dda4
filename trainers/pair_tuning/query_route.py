"""Train the query encoder alone, so that vectors of documents stay valid.

    queries    --Router, route "query"-->     the retriever, trained
    documents  --Router, route "document"-->  a copy of it, frozen and without dropout

The export is a sentence-transformers folder with both routes. The document route names the model that its vectors are equal to
(`DOCUMENT_ENCODER`), so that `search --index` accepts an index of that model.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from torch import nn

from revela_hub.loading import module_types
from revela_hub.retrieval.encoder import (
    DOCUMENT_ENCODER,
    DOCUMENT_ROUTE,
    document_identity,
    limit_length,
    model_identity,
)

QUERY, DOCUMENT = "query", "document"


def with_query_route(retriever: SentenceTransformer, *, max_length: int | None = None) -> SentenceTransformer:
    """Return a model with the retriever for queries, and a frozen copy of it for documents.

    A model that has both routes already keeps them. `max_length` limits the tokens of queries; documents keep their own limit.
    """
    if not isinstance(retriever[0], Router):
        modules: list[Any] = list(retriever)
        router = Router.for_query_document(modules, deepcopy(modules), default_route=None, allow_empty_key=False)
        retriever = SentenceTransformer(
            modules=[router],
            prompts={name: prompt or "" for name, prompt in retriever.prompts.items()},
            default_prompt_name=retriever.default_prompt_name,
            similarity_fn_name=retriever.similarity_fn_name,
            truncate_dim=retriever.truncate_dim,
            device="cpu",
        )
    frozen_route(retriever).requires_grad_(False)
    if max_length is not None:
        first: Any = retriever[0]
        limit_length(first.sub_modules[QUERY], max_length, "the query route")
    return retriever


def frozen_route(retriever: SentenceTransformer) -> nn.Module:
    """Return the modules that encode documents."""
    router: Any = retriever[0]
    modules: nn.Module = router.sub_modules[DOCUMENT]
    return modules


def identity_of_documents(model: object) -> str | None:
    """Return what identifies the vectors of documents of a model that is given by its name, if it is."""
    named = isinstance(model, (str, Path))
    return (document_identity(str(model)) or model_identity(str(model))) if named else None


def record_documents(folder: Path, identity: str) -> None:
    """Write the identity of the model that the document route of an exported folder is equal to."""
    route = next(path for path in module_types(folder) if DOCUMENT_ROUTE.fullmatch(path))
    (folder / route / DOCUMENT_ENCODER).write_text(json.dumps({"identity": identity}) + "\n", encoding="utf-8")
