"""Searching passages: by a model's vectors (FAISS, exact), or by BM25.

Both indexes are built of `Passages` and answer `search(queries, top_k)` with hits, which is all that a caller sees.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from revela_hub.data.sources.report import ReadReport
from revela_hub.data.sources.source import Document
from revela_hub.data.text.chunks import Chunk, chunk_document
from revela_hub.errors import UserError
from revela_hub.retrieval.bm25 import BM25
from revela_hub.retrieval.cache import VectorCache
from revela_hub.retrieval.encoder import Encoder, as_vectors
from revela_hub.retrieval.passages import Hit, Passages, collect_passages

SHARD_SIZE = 1024
"""Passages per file of the cache: what an interruption can cost."""


def read_passages(
    documents: Iterable[Document],
    *,
    max_words: int = 120,
    report: ReadReport | None = None,
    show_progress_bar: bool = False,
) -> Passages:
    """Cuts documents into chunks, and keeps each text once.

    Args:
        documents: What `read_documents` reads; a file that comes twice (`src src/part`) is taken once.
        max_words: The largest number of words in a chunk.
        report: Its `chunks` and `cut` are counted up.
        show_progress_bar: Whether to show a progress bar on standard error.
    """

    def chunks() -> Iterator[Chunk]:
        seen: set[Path] = set()
        for document in tqdm(documents, desc="Reading", unit=" documents", disable=not show_progress_bar, leave=False):
            if document.path is not None:
                file = Path(document.path).resolve()
                if file in seen:
                    continue
                seen.add(file)
            yield from chunk_document(document, max_words, report=report)

    return collect_passages(chunks())


class PassageIndex:
    """Passages found by the similarity of a model's vectors.

    Args:
        encoder: A SentenceTransformer, or anything like `revela_hub.evaluation.Encoder`.
        passages: What to search.
        cache: Where vectors are kept between runs; None encodes everything anew.
        similarity: "cosine" or "dot".
        batch_size: Passages per forward pass.
        show_progress_bar: Whether to show progress bars on standard error.

    Raises:
        UserError: FAISS is not installed, the disk is full, or the model's vectors are not numbers.
    """

    def __init__(
        self,
        encoder: Encoder,
        passages: Passages,
        cache: VectorCache | None = None,
        *,
        similarity: str = "cosine",
        batch_size: int = 32,
        show_progress_bar: bool = False,
    ) -> None:
        """Takes from the cache what is there, and encodes the rest."""
        if similarity not in ("cosine", "dot"):
            raise ValueError(f'similarity must be "cosine" or "dot", not {similarity!r}')
        _require_faiss()  # before the long work, not after it
        self.passages = passages
        self._encoder = encoder
        self._normalize = similarity == "cosine"
        self._batch_size = batch_size
        self._index: Any = None  # made with the first vectors, whose dimension it has
        self._rows: list[NDArray[np.int64]] = []  # FAISS numbers vectors as they come: to passage numbers
        missing = self._add_cached(cache) if cache is not None else list(range(len(passages.texts)))
        self.reused = len(passages.texts) - len(missing)
        self._encode(missing, cache, show_progress_bar)
        self._passage_of = np.concatenate(self._rows) if self._rows else np.empty(0, np.int64)

    def search(self, queries: Sequence[str], top_k: int = 10) -> list[list[Hit]]:
        """The best passages of each query, best first; fewer than `top_k` where there are fewer."""
        if self._index is None or not queries:
            return [[] for _ in queries]
        encoded = self._encoder.encode_query(list(queries), batch_size=self._batch_size, show_progress_bar=False)
        queries_QD = as_vectors(encoded, len(queries), normalize=self._normalize)
        scores_QK, found_QK = self._index.search(queries_QD, min(top_k, len(self._passage_of)))
        return [
            [
                self.passages.hit(int(row), float(score))
                for row, score in zip(self._passage_of[found], scores, strict=True)
            ]
            for found, scores in zip(found_QK, scores_QK, strict=True)
        ]

    def _add_cached(self, cache: VectorCache) -> list[int]:
        """Adds what the cache has, and returns the passages that it does not have."""
        rows = {digest: row for row, digest in enumerate(self.passages.digests)}
        missing = np.ones(len(rows), dtype=bool)
        for cached in cache.read(rows):
            self._add(cached.rows, cached.vectors)
            missing[cached.rows] = False
        return [int(row) for row in np.flatnonzero(missing)]

    def _encode(self, rows: list[int], cache: VectorCache | None, show_progress_bar: bool) -> None:
        bar = tqdm(
            total=len(rows), desc="Encoding passages", unit=" passages", disable=not show_progress_bar or not rows
        )
        with bar:
            for start in range(0, len(rows), SHARD_SIZE):
                shard = rows[start : start + SHARD_SIZE]
                texts = [self.passages.texts[row] for row in shard]
                encoded = self._encoder.encode_document(texts, batch_size=self._batch_size, show_progress_bar=False)
                vectors = as_vectors(encoded, len(texts), normalize=False)
                if cache is not None:
                    cache.write([self.passages.digests[row] for row in shard], vectors)
                self._add(np.array(shard, dtype=np.int64), vectors)
                bar.update(len(shard))

    def _add(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        if self._index is None:
            self._index = _require_faiss().IndexFlatIP(vectors.shape[1])
        if vectors.shape[1] != self._index.d:
            raise ValueError(
                f"vectors of {vectors.shape[1]} numbers and of {self._index.d}: the cache's key does not tell models apart"
            )
        self._index.add(as_vectors(vectors, len(rows), normalize=self._normalize))
        self._rows.append(rows)


class BM25Index:
    """Passages found by BM25.

    Args:
        passages: What to search.
        show_progress_bar: Whether to show progress bars on standard error.

    Raises:
        UserError: bm25s or PyStemmer is not installed.
    """

    def __init__(self, passages: Passages, *, show_progress_bar: bool = False) -> None:
        """Indexes the passages."""
        self.passages = passages
        self._bm25 = BM25(passages.texts, show_progress_bar=show_progress_bar)

    def search(self, queries: Sequence[str], top_k: int = 10) -> list[list[Hit]]:
        """The best passages of each query, best first; only passages that share a word with it."""
        return [
            [self.passages.hit(int(row), float(score)) for row, score in zip(*ranking, strict=True)]
            for ranking in self._bm25.search(queries, top_k)
        ]


def _require_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise UserError(f"searching needs FAISS ({error}): pip install 'revela-hub[search]'") from error
    return faiss
