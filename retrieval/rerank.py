"""Reranking: the best results of a ranker are scored again by a model that reads query and passage together.

CrossEncoder        reads both texts at once: the most exact, one forward pass per pair
MultiVectorEncoder  compares their tokens (ColBERT): one forward pass per text
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from revela_hub.data.sources.unicode import without_surrogates
from revela_hub.errors import UserError
from revela_hub.pickles import model_kind
from revela_hub.precision import in_fast_precision
from revela_hub.retrieval.disk import key_of
from revela_hub.retrieval.encoder import RERANKERS, model_identity, open_model
from revela_hub.retrieval.ranker import Ranker
from revela_hub.retrieval.texts import TextSource
from revela_hub.retrieval.top_k import Hits

PAIRS = 4096
"""Pairs that are scored together, sorted by length."""


class Reranker:
    """Scores pairs of a query and a passage.

    Args:
        name: A CrossEncoder or MultiVectorEncoder of sentence-transformers: a folder or a Hub id.
        device: "cpu", "cuda", ...; default: the fastest available.
        trust_remote_code: Whether to run the model's own Python code.
        batch_size: Pairs per forward pass.

    Raises:
        UserError: The model does not exist, is a retriever, or has several outputs.
    """

    def __init__(
        self, name: str, *, device: str | None = None, trust_remote_code: bool = False, batch_size: int = 32
    ) -> None:
        import sentence_transformers

        kind = model_kind(name)
        if kind not in RERANKERS:
            raise UserError(
                f"{name} is {'a retriever' if kind else 'not a reranker'} ({kind or 'a model without a classifier'}): --rerank"
                " needs a CrossEncoder or a MultiVectorEncoder, such as cross-encoder/ms-marco-MiniLM-L6-v2"
            )
        of_kind = getattr(sentence_transformers, kind)
        model = open_model(of_kind, name, name, device=device, trust_remote_code=trust_remote_code, what="reranker")
        if kind == "CrossEncoder" and model.num_labels != 1:
            raise UserError(f"{name} has {model.num_labels} outputs; a reranker has one: the relevance of a passage")
        self.name, self.identity, self._kind, self._batch_size = name, model_identity(name), kind, batch_size
        self._model = in_fast_precision(model)

    def scores(self, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        """Return the scores (P,) of pairs of a query and a passage, as the model's own activation gives them.

        Raises:
            UserError: A score is NaN or infinite.
        """
        pairs = [(without_surrogates(query), without_surrogates(passage)) for query, passage in pairs]
        if not pairs:
            return np.empty(0, dtype=np.float32)
        if self._kind == "CrossEncoder":
            found = self._model.predict(pairs, batch_size=self._batch_size, show_progress_bar=False)
        else:
            found = self._late_interaction(pairs)
        scores_P = np.asarray(found, dtype=np.float32)
        if not np.isfinite(scores_P).all():
            raise UserError(f"the scores of {self.name} contain NaN or infinity: its precision may be too low")
        return scores_P

    def _late_interaction(self, pairs: Sequence[tuple[str, str]]) -> Any:
        """Encode each different text once, and compare the pairs."""
        options = {"batch_size": self._batch_size, "show_progress_bar": False}
        queries, passages = (list(dict.fromkeys(texts)) for texts in zip(*pairs, strict=True))
        of_query = dict(zip(queries, self._model.encode_query(queries, **options), strict=True))
        of_passage = dict(zip(passages, self._model.encode_document(passages, **options), strict=True))
        return [float(self._model.similarity([of_query[q]], [of_passage[p]])[0, 0]) for q, p in pairs]


class _Queries(NamedTuple):
    """Queries, and their form in the ranker whose results are reranked."""

    texts: list[str]
    encoded: Any


class RerankedRanker:
    """Reorders the best `depth` results of a ranker by the scores of a reranker (a `Ranker`).

    Results after these keep their order, below the others; their scores only continue the sequence.
    """

    def __init__(
        self, ranker: Ranker, reranker: Reranker, texts: TextSource, depth: int, *, show_progress_bar: bool = False
    ) -> None:
        self.ranker, self.depth = ranker, depth
        self.key = key_of("rerank", ranker.key, reranker.identity, depth)
        self._reranker, self._texts, self._show = reranker, texts, show_progress_bar

    def encode(self, queries: Sequence[str]) -> _Queries:
        """See `Ranker`."""
        return _Queries(list(queries), self.ranker.encode(queries))

    def search(self, queries: _Queries, k: int) -> Hits:
        """See `Ranker`."""
        found = self.ranker.search(queries.encoded, max(k, self.depth))
        top_QK = found.rows_QK[:, : self.depth]
        queries_P, places_P = np.nonzero(top_QK >= 0)
        scores_QK = np.full(found.rows_QK.shape, -np.inf, dtype=np.float32)
        scores_QK[queries_P, places_P] = self.pair_scores(queries, queries_P, top_QK[queries_P, places_P])
        for scores_K, rows_K in zip(scores_QK, found.rows_QK, strict=True):
            rest = np.flatnonzero(rows_K[self.depth :] >= 0) + self.depth
            if len(rest):
                scores_K[rest] = scores_K[: self.depth].min() - 1 - np.arange(len(rest))
        order_QK = np.argsort(-scores_QK, axis=1, kind="stable")[:, :k]
        return Hits(np.take_along_axis(scores_QK, order_QK, 1), np.take_along_axis(found.rows_QK, order_QK, 1))

    def why_nothing(self, queries: _Queries) -> list[str]:
        """See `Ranker`."""
        return self.ranker.why_nothing(queries.encoded)

    def pair_scores(
        self, queries: _Queries, queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """See `Ranker`: the reranker's scores."""
        scores_P = np.empty(len(rows_P), dtype=np.float32)
        with tqdm(total=len(rows_P), desc="Reranking", unit=" pairs", disable=not self._show) as bar:
            for start in range(0, len(rows_P), PAIRS):
                part = slice(start, start + PAIRS)
                passages = self._texts.read(rows_P[part].tolist())
                asked = [queries.texts[query] for query in queries_P[part].tolist()]
                scores_P[part] = self._reranker.scores(list(zip(asked, passages, strict=True)))
                bar.update(len(passages))
        return scores_P
