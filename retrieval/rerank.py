r"""Reranking: the best results of a ranker are scored again by a model that compares query and passage in more detail.

CrossEncoder        reads both texts at once: the most exact, one forward pass per pair
MultiVectorEncoder  compares their tokens (ColBERT): one forward pass per text
a dense retriever   compares its own token vectors, of which it pools one vector per text: one forward pass per text

The last two are late interaction. For the unit vectors t of the tokens of query q and passage d (Khattab and Zaharia 2020, MaxSim):

    s(q, d) = 1 / |q| * sum over i in q of max over j in d of t_i . t_j       (MultiVectorEncoder: without 1 / |q|)

With a weight w below 1, the scores of ranker and reranker are combined, each min-max normalised over the reranked results:

    (1 - w) * ranker + w * reranker

Letters in names: Q queries, K hits, P pairs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.sources.unicode import without_surrogates
from revela_hub.errors import UserError
from revela_hub.loading import in_fast_precision, model_kind, varying_shapes
from revela_hub.output import progress_bar
from revela_hub.retrieval.encoder import RERANKERS, input_modules, model_identity, open_model
from revela_hub.retrieval.hits import Hits, Ranker, sort_hits
from revela_hub.retrieval.hybrid import fuse
from revela_hub.retrieval.texts import TextSource

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer

OWN_WEIGHT, OWN_DEPTH = 0.5, 20
"""Weight of a retriever's own token vectors, and number of results that they rerank (benchmarks/adaptation/late_interaction.py)."""
PAIRS = 4096
"""Pairs that are scored together, sorted by length."""


