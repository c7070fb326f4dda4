"""The ranking options that `search`, `mine` and `evaluate` share, and the models that they name."""

import json
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from revela_hub.adaptation import HYBRID
from revela_hub.errors import UserError
from revela_hub.files import local_path
from revela_hub.options import option
from revela_hub.output import note, shows_progress
from revela_hub.ranges import PositiveInt, TextLength, Weight
from revela_hub.retrieval.index_options import IndexArguments, Precision
from revela_hub.search.encoders import encoder_identity, load_dense
from revela_hub.search.endpoint_options import EndpointOptions

if TYPE_CHECKING:
    from revela_hub.retrieval import RankerSettings
    from revela_hub.retrieval.ranking import Own


OWN: "Own" = "self"
NO_RERANKING = "none"
"""Values of --rerank: the retriever's own token vectors, and no reranking."""
DEPTH = 50
"""Default of --rerank_depth for models."""


@dataclass(kw_only=True)
class RankerOptions(EndpointOptions, IndexArguments):
    """Ranking options."""

    option_group = "ranking"

    parts: list[str] = option(["dense", "bm25"], "Hybrid: Two or three of dense, sparse and bm25.")
    fusion: Literal["minmax", "sum"] = option(
        "minmax",
        "Hybrid: Add scores scaled to 0..1 per query (minmax), or raw scores (sum).",
    )
    weights: list[float] | None = option(
        None, "Hybrid: Weight of each part (default: minmax 0.3 for bm25, 0.7 for the rest; sum: equal)."
    )
    sparse_model: str | None = option(None, "SparseEncoder folder or Hub id (default: the model itself).")
    rerank: str | None = option(
        None,
        "Model that reranks the best results (CrossEncoder or MultiVectorEncoder), self (the retriever's own token vectors), or none"
        " (turns off the reranking that adapt fitted).",
    )
    rerank_depth: PositiveInt | None = option(None, "Number of results per query to rerank (default: 50; self: 20).")
    rerank_weight: Weight | None = option(
        None,
        "Weight of the reranker's scores; the rest is the weight of the first ranking (default: 1; self: 0.5, or as adapt"
        " has fitted).",
    )
    bm25: Literal["bm25s", "anserini"] = option(
        "bm25s", "BM25 preset: bm25s (k1 1.5, b 0.75, Snowball) or anserini (k1 0.9, b 0.4, Porter)."
    )
    bm25_stemmer: str | None = option(
        None, "BM25: Stemmer of PyStemmer, e.g. english, porter or german, or none (default: the preset's)."
    )
    bm25_stopwords: str | None = option(
        None, "BM25: Language of the stop words, e.g. en or de, or none (default: the preset's)."
    )
    bm25_split_identifiers: bool | None = option(
        None, "BM25: Index names such as parse_header and parseHeader by their parts, too; for code."
    )
    query_prompt: str | None = option(None, "Text to prepend to every query (default: the model's own prompt).")
    document_prompt: str | None = option(None, "Text to prepend to every passage (default: the model's own prompt).")
    dtype: Precision = option("float32", "Type of the stored vectors.")
    cache_dir: str | None = option(None, "Cache folder for vectors (default: in the user's cache folder).")
    batch_size: PositiveInt = option(32, "Number of texts per forward pass.")
    device: str | None = option(None, "Device to run on, e.g. cpu, cuda:1 or mps (default: the fastest one).")
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")
    max_length: TextLength | None = option(None, "Maximum number of tokens per text (default: the model's own limit).")


def given(options: Any) -> set[str]:
    """Return the names of the fields that differ from their defaults or have none."""
    defaults = ((e.name, e.default if e.default_factory is MISSING else e.default_factory()) for e in fields(options))
    return {name for name, default in defaults if getattr(options, name) != default}


class Models(NamedTuple):
    """The arguments of `build_ranker`."""

    settings: "RankerSettings"
    dense: Any
    sparse: Any
    reranker: Any = None


