"""Loads the models that options name: encoders, rerankers, and the settings that `adapt` has fitted."""

import weakref
from contextlib import suppress
from functools import cache, partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.hub_cards.contents import HYBRID
from revela_hub.output import is_quiet, note
from revela_hub.search.options import NO_RERANKING, SELF, EndpointOptions, ModelOptions, RankOptions

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from revela_hub.retrieval import RankerSettings

_note_once = cache(note)
DEPTH = 50
"""Default of --rerank_depth for models."""


class Models(NamedTuple):
    """The arguments of `build_ranker`."""

    settings: "RankerSettings"
    dense: Any = None
    sparse: Any = None
    reranker: Any = None


def fitted_settings(model: str) -> dict[str, Any]:
    """Return the settings that `adapt` has fitted for a model (a folder or a Hub id); empty for other models."""
    from revela_hub.loading import model_json
    from revela_hub.retrieval.encoder import model_in

    with suppress(OSError):  # loading the model reports it
        found = model_json(model_in(model), HYBRID) if model != "bm25" else {}
        if found is None and "/" in model and not local_path(model_in(model)).exists():
            from huggingface_hub import constants, try_to_load_from_cache

            if not constants.HF_HUB_OFFLINE and try_to_load_from_cache(model, HYBRID) is None:
                _note_once(f"the Hub cannot be reached: if {model} was made by adapt, its weight of BM25 is not used")
        return dict(found or {})
    return {}


def load_models(options: RankOptions, model: str, mode: str | None, *, rerank: bool = True) -> Models:
    """Load the models that a mode needs (default: dense, or bm25 if that is the model), with `rerank` also the reranker, if any.

    For a model of adapt, the fitted weights and BM25 settings are used where the options give none.
    """
    from revela_hub.retrieval import RankerSettings
    from revela_hub.retrieval.bm25 import bm25_settings
    from revela_hub.retrieval.encoder import load_sparse_encoder, model_identity
    from revela_hub.retrieval.rerank import OWN_DEPTH, OWN_WEIGHT

    if model == "bm25" and mode not in (None, "bm25"):
        raise UserError(f"mode {mode} requires a model, not bm25: give its folder or Hub id")
    mode = "bm25" if model == "bm25" else mode or "dense"
    parts = options.parts if mode == "hybrid" else [mode]
    fitted = fitted_settings(model) if mode in ("hybrid", "bm25") else {}
    given = {name: getattr(options, f"bm25_{name}") for name in ("stemmer", "stopwords", "split_identifiers")}
    bm25 = fitted.get("bm25", {}) if options.bm25 == "bm25s" else {}
    bm25 = bm25 | {name: value for name, value in given.items() if value is not None}
    weights, token_weight = options.weights, 0.0
    if fitted and weights is None and options.fusion == "minmax" and parts == ["dense", "bm25"]:
        weights = [1 - fitted["bm25_weight"], fitted["bm25_weight"]]
        token_weight = fitted.get("token_weight", 0.0)
    own = options.rerank == SELF or (options.rerank is None and token_weight > 0)
    if own and options.rerank is None and options.endpoint:
        note("late interaction, which adapt has fitted, needs the model here: not used with endpoint")
        own = False
    dense = sparse = None
    if "dense" in parts:
        dense = load_dense(model, options, prompt=options.query_prompt or options.document_prompt, server=options)
    elif options.endpoint and model != "bm25":
        raise UserError(f"endpoint requires mode dense, or hybrid with the part dense, not {mode}")
    sparse_model = options.sparse_model or model
    if "sparse" in parts:
        loading = {"device": options.device, "trust_remote_code": options.trust_remote_code}
        sparse = load_sparse_encoder(sparse_model, max_seq_length=options.max_length, **loading)
    settings = RankerSettings(
        mode=mode,
        parts=options.parts,
        fusion=options.fusion,
        weights=weights,
        identity=encoder_identity(dense, model, options.max_length) if dense is not None else "",
        sparse_identity=model_identity(sparse_model, options.max_length) if sparse is not None else "",
        query_prompt=options.query_prompt,
        document_prompt=options.document_prompt,
        batch_size=options.batch_size,
        bm25=bm25_settings(options.bm25, **bm25),
        device=dense.device if dense is not None else "cpu",
        show_progress_bar=not is_quiet(),
        rerank_depth=options.rerank_depth or (OWN_DEPTH if own else DEPTH),
        rerank_weight=options.rerank_weight or (token_weight or OWN_WEIGHT if own else 1.0),
    )
    reranker: Any = (SELF if own else load_reranker(options)) if rerank else None
    return Models(settings, dense, sparse, reranker)


def load_reranker(options: RankOptions) -> Any:
    """Load the model of --rerank; None without one."""
    if options.rerank in (None, SELF, NO_RERANKING):
        return None
    from revela_hub.retrieval.rerank import Reranker

    names = ("device", "trust_remote_code", "batch_size")
    return Reranker(options.rerank, **{name: getattr(options, name) for name in names})


def load_dense(
    model: str, options: ModelOptions, *, prompt: str | None = None, server: EndpointOptions | None = None
) -> Any:  # noqa: ANN401 (an `Encoder` with its device)
    """Return the encoder of a model, on several devices if the options list some; its `similarity_fn_name` names the similarity.

    `prompt` replaces the model's own. With a server (`--endpoint`), the model's weights are not loaded.
    """
    from revela_hub.checkpoints import resolve
    from revela_hub.retrieval.encoder import load_encoder, similarity_of

    model, method = resolve(model)
    length, code = options.max_length, options.trust_remote_code
    if method is not None and method.encoder:
        if prompt or length or (server and server.endpoint):
            raise UserError(
                f"{model} was trained with {method.title}, which has no prompts, a fixed length and no server: leave out"
                " query_prompt, document_prompt, max_length and endpoint"
            )
        return resolve_name(method.encoder)(model, options.device)
    if server is not None and server.endpoint is not None:
        from revela_hub.data.openai_server import api_key
        from revela_hub.retrieval.endpoint import OpenAIEncoder

        return OpenAIEncoder(
            server.endpoint,
            model,
            served_name=server.endpoint_model,
            api_key=api_key(server.api_key_env),
            concurrency=server.concurrency,
            max_length=length,
            trust_remote_code=code,
        )
    devices = (options.device or "").split(",")
    encoder = load_encoder(model, device=devices[0] or None, trust_remote_code=code, max_seq_length=length)
    similarity_of(encoder, model)  # raises an error that names the model
    return OnDevices(encoder, devices) if len(devices) > 1 else encoder


class OnDevices:
    """A sentence-transformers model on several devices, each in a separate process, which share the texts of a call."""

    def __init__(self, model: "SentenceTransformer", devices: list[str]) -> None:
        import torch

        for device in devices:
            torch.empty(0, device=device)  # raises its error here, not in a process
        self.device = devices[0]
        self.similarity_fn_name = model.similarity_fn_name
        self.get_embedding_dimension = model.get_embedding_dimension
        pool = model.start_multi_process_pool(devices)
        self.encode_query = partial(model.encode_query, pool=pool)
        self.encode_document = partial(model.encode_document, pool=pool)
        weakref.finalize(self, model.stop_multi_process_pool, pool)


def encoder_identity(encoder: Any, model: str, max_seq_length: int | None) -> str:  # noqa: ANN401 (an `Encoder`)
    """Return `model_identity` of a model; that of a server's vectors also names the model there."""
    from revela_hub.checkpoints import resolve
    from revela_hub.retrieval.encoder import model_identity

    return model_identity(resolve(model).path, max_seq_length) + str(getattr(encoder, "served_identity", ""))
