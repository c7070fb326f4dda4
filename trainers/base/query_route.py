"""Train the query encoder alone, so that vectors of documents stay valid.

    queries    --Router, route "query"-->     a copy of the retriever, trained
    documents  --Router, route "document"-->  the retriever, frozen and without dropout

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
from transformers import PreTrainedModel

from revela_hub.errors import UserError
from revela_hub.loading import module_types
from revela_hub.retrieval.encoder import (
    DOCUMENT_ENCODER,
    DOCUMENT_ROUTE,
    document_identity,
    limit_length,
    model_identity,
)
from revela_hub.trainers.base.adapters import refuse_frozen

QUERY, DOCUMENT = "query", "document"


def with_query_route(retriever: SentenceTransformer, *, max_length: int | None = None) -> SentenceTransformer:
    """Return a model with a trainable copy of the retriever for queries, and the retriever itself, frozen, for documents.

    A model that has both routes already keeps them. `max_length` limits the tokens of queries; documents keep their own limit.
    """
    router: Any = retriever[0]
    if not isinstance(router, Router):
        modules: list[Any] = list(retriever)
        router = Router.for_query_document(deepcopy(modules), modules, default_route=None, allow_empty_key=False)
        retriever = SentenceTransformer(
            modules=[router],
            prompts={name: prompt or "" for name, prompt in retriever.prompts.items()},
            default_prompt_name=retriever.default_prompt_name,
            similarity_fn_name=retriever.similarity_fn_name,
            truncate_dim=retriever.truncate_dim,
            device="cpu",
        )
    else:
        refuse_other_routes(retriever, "the model")
    frozen_route(retriever).requires_grad_(False)
    if max_length is not None:
        limit_length(router.sub_modules[QUERY], max_length, "the query route")
    return retriever


def refuse_other_routes(retriever: SentenceTransformer, name: str) -> None:
    """Raise a `UserError` if a model has routes other than query and document."""
    first: Any = retriever[0]
    if isinstance(first, Router) and set(first.sub_modules) != {QUERY, DOCUMENT}:
        raise UserError(f"{name} has the routes {', '.join(first.sub_modules)}: only query and document are supported")


def refuse_routes(retriever: SentenceTransformer, name: str, method: str) -> None:
    """Raise a `UserError` if a model has routes, of which a method would train only one."""
    if isinstance(retriever[0], Router):
        raise UserError(
            f"{name} has a query and a document route, but {method} trains a single encoder: use `revela-hub train pairs` or"
            " `train contriever`, which train both"
        )


def refuse_frozen_documents(retriever: SentenceTransformer) -> None:
    """Raise a `UserError` if a model has a document route that is frozen, as after a run with `query_only`."""
    if isinstance(retriever[0], Router):
        refuse_frozen("the document route", frozen_route(retriever))


def frozen_route(retriever: SentenceTransformer) -> nn.Module:
    """Return the modules that encode documents."""
    router: Any = retriever[0]
    modules: nn.Module = router.sub_modules[DOCUMENT]
    return modules


def trained_transformer(retriever: SentenceTransformer) -> Any:
    """Return the module in training that reads texts, a Transformer or static embeddings: of queries, if the model has two routes."""
    first: Any = retriever[0]
    routes: Any = first.sub_modules if isinstance(first, Router) else None
    return first if routes is None else routes[QUERY][0]


def trained_backbone(retriever: SentenceTransformer) -> PreTrainedModel | None:
    """Return the transformers model in training; None for models without one, such as static embeddings."""
    return getattr(trained_transformer(retriever), "auto_model", None)


def identity_of_documents(name: str) -> str | None:
    """Return what identifies the vectors of a model's documents; None for a file."""
    return None if Path(name).is_file() else document_identity(name) or model_identity(name)


def record_documents(folder: Path, identity: str) -> None:
    """Write the identity of the model that the document route of an exported folder is equal to."""
    route = next(path for path in module_types(folder) if DOCUMENT_ROUTE.fullmatch(path))
    (folder / route / DOCUMENT_ENCODER).write_text(json.dumps({"identity": identity}) + "\n", encoding="utf-8")
