r"""BM25 with bm25s: the baseline that needs no training.

The defaults are k1 = 1.5, b = 0.75 and the English Snowball stemmer, which score higher on most collections than the settings of
Anserini and Pyserini (`ANSERINI`: k1 = 0.9, b = 0.4, the original Porter stemmer). Words are letters, digits, underscores and combining
marks (see `revela_hub.data.text.words`): `snake_case` is one word, as in Lucene, unless `split_identifiers` is set. Text in scripts
without spaces (Han, kana, Thai) and in Korean, whose particles are written together with the word, is indexed as overlapping pairs of
characters, and a character without neighbours as one word, as Lucene's CJKAnalyzer does. A query of single characters also finds the
pairs that contain them.
"""

import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scipy import sparse

from revela_hub.data.text.words import HANGUL, LETTER, MARKS, UNSPACED, normal, pairs
from revela_hub.files import atomic, key_of
from revela_hub.retrieval.sparse import InvertedIndex, Terms
from revela_hub.retrieval.texts import TextList, TextSource

_PAIRED = f"{UNSPACED}{HANGUL}"
_PAIRED_RUN = re.compile(f"[{_PAIRED}]+")
# A pair, which `_spaced` has put between spaces, or a word. A single letter is one ("vitamin C"), but not before or after an apostrophe
# (that's, l'eau).
_WORD = rf"[{_PAIRED}]{{1,2}}|\w[\w{MARKS}]+|(?<!\w['’])[^\W_](?!['’]\w)"
_WORD_IN_TEXT = re.compile(rf"[{_PAIRED}]|(?:(?![{_PAIRED}]){LETTER})+")
"""A word in unchanged text, or one of the characters that are indexed in pairs."""
_PART_END = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""End of a part of an identifier: snake_case, camelCase, HTTPServer."""


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


ANSERINI = BM25Settings(k1=0.9, b=0.4, stemmer="porter")
"""The settings of Anserini and Pyserini."""

PRESETS = {"bm25s": BM25Settings(), "anserini": ANSERINI}


def bm25_settings(preset: str = "bm25s", **values: Any) -> BM25Settings:
    """Return a preset with those of the values replaced that are not None."""
    return replace(PRESETS[preset], **{name: value for name, value in values.items() if value is not None})


class BM25(InvertedIndex):
    """A BM25 index over numbered texts (a `Ranker`).

    Args:
        texts: The N texts, a list or a `TextSource`.
        settings: The parameters of BM25.
        show_progress_bar: Whether to show progress bars on standard error.
        folder: A folder for the index: an index of the same texts is memory-mapped from there instead of built.

    Raises:
        KeyError: PyStemmer does not have this stemmer.
        ValueError: bm25s does not have these stop words.
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
        import Stemmer

        source = TextList(texts) if isinstance(texts, Sequence) else texts
        self.settings = settings or BM25Settings()
        self._bm25s: Any = bm25s
        self._stemmer = None if self.settings.stemmer == "none" else Stemmer.Stemmer(self.settings.stemmer)
        self._stopwords = [] if self.settings.stopwords == "none" else self.settings.stopwords
        self._show_progress_bar = show_progress_bar and sys.stderr.isatty()  # bm25s draws them
        key = key_of("bm25 of letters, marks, pairs of Korean syllables and single letters", asdict(self.settings))
        saved = None if folder is None else folder / f"bm25-{key[:8]}-{source.fingerprint}"
        if saved is not None and saved.is_dir():
            self._index = bm25s.BM25.load(str(saved), mmap=True)
        else:
            self._index = bm25s.BM25(k1=self.settings.k1, b=self.settings.b)
            tokens = self._words(text for row in range(len(source)) for text in source.read([row]))
            if not any(map(len, tokens.ids)):  # bm25s cannot index a collection without a single word
                self._index.vocab_dict, self.postings = {}, [sparse.csr_array((0, len(source)))]
                return
            with warnings.catch_warnings():  # numpy warns about empty texts; they score 0
                warnings.simplefilter("ignore", RuntimeWarning)
                self._index.index(tokens, show_progress=self._show_progress_bar, leave_progress=False)
            if saved is not None:
                with atomic(saved) as temporary:
                    self._index.save(str(temporary), show_progress=False)
        arrays = tuple(self._index.scores[name] for name in ("data", "indices", "indptr"))
        self.postings = [sparse.csr_array(arrays, (len(arrays[2]) - 1, len(source)))]

    def terms(self, queries: Sequence[str]) -> list[Terms]:
        """See `InvertedIndex`: the words of each query that occur in any text, all with the weight 1."""
        known = self._index.vocab_dict
        found = [[*words, *self._pairs_with(words)] for words in self._words(queries, return_ids=False)]
        ids = [[known[word] for word in words if word in known] for words in found]
        return [(numbers, [1.0] * len(numbers)) for numbers in ids]

    def _pairs_with(self, words: list[str]) -> list[str]:
        """Return the pairs of the index that contain a word, if all words are single characters: else the longer words matter."""
        if any(len(word) > 1 for word in words):
            return []
        singles = {word for word in words if _PAIRED_RUN.match(word)}
        return [pair for pair in self._index.vocab_dict if len(pair) == 2 and not singles.isdisjoint(pair)]

    def matches(self, query: str, text: str) -> list[tuple[int, int]]:
        """Return the places of the text's words that match a word of the query, as (start, end) in ascending order."""
        [wanted] = self._words([query], return_ids=False)
        places = [word.span() for word in _WORD_IN_TEXT.finditer(text)]
        of_places = self._words([text[start:end] for start, end in places], return_ids=False)
        found: list[tuple[int, int]] = []
        for (start, end), words in zip(places, of_places, strict=True):
            if _PAIRED_RUN.match(text, start):
                words = [*words, text[start : end + 1], text[start - 1 : end]]
            if not set(words).isdisjoint(wanted):
                joined = bool(found) and found[-1][1] == start
                found.append((found.pop()[0] if joined else start, end))
        return found

    def _words(self, texts: Iterable[str], *, return_ids: bool = True) -> Any:
        spaced = map(_spaced, texts)
        return self._bm25s.tokenize(
            map(_with_parts, spaced) if self.settings.split_identifiers else spaced,
            token_pattern=_WORD,
            stopwords=self._stopwords,
            stemmer=self._stemmer,
            return_ids=return_ids,
            show_progress=self._show_progress_bar and return_ids,
        )


def _spaced(text: str) -> str:
    """Return the text in normal form, with runs of scripts without spaces and of Korean rewritten as pairs of characters."""
    return text if text.isascii() else _PAIRED_RUN.sub(lambda run: f" {' '.join(pairs(run[0]))} ", normal(text))


def _with_parts(text: str) -> str:
    """Return the text with the parts of each identifier after it.

    >>> _with_parts("def parse_HTTPHeader(line)")
    'def parse_HTTPHeader parse HTTP Header(line)'
    """
    return re.sub(
        r"\w+", lambda word: " ".join(dict.fromkeys([word[0], *filter(None, _PART_END.split(word[0]))])), text
    )
