r"""BM25 with bm25s: the baseline that needs no training.

The defaults are k1 = 1.5, b = 0.75 and the English Snowball stemmer, which score higher on most collections than the settings of
Anserini and Pyserini (`ANSERINI`: k1 = 0.9, b = 0.4, the original Porter stemmer). Words are letters, digits, underscores and combining
marks (see `revela_hub.data.text.words`): `snake_case` is one word, as in Lucene, unless `split_identifiers` is set. Text in scripts
without spaces (Han, kana, Thai) and in Korean, whose particles are written together with the word, is indexed as overlapping pairs of
characters, and a character that stands alone by itself, as Lucene's CJKAnalyzer does. A query of single characters also finds the
pairs that contain them.
"""

import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.text.words import HANGUL, MARKS, UNSPACED, aligned, normal, pairs
from revela_hub.errors import UserError, first_line
from revela_hub.files import atomic, key_of
from revela_hub.retrieval.texts import TextFile, TextList, TextSource
from revela_hub.retrieval.top_k import Hits, top_hits

logger = logging.getLogger(__name__)

_PAIRED = f"{UNSPACED}{HANGUL}"
_PAIRED_RUN = re.compile(f"[{_PAIRED}]+")
# A single letter is a word ("vitamin C"), but not before or after an apostrophe (that's, l'eau).
_WORD = rf"[{_PAIRED}]{{1,2}}|\w[\w{MARKS}]+|(?<!\w['’])[^\W_](?!['’]\w)"
"""A pair, which `_spaced` has put between spaces, or a word."""
_WORD_OR_PAIR = re.compile(
    rf"[{_PAIRED}](?=[{_PAIRED}])|(?![{_PAIRED}])\w(?:(?![{_PAIRED}])[\w{MARKS}])+|(?<!\w['’])[^\W_{_PAIRED}](?!['’]\w)"
)
"""A word, or the first character of a pair."""
_PART_END = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""End of a part of an identifier: snake_case, camelCase, HTTPServer."""
MAX_K1 = 1_000_000
"""Upper limit of k1: term frequency is practically linear there, and much larger values overflow in float32."""


@dataclass(frozen=True)
class BM25Settings:
    """The parameters of BM25.

    Attributes:
        k1: Term-frequency saturation; 0 counts each word once.
        b: Length normalisation, 0 to 1.
        stemmer: A stemmer of PyStemmer ("english", "porter", "german", ...), or "none".
        stopwords: The language of bm25s' stop words ("en", "de", ...), or "none".
        split_identifiers: Whether `parse_header` and `parseHeader` are also indexed as "parse" and "header". For code.
    """

    k1: float = 1.5
    b: float = 0.75
    stemmer: str = "english"
    stopwords: str = "en"
    split_identifiers: bool = False

    def __post_init__(self) -> None:
        """Raises UserError for a value out of range."""
        if not 0 <= self.k1 <= MAX_K1:
            raise UserError(f"BM25's k1 must be between 0 and {MAX_K1:,}, not {self.k1}")
        if not 0 <= self.b <= 1:
            raise UserError(f"BM25's b must be between 0 and 1, not {self.b}")


ANSERINI = BM25Settings(k1=0.9, b=0.4, stemmer="porter")
"""The settings of Anserini and Pyserini."""

PRESETS = {"bm25s": BM25Settings(), "anserini": ANSERINI}


def bm25_settings(preset: str = "bm25s", **values: Any) -> BM25Settings:
    """Return a preset with those of the values replaced that are not None."""
    if preset not in PRESETS:
        raise UserError(f"unknown BM25 preset {preset!r}; the presets are {', '.join(PRESETS)}")
    return replace(PRESETS[preset], **{name: value for name, value in values.items() if value is not None})


class BM25:
    """A BM25 index over numbered texts (a `Ranker`).

    Args:
        texts: The N texts, a list or a `TextSource`.
        settings: The parameters of BM25.
        show_progress_bar: Whether to show progress bars on standard error.
        folder: A folder for the index: an index of the same texts is memory-mapped from there instead of built.

    Raises:
        UserError: bm25s or PyStemmer does not have this stemmer or these stop words.
    """

    def __init__(
        self,
        texts: Sequence[str] | TextSource,
        settings: BM25Settings | None = None,
        *,
        show_progress_bar: bool = False,
        folder: Path | None = None,
    ) -> None:
        # If JAX is installed, bm25s starts it, which by default reserves three quarters of the GPU's memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import bm25s

        source = texts if isinstance(texts, (TextFile, TextList)) else TextList(list(texts))  # type: ignore[arg-type]
        self.settings = settings or BM25Settings()
        self.key = key_of(
            "bm25 of letters, marks, pairs of Korean syllables and single letters",
            asdict(self.settings),
            source.fingerprint,
        )
        self._bm25s: Any = bm25s
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
                logger.warning("%s is damaged (%s): rebuilding it", saved, first_line(error))
        tokens = self._words(_in_blocks(source))
        if any(len(words) for words in tokens.ids):  # bm25s cannot index a collection without a single word
            self._index = self._bm25s.BM25(k1=self.settings.k1, b=self.settings.b)
            with warnings.catch_warnings():  # numpy warns about empty texts; they score 0
                warnings.simplefilter("ignore", RuntimeWarning)
                self._index.index(tokens, show_progress=show_progress_bar, leave_progress=False)
            if saved is not None:
                self._write(saved)

    def _write(self, folder: Path) -> None:
        """Save the index for later runs; a full or read-only disk does not stop this one."""
        try:
            with atomic(folder) as temporary:
                self._index.save(str(temporary), show_progress=False)
                (temporary / "complete").touch()
        except OSError as error:
            logger.warning("the BM25 index is not saved and will be built again next time: %s", error)

    def encode(self, queries: Sequence[str]) -> list[list[int]]:
        """See `Ranker`: the ids of each query's words that occur in any text."""
        if self._index is None:
            return [[] for _ in queries]
        words = self._words(queries, return_ids=False)
        known = [self._index.get_tokens_ids([*query, *self._pairs_with(query)]) for query in words]
        return [[number for number in numbers if number >= 0] for numbers in known]

    def _pairs_with(self, words: list[str]) -> list[str]:
        """Return the pairs of the index that contain a word, if all words are single characters: else the longer words matter."""
        if any(len(word) > 1 for word in words):
            return []
        singles = {word for word in words if _PAIRED_RUN.match(word)}
        return [pair for pair in self._index.vocab_dict if len(pair) == 2 and not singles.isdisjoint(pair)]

    def search(self, queries: Sequence[str] | list[list[int]], k: int) -> Hits:
        """See `Ranker`; texts without a word of the query are not returned. Also accepts the queries as strings."""
        queries = [queries] if isinstance(queries, str) else queries
        queries = self.encode(queries) if queries and isinstance(queries[0], str) else queries  # type: ignore[arg-type]
        return Hits.concatenate(self._best(query, k) for query in queries)  # type: ignore[arg-type]

    def why_nothing(self, queries: list[list[int]]) -> list[str]:
        """See `Ranker`."""
        stop = "" if self.settings.stopwords == "none" else " (stop words such as 'the' are ignored)"
        return ["" if words else f"no text contains a word of the query{stop}" for words in queries]

    @property
    def _postings(self) -> list[NDArray[Any]]:
        """The weights of all words, the texts that they belong to, and where those of each word start."""
        return [self._index.scores[name] for name in ("data", "indices", "indptr")]

    def matches(self, query: str, text: str) -> list[tuple[int, int]]:
        """Return the places of the text's words that match a word of the query, as (start, end) in ascending order."""
        [stems] = self._words([query], return_ids=False)
        found: list[tuple[int, int]] = []
        form, places = aligned(text)
        for word in _WORD_OR_PAIR.finditer(form):
            last = word.end() - (_PAIRED_RUN.match(word[0]) is None)
            start, end, piece = places[word.start()][0], places[last][1], form[word.start() : last + 1]
            pieces = [piece, *_parts(piece)] if self.settings.split_identifiers else [piece]
            if any(
                (p if self._stemmer is None else self._stemmer.stemWord(p)) in stems for p in map(str.lower, pieces)
            ):
                joined = bool(found) and found[-1][1] >= start  # pairs of characters overlap
                found.append((found.pop()[0] if joined else start, end))
        singles = "".join(stem for stem in stems if _PAIRED_RUN.fullmatch(stem) and len(stem) == 1)
        alone = [places[single.start()] for single in re.finditer(f"[{singles}]", form)] if singles else []
        return sorted({*found, *(place for place in alone if not any(a <= place[0] < b for a, b in found))})

    def pair_scores(
        self, queries: list[list[int]], queries_P: NDArray[np.int64], rows_P: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """See `Ranker`."""
        scores_P = np.zeros(len(rows_P), dtype=np.float32)
        if self._index is None:
            return scores_P
        data, indices, starts = self._postings
        for query in np.unique(queries_P).tolist():
            chosen = np.flatnonzero(queries_P == query)
            for word in queries[query]:
                begin, end = int(starts[word]), int(starts[word + 1])
                # The texts with a word are in ascending order.
                places = np.searchsorted(indices[begin:end], rows_P[chosen])
                at = np.minimum(places, end - begin - 1)
                has = (places < end - begin) & (indices[begin:end][at] == rows_P[chosen])
                scores_P[chosen[has]] += data[begin:end][at[has]]
        return scores_P

    def _best(self, words: list[int], k: int) -> Hits:
        if not words or self._index is None:
            return Hits.none(1)
        scores_N = np.zeros(self._size, dtype=np.float32)
        data, indices, starts = self._postings
        for word in words:
            texts = slice(int(starts[word]), int(starts[word + 1]))
            scores_N[indices[texts]] += data[texts]
        found = np.flatnonzero(scores_N > 0)
        return top_hits(scores_N[found], found, k)

    def _words(self, texts: Any, *, return_ids: bool = True) -> Any:
        spaced: Iterable[str] = map(_spaced, texts)
        if self.settings.split_identifiers:
            spaced = map(_with_parts, spaced)
        return self._bm25s.tokenize(
            spaced if isinstance(texts, Iterator) else list(spaced),
            token_pattern=_WORD,
            stopwords=self._stopwords,
            stemmer=self._stemmer,
            return_ids=return_ids,
            show_progress=self._show_progress_bar and return_ids,
        )


def _spaced(text: str) -> str:
    """Return the text in normal form, with runs of scripts without spaces and of Korean rewritten as pairs of characters."""
    return text if text.isascii() else _PAIRED_RUN.sub(lambda run: f" {' '.join(pairs(run[0]))} ", normal(text))


def _parts(word: str) -> list[str]:
    """Return the parts of an identifier; none for a plain word.

    >>> _parts("parse_HTTPHeader"), _parts("header")
    (['parse', 'HTTP', 'Header'], [])
    """
    parts = [part for part in _PART_END.split(word) if part]
    return [] if parts == [word] else parts


def _with_parts(text: str) -> str:
    return re.sub(r"\w+", lambda word: " ".join([word[0], *_parts(word[0])]), text)


def _in_blocks(texts: TextSource) -> Iterator[str]:
    for start in range(0, len(texts), 4096):
        yield from texts.read(range(start, min(start + 4096, len(texts))))


def _stemmer(name: str) -> Any:
    import Stemmer

    if name == "none":
        return None
    if name not in Stemmer.algorithms(True):
        raise UserError(f"unknown stemmer {name!r}; choose none, {', '.join(sorted(Stemmer.algorithms(True)))}")
    return Stemmer.Stemmer(name)


def _stop_words(name: str) -> Any:
    if name == "none":
        return []
    from bm25s.tokenization import Tokenizer

    try:
        return list(Tokenizer(stopwords=name).stopwords)
    except ValueError as error:
        raise UserError(f"bm25s has no stop words for {name!r}; use a language code such as en, or none") from error
