"""The options that commands share: of ranking, and of a server that computes vectors."""

from dataclasses import dataclass
from typing import Literal

from revela_hub.errors import UserError
from revela_hub.options import defaults_of, option
from revela_hub.ranges import PositiveInt, TextLength, Weight

Mode = Literal["dense", "sparse", "bm25", "hybrid"]
SELF, NO_RERANKING = "self", "none"
"""Values of --rerank besides models: the retriever's own token vectors, and no reranking."""
_MODE_OF = {
    **dict.fromkeys(["parts", "fusion", "weights"], "hybrid"),
    "sparse_model": "sparse",
    **dict.fromkeys(["bm25", "bm25_stemmer", "bm25_stopwords", "bm25_split_identifiers"], "bm25"),
}


@dataclass(kw_only=True)
class ModelOptions:
    """How a model is loaded."""

    option_group = "model"

    device: str | None = option(
        None, "Device to run on, e.g. cpu or mps, or several: cuda:0,cuda:1 (default: the fastest one)."
    )
    trust_remote_code: bool = option(False, "Allow a model to run its own code from the Hub.")
    max_length: TextLength | None = option(None, "Maximum number of tokens per text (default: the model's own limit).")


@dataclass(kw_only=True)
class EndpointOptions:
    """The server that computes the vectors of --model."""

    option_group = "server"

    endpoint: str | None = option(
        None, "OpenAI-compatible server that computes the model's vectors, e.g. http://localhost:8080 (vLLM, TEI)."
    )
    endpoint_model: str | None = option(None, "Name of the model on the server (default: --model).")
    api_key_env: str | None = option(None, "Environment variable that holds the server's API key.")
    concurrency: PositiveInt = option(8, "Number of concurrent requests to the server.")


@dataclass(kw_only=True)
class RankOptions(EndpointOptions, ModelOptions):
    """How `search`, `mine` and `evaluate` rank passages."""

    option_group = "ranking"

    parts: list[str] = option(["dense", "bm25"], "Hybrid: Two or three of dense, sparse and bm25.")
    fusion: Literal["minmax", "sum"] = option(
        "minmax",
        "Hybrid: Add scores scaled to 0..1 per query (minmax), or raw scores (sum).",
    )
    weights: list[float] | None = option(
        None,
        "Hybrid: Weights in the order of --parts, e.g. 0.7 0.3 for dense and bm25 (default: minmax 0.3 for bm25, 0.7 for the"
        " rest; sum: equal).",
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
    cache_dir: str | None = option(None, "Cache folder for vectors (default: in the user's cache folder).")
    batch_size: PositiveInt = option(32, "Number of texts per forward pass.")

    def check_modes(self, *modes: str) -> None:
        """Raise a `UserError` for an option that none of the modes uses."""
        used = {*modes, *(self.parts if "hybrid" in modes else ())}
        for name, mode in _MODE_OF.items():
            if mode not in used and getattr(self, name) != defaults_of(RankOptions)[name]:
                raise UserError(
                    f"{name} requires mode {mode}{'' if mode == 'hybrid' else ', or hybrid with this part'}"
                )
