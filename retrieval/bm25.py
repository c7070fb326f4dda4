r"""BM25, the baseline without training, by bm25s.

By default k1 = 1.5, b = 0.75 and the English Snowball stemmer, which on most collections is stronger than what Lucene does as
Anserini and Pyserini run it (`ANSERINI`: k1 = 0.9, b = 0.4, the original Porter stemmer); the figures are in the README.
Words are what the regular expression `\w\w+` finds: `snake_case` stays one word, as it does in Lucene. Scripts written without
spaces (Han, kana) have every two characters in succession for words, as Lucene's CJKAnalyzer does it.
"""

import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.text.chunks import UNSPACED_CHARACTER
from revela_hub.errors import UserError, first_line, install_hint
from revela_hub.retrieval.disk import key_of, whole_path, writing
from revela_hub.retrieval.texts import Rows, TextList, Texts, TextSource
from revela_hub.retrieval.top_k import Hits, top_hits

logger = logging.getLogger(__name__)

_UNSPACED_RUN = re.compile(f"{UNSPACED_CHARACTER.pattern}+")
MAX_K1 = 1_000_000
"""Words then count as often as they occur, in texts of any length; much larger numbers overflow in float32."""
METHODS = ("lucene", "robertson", "atire", "bm25l", "bm25+")


@dataclass(frozen=True)
class BM25Settings:
    """How BM25 counts.

    Attributes:
        k1: How slowly repetitions of a word count less; 0 counts each word once.
        b: How much a long text is marked down, 0 to 1.
        stemmer: A stemmer of PyStemmer ("english", "porter", "german", ...), or "none".
        stopwords: The language of bm25s' stop words ("en", "de", ...), or "none".
        method: The variant: "lucene", "robertson", "atire", "bm25l" or "bm25+" (Kamphuis et al. 2020, as bm25s has them).
    """

    k1: float = 1.5
    b: float = 0.75
    stemmer: str = "english"
    stopwords: str = "en"
    method: str = "lucene"

    def __post_init__(self) -> None:
        """Raises UserError for numbers out of range and a method that there is not."""
        if not 0 <= self.k1 <= MAX_K1:
            raise UserError(f"BM25's k1 must be between 0 and {MAX_K1:,}, not {self.k1}")
        if not 0 <= self.b <= 1:
            raise UserError(f"BM25's b must be between 0 and 1, not {self.b}")
        if self.method not in METHODS:
            raise UserError(f"BM25's method must be one of {', '.join(METHODS)}, not {self.method!r}")


ANSERINI = BM25Settings(k1=0.9, b=0.4, stemmer="porter")
"""Lucene as Anserini and Pyserini run it."""

PRESETS = {"bm25s": BM25Settings(), "anserini": ANSERINI}


def bm25_settings(preset: str = "bm25s", **values: Any) -> BM25Settings:
    """A preset, with those of the values that are not None in place of its own.

    Raises:
        UserError: There is no such preset, or a value is out of range.
    """
    if preset not in PRESETS:
        raise UserError(f"there is no BM25 preset {preset!r}; there are {', '.join(PRESETS)}")
    return replace(PRESETS[preset], **{name: value for name, value in values.items() if value is not None})


