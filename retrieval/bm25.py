r"""BM25, the baseline without training.

The settings are those of Lucene as Anserini and Pyserini run it: the original Porter stemmer, Lucene's 33 English stop
words, k1 = 0.9, b = 0.4. On SciFact this gives nDCG@10 0.671 (BEIR's paper has 0.665, Anserini's flat index 0.679).
Words are what the regular expression `\w\w+` finds: `snake_case` stays one word, as it does in Lucene.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError

K1 = 0.9
B = 0.4


class Ranking(NamedTuple):
    """The best texts for one query, best first."""

    rows: NDArray[np.int64]
    scores: NDArray[np.float32]


class BM25:
    """A BM25 index over texts, in memory.

    Args:
        texts: The N texts; a hit names its text by position.
        show_progress_bar: Whether to show progress bars on standard error.

    Raises:
        UserError: bm25s or PyStemmer is not installed.
    """

    def __init__(self, texts: Sequence[str], *, show_progress_bar: bool = False) -> None:
        """Indexes the texts."""
        try:
            import bm25s
            import Stemmer
        except ImportError as error:
            raise UserError(f"BM25 needs bm25s and PyStemmer ({error}): pip install 'revela-hub[eval]'") from error
        self._tokenize = bm25s.tokenize
        self._stemmer = Stemmer.Stemmer("porter")
        self._show_progress_bar = show_progress_bar
        self._size = len(texts)
        tokens = self._words(texts)
        self._index = None
        if any(len(words) for words in tokens.ids):  # bm25s cannot index a collection without a single word
            self._index = bm25s.BM25(k1=K1, b=B, method="lucene")
            with warnings.catch_warnings():  # numpy's, for what is empty; such a text scores 0
                warnings.simplefilter("ignore", RuntimeWarning)
                self._index.index(tokens, show_progress=show_progress_bar, leave_progress=False)

    def search(self, queries: Sequence[str], top_k: int) -> list[Ranking]:
        """The best `top_k` texts of each query, fewer where fewer share a word with it."""
        nothing = Ranking(np.empty(0, np.int64), np.empty(0, np.float32))
        if self._index is None or not queries:
            return [nothing for _ in queries]
        rows_QK, scores_QK = self._index.retrieve(
            self._words(queries), k=min(top_k, self._size), show_progress=self._show_progress_bar, leave_progress=False
        )
        # bm25s fills up with texts that score 0; to BM25 they are no hits.
        return [
            Ranking(rows[scores > 0].astype(np.int64), scores[scores > 0].astype(np.float32))
            for rows, scores in zip(rows_QK, scores_QK, strict=True)
        ]

    def _words(self, texts: Sequence[str]) -> Any:
        return self._tokenize(list(texts), stopwords="en", stemmer=self._stemmer, show_progress=self._show_progress_bar)