class Reranker:
    """Scores pairs of a query and a passage.

    The model is a CrossEncoder or MultiVectorEncoder of sentence-transformers (a folder or a Hub id), or a loaded retriever, whose
    token vectors are compared; prompts ("query", "document") other than None replace the retriever's.
    """

    def __init__(
        self,
        model: "str | SentenceTransformer",
        *,
        device: str | None = None,
        trust_remote_code: bool = False,
        batch_size: int = 32,
        prompts: Mapping[str, str | None] | None = None,
    ) -> None:
        self._batch_size = batch_size
        if isinstance(model, str):
            self._kind, opened = _open(model, device, trust_remote_code)
            self.name, self.identity, self._model = model, model_identity(model), in_fast_precision(opened)
        else:
            self._kind, self._model = "MultiVectorEncoder", token_encoder(model, prompts or {})
            self.name, self.identity = "the retriever", "its token vectors"

    @varying_shapes()
    def scores(self, pairs: Sequence[tuple[str, str]], show_progress_bar: bool = False) -> NDArray[np.float32]:
        """Return the scores (P,) of pairs of a query and a passage, as the model's own activation gives them."""
        pairs = [(without_surrogates(query), without_surrogates(passage)) for query, passage in pairs]
        scores_P = np.empty(len(pairs), dtype=np.float32)
        batches = self._read_together if self._kind == "CrossEncoder" else self._late_interaction
        with progress_bar(total=len(pairs), desc="Reranking", unit=" pairs", show=show_progress_bar) as bar:
            for places, scores in batches(pairs) if pairs else ():
                scores_P[places] = scores
                bar.update(len(places))
        if not np.isfinite(scores_P).all():
            raise UserError(f"the scores of {self.name} contain NaN or infinity: its precision may be too low")
        return scores_P

    def _read_together(self, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[Any, Any]]:
        order_P = np.argsort([len(passage) for _, passage in pairs])
        for part in np.array_split(order_P, len(pairs) // 256 + 1):
            given = {"batch_size": self._batch_size, "show_progress_bar": False}
            yield part, self._model.predict([pairs[place] for place in part], **given)

    def _late_interaction(self, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[Any, Any]]:
        """Encode each different text once, and compare the pairs.

        Passages are compared batch by batch: the token vectors of a thousand long ones do not fit in memory.
        """
        options = {"batch_size": self._batch_size, "show_progress_bar": False}
        queries = list(dict.fromkeys(query for query, _ in pairs))
        of_query = dict(zip(queries, self._model.encode_query(queries, **options), strict=True))
        places: dict[str, list[int]] = {}
        for place, (_, passage) in enumerate(pairs):
            places.setdefault(passage, []).append(place)
        passages = sorted(places, key=len, reverse=True)  # batches of similar length
        for start in range(0, len(passages), self._batch_size):
            batch = passages[start : start + self._batch_size]
            of_passage = dict(zip(batch, self._model.encode_document(batch, **options), strict=True))
            compared = [place for passage in batch for place in places[passage]]
            both = [[of_query[pairs[p][0]] for p in compared], [of_passage[pairs[p][1]] for p in compared]]
            yield compared, self._model.similarity_pairwise(*both).float().cpu()


def _open(name: str, device: str | None, trust_remote_code: bool) -> tuple[str, Any]:
    """Return the kind of a reranker and the model."""
    import sentence_transformers

    kind = model_kind(name)
    if kind not in RERANKERS:  # a model without a classifier would get a random one
        raise UserError(
            f"{name} is not a reranker: rerank needs a CrossEncoder or a MultiVectorEncoder, such as"
            " cross-encoder/ms-marco-MiniLM-L6-v2, or self, which reranks with the retriever's own token vectors"
        )
    of_kind = getattr(sentence_transformers, kind)
    model = open_model(of_kind, name, name, device=device, trust_remote_code=trust_remote_code)
    if kind == "CrossEncoder" and model.num_labels != 1:
        raise UserError(f"{name} has {model.num_labels} outputs; a reranker has one: the relevance of a passage")
    return kind, model


def has_tokens(retriever: Any) -> bool:
    """Whether a retriever is a sentence-transformers model that pools its vectors of texts from vectors of tokens in context.

    Those of queries and passages must have the same size: transformers of different sizes only share the pooled vectors' space.
    So do two transformers of the same size, if a Dense layer changes the pooled vectors.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Transformer

    if not isinstance(retriever, SentenceTransformer):
        return False
    modules = input_modules(retriever)
    own_dense = len(set(map(id, modules))) > 1 and any(isinstance(module, Dense) for module in retriever.modules())
    transformers = all(isinstance(module, Transformer) for module in modules) and not own_dense
    return transformers and len({module.get_embedding_dimension() for module in modules}) == 1


def token_encoder(retriever: "SentenceTransformer", prompts: Mapping[str, str | None]) -> "MultiVectorEncoder":
    """Return a retriever as a `MultiVectorEncoder` of its unit token vectors, which shares its weights.

    Prompts other than None replace the retriever's. Their tokens are compared if the retriever's pooling includes them.
    """
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize

    if not has_tokens(retriever):
        raise UserError(
            "late interaction needs a sentence-transformers model with a transformer, loaded here: this retriever has no vectors"
            " of tokens in context, or those of queries and passages have different sizes or different Dense layers: leave out rerank self"
        )
    normalize = Normalize("token_embeddings")
    if not all(getattr(module, "include_prompt", True) for module in retriever.modules()):
        normalize.register_forward_hook(_without_prompt)
    own: Any = retriever.prompts
    return MultiVectorEncoder(
        modules=[retriever[0], normalize],
        device=str(retriever.device),
        prompts=own | {kind: prompt for kind, prompt in prompts.items() if prompt is not None},
        default_prompt_name=retriever.default_prompt_name,
        similarity_fn_name="meanmaxsim",
    )


def _without_prompt(_module: Any, _inputs: Any, features: dict[str, Any]) -> dict[str, Any]:
    mask_PL = features["attention_mask"]
    return features | {"attention_mask": mask_PL * (mask_PL.cumsum(1) > features.get("prompt_length", 0))}


class RerankedRanker:
    """Reorders the best `depth` results of a ranker by the scores of a reranker, or by both (a `Ranker`).

    Results after these keep their order, below the others; their scores only continue the sequence.
    """

    def __init__(
        self,
        ranker: Ranker,
        reranker: Reranker,
        texts: TextSource,
        depth: int,
        weight: float = 1.0,
        *,
        show_progress_bar: bool = False,
    ) -> None:
        self.ranker, self.depth, self.weight = ranker, depth, weight
        self._reranker, self._texts, self._show = reranker, texts, show_progress_bar

    def search(self, queries: Sequence[str], k: int) -> Hits:
        """See `Ranker`."""
        found = self.ranker.search(queries, max(k, self.depth))
        return reranked(found, lambda *pairs: self.pair_scores(queries, *pairs), self.depth, self.weight).first(k)

    def pair_scores(
        self, queries: Sequence[str], queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """See `Ranker`: the reranker's scores."""
        scores_P = np.empty(len(rows_P), dtype=np.float32)
        for start in range(0, len(rows_P), PAIRS):
            part = slice(start, start + PAIRS)
            passages = self._texts.read(rows_P[part].tolist())
            asked = [queries[query] for query in queries_P[part].tolist()]
            scores_P[part] = self._reranker.scores(list(zip(asked, passages, strict=True)), self._show)
        return scores_P


def reranked(
    found: Hits,
    score: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]],
    depth: int,
    weight: float = 1.0,
) -> Hits:
    """Return hits with the best `depth` of each query in the order of new scores, or of both scores; the rest is below these.

    `score` returns the scores (P,) of pairs, given the numbers of their queries and texts.
    """
    first, rest_QK = found.first(depth), found.rows_QK[:, depth:]
    queries_P, places_P = np.nonzero(first.rows_QK >= 0)
    scores_QK = np.full(first.rows_QK.shape, -np.inf, dtype=np.float32)
    scores_QK[queries_P, places_P] = score(queries_P, first.rows_QK[queries_P, places_P])
    again = Hits(scores_QK, first.rows_QK)
    best = fuse([first, again], depth, [1 - weight, weight]) if weight < 1 else sort_hits(*again, depth)
    lowest_Q1 = best.scores_QK.min(axis=1, where=best.rows_QK >= 0, initial=np.inf, keepdims=True)
    below_QK = lowest_Q1 - 1 - np.arange(rest_QK.shape[1], dtype=np.float32)
    rest = Hits(np.where(rest_QK >= 0, below_QK, -np.inf).astype(np.float32), rest_QK)
    return Hits(
        np.concatenate([best.scores_QK, rest.scores_QK], axis=1), np.concatenate([best.rows_QK, rest.rows_QK], axis=1)
    )