class BM25:
    """A BM25 index over numbered texts (a `Ranker`).

    Args:
        texts: The N texts, a list or a `TextSource`.
        settings: How words are counted.
        show_progress_bar: Whether to show progress bars on standard error.
        folder: Where an index of the same texts was saved; it is mapped into memory instead of made.

    Raises:
        UserError: bm25s or PyStemmer is not installed, or knows no such stemmer or stop words.
    """

    def __init__(
        self,
        texts: Sequence[str] | TextSource,
        settings: BM25Settings | None = None,
        *,
        show_progress_bar: bool = False,
        folder: Path | None = None,
    ) -> None:
        """Indexes the texts."""
        source = texts if isinstance(texts, (Texts, TextList, Rows)) else TextList(list(texts))  # type: ignore[arg-type]
        self.settings = settings or BM25Settings()
        self.key = key_of("bm25 of pairs", asdict(self.settings), source.fingerprint)
        self._bm25s = _require_bm25s()
        self._stemmer, self._stopwords = _stemmer(self.settings.stemmer), _stop_words(self.settings.stopwords)
        self._show_progress_bar = show_progress_bar
        self._size = len(texts)
        self._index: Any = None
        saved = None if folder is None else folder / f"bm25-{self.key[:16]}"
        if saved is not None and (saved / "complete").is_file():
            try:
                self._index = self._bm25s.BM25.load(str(saved), mmap=True)
                return
            except (OSError, ValueError, KeyError, EOFError) as error:
                logger.warning("%s is damaged (%s): making it again", saved, first_line(error))
        tokens = self._words(_in_blocks(source))
        if any(len(words) for words in tokens.ids):  # bm25s cannot index a collection without a single word
            own = self.settings
            self._index = self._bm25s.BM25(k1=own.k1, b=own.b, method=own.method)
            with warnings.catch_warnings():  # numpy's, for what is empty; such a text scores 0
                warnings.simplefilter("ignore", RuntimeWarning)
                self._index.index(tokens, show_progress=show_progress_bar, leave_progress=False)
            if saved is not None:
                with whole_path(saved) as temporary, writing(saved.parent):
                    self._index.save(str(temporary), show_progress=False)
                    (temporary / "complete").touch()

    def encode(self, queries: Sequence[str]) -> list[list[int]]:
        """See `Ranker`: the numbers of the words of each query that any text has."""
        if self._index is None:
            return [[] for _ in queries]
        words = self._words(queries, return_ids=False)
        return [[number for number in self._index.get_tokens_ids(query) if number >= 0] for query in words]

    def search(self, queries: Sequence[str] | list[list[int]], k: int) -> Hits:
        """See `Ranker`; a text that shares no word with the query is no hit. Takes the queries' texts as well."""
        queries = self.encode(queries) if queries and isinstance(queries[0], str) else queries  # type: ignore[arg-type]
        hits = [self._best(query, k) for query in queries]  # type: ignore[arg-type]
        return Hits.concatenate(hits) if hits else Hits.none(0)

    def why_nothing(self, queries: list[list[int]]) -> list[str]:
        """See `Ranker`."""
        stop = "" if self.settings.stopwords == "none" else " (stop words such as 'the' do not count)"
        return ["" if words else f"no word of the query is in any text{stop}" for words in queries]

    def pair_scores(
        self, queries: list[list[int]], queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """See `Ranker`."""
        scores_P = np.zeros(len(rows_P), dtype=np.float32)
        if self._index is None:
            return scores_P
        data, indices, starts = (self._index.scores[name] for name in ("data", "indices", "indptr"))
        for query in np.unique(queries_P).tolist():
            chosen = np.flatnonzero(queries_P == query)
            for word in queries[query]:
                begin, end = int(starts[word]), int(starts[word + 1])
                # The texts that have a word stand in ascending order.
                places = np.searchsorted(indices[begin:end], rows_P[chosen])
                at = np.minimum(places, end - begin - 1)
                has = (places < end - begin) & (indices[begin:end][at] == rows_P[chosen])
                scores_P[chosen[has]] += data[begin:end][at[has]]
        return scores_P

    def _best(self, words: list[int], k: int) -> Hits:
        if not words or self._index is None:
            return Hits.none(1)
        # Without what bm25l and bm25+ add for words that a text has not: the same for all, and so no reason to find one.
        scores_N = self._index._compute_relevance_from_scores(
            **{name: self._index.scores[name] for name in ("data", "indptr", "indices", "num_docs")},
            query_tokens_ids=np.asarray(words),
            dtype=np.dtype(np.float32),
        )
        found = np.flatnonzero(scores_N > 0)
        return top_hits(scores_N[found], found, k)

    def _words(self, texts: Any, *, return_ids: bool = True) -> Any:
        return self._bm25s.tokenize(
            map(_spaced, texts) if isinstance(texts, Iterator) else [_spaced(text) for text in texts],
            stopwords=self._stopwords,
            stemmer=self._stemmer,
            return_ids=return_ids,
            show_progress=self._show_progress_bar and return_ids,
        )


def _spaced(text: str) -> str:
    """The text with its runs of Han and kana written as pairs of characters."""
    if text.isascii():
        return text
    return _UNSPACED_RUN.sub(lambda run: f" {' '.join(map(''.join, pairwise(run[0])))} ", text)


def _in_blocks(texts: TextSource, size: int = 4096) -> Iterator[str]:
    for start in range(0, len(texts), size):
        yield from texts.read(range(start, min(start + size, len(texts))))


def _require_bm25s() -> Any:
    try:
        import bm25s
        import Stemmer  # noqa: F401
    except ImportError as error:
        raise UserError(install_hint("bm25s")) from error
    return bm25s


def _stemmer(name: str) -> Any:
    import Stemmer

    if name == "none":
        return None
    if name not in Stemmer.algorithms(True):
        raise UserError(f"there is no stemmer {name!r}; there are none, {', '.join(sorted(Stemmer.algorithms(True)))}")
    return Stemmer.Stemmer(name)


def _stop_words(name: str) -> Any:
    if name == "none":
        return []
    from bm25s.tokenization import _infer_stopwords

    try:
        return list(_infer_stopwords(name))
    except ValueError as error:
        raise UserError(f"bm25s has no stop words for {name!r}; give a language such as en, or none") from error