def load_models(options: RankerOptions, model: str, mode: str | None, *, rerank: bool = True) -> Models:
    """Load the models that a mode needs (default: dense, or bm25 if that is the model), with `rerank` also the reranker, if any.

    In an output folder of adapt, the fitted weights and BM25 settings are used where the options give none.
    """
    from revela_hub.retrieval import RankerSettings
    from revela_hub.retrieval.bm25 import BM25Settings, bm25_settings
    from revela_hub.retrieval.encoder import load_sparse_encoder, model_identity
    from revela_hub.retrieval.rerank import OWN_DEPTH, OWN_WEIGHT

    if model == "bm25" and mode not in (None, "bm25"):
        raise UserError(f"--mode {mode} requires a model, not bm25: give its folder or Hub id")
    values: dict[str, Any] = {
        name: getattr(options, name)
        for name in RankerSettings.__dataclass_fields__
        if name in RankerOptions.__dataclass_fields__ and name not in ("bm25", "device")
    } | {"index": options.index_options(options.dtype)}
    fitted = _of_adapt(model) if mode in ("hybrid", "bm25") else {}
    token_weight = 0.0
    if options.weights is None and options.fusion == "minmax" and options.parts == ["dense", "bm25"]:
        values["weights"] = fitted.get("weights")
        token_weight = fitted.get("token_weight", 0.0) if mode == "hybrid" else 0.0
    own = options.rerank == OWN or (options.rerank is None and token_weight > 0)
    depth, weight = (OWN_DEPTH, token_weight or OWN_WEIGHT) if own else (DEPTH, 1.0)
    values |= {"rerank_depth": options.rerank_depth or depth, "rerank_weight": options.rerank_weight or weight}
    of_text = fitted.get("bm25", {}) if options.bm25 == "bm25s" else {}
    given_bm25 = {each.name: getattr(options, f"bm25_{each.name}", None) for each in fields(BM25Settings)}
    bm25 = bm25_settings(
        options.bm25, **{name: of_text.get(name) if value is None else value for name, value in given_bm25.items()}
    )
    settings = RankerSettings(
        **values, mode="bm25" if model == "bm25" else mode or "dense", bm25=bm25, show_progress_bar=shows_progress()
    )
    loading: dict[str, Any] = {
        "device": options.device,
        "trust_remote_code": options.trust_remote_code,
        "max_seq_length": options.max_length,
    }
    dense = sparse = None
    found: dict[str, Any] = {}
    if "dense" in settings.used:
        prompt = settings.query_prompt or settings.document_prompt
        dense = load_dense(model, **loading, prompt=prompt, server=options)
        found |= {"identity": encoder_identity(dense, model, options.max_length), "device": dense.device}
    elif options.endpoint and model != "bm25":
        raise UserError(f"--endpoint requires --mode dense, or hybrid with the part dense, not {mode}")
    if "sparse" in settings.used:
        name = options.sparse_model or model
        sparse = load_sparse_encoder(name, **loading)
        found["sparse_identity"] = model_identity(name, options.max_length)
    reranker = None
    if rerank:
        reranker = _own_reranker(options, dense) if own else load_reranker(options)
    return Models(replace(settings, **found), dense, sparse, reranker)


def _of_adapt(model: str) -> dict[str, Any]:
    """Return the fitted `weights` of dense and BM25, `bm25` settings and `token_weight` of an output folder of adapt; else {}."""
    file = local_path(model) / HYBRID
    if not file.is_file():
        return {}
    try:
        hybrid = json.loads(file.read_text(encoding="utf-8"))
        weight, bm25 = float(hybrid["bm25_weight"]), dict(hybrid.get("bm25", {}))
        tokens = float(hybrid.get("token_weight", 0.0))
        if not (0 <= weight <= 1 and 0 <= tokens <= 1):
            raise ValueError(f"a weight of {weight} or {tokens}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged: run revela-hub adapt again, or give --mode dense") from error
    return {"weights": [1 - weight, weight], "bm25": bm25, "token_weight": tokens}


def _own_reranker(options: RankerOptions, dense: Any) -> "Own | None":
    """Return OWN for `build_ranker`; None where only adapt asks for it, and a server has the vectors."""
    if options.rerank is None and options.endpoint:
        note("late interaction, which adapt has fitted, needs the model here: not used with --endpoint")
        return None
    if dense is None:
        raise UserError(
            "--rerank self needs the vectors of a retriever: use --mode dense, or hybrid with the part dense"
        )
    return OWN


def load_reranker(options: RankerOptions) -> Any:
    """Load the model of --rerank; None without one."""
    if options.rerank in (None, OWN, NO_RERANKING):
        return None
    from revela_hub.retrieval.rerank import Reranker

    return Reranker(
        options.rerank,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
        batch_size=options.batch_size,
    )
