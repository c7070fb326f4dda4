"""Overlap of generated examples with evaluation sets, and near-duplicates among them.

Overlap with evaluation sets: a common n-gram of words, with n = 13 as in GPT-3's contamination analysis (arXiv 2005.14165,
appendix C). A shorter text, such as a question, overlaps if the generated text contains all of it, or has the same set of
words. Near-duplicates: the Jaccard similarity of word bigrams, estimated with MinHash, because an exact index would need
gigabytes for 120,000 examples.

Words are compared in one Unicode form, without case and punctuation; in scripts without spaces they are pairs of characters (see
`revela_hub.data.text.words`).
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from revela_hub.data.sources.beir import find_file, is_beir
from revela_hub.data.sources.documents import read_documents
from revela_hub.data.sources.report import counted
from revela_hub.data.sources.source import Source, SourceLike, parse_sources
from revela_hub.data.text.words import characters_per_word, words
from revela_hub.errors import UserError
from revela_hub.files import local_path

if TYPE_CHECKING:
    from datasketch import LeanMinHash

Hashes: TypeAlias = npt.NDArray[np.uint64]

MIN_CONTAINED_WORDS = 5  # shorter evaluation texts ("vitamin C") occur in many unrelated texts

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_PERMUTATIONS = 128


@lru_cache(maxsize=1 << 20)
def _word_hash(word: str) -> int:
    # Not hash(), which differs between processes: a resumed run must make the same decisions.
    return int.from_bytes(hashlib.blake2b(word.encode(errors="replace"), digest_size=8).digest(), "little")


def hash_words(tokens: Sequence[str]) -> Hashes:
    """Return a 64-bit hash of each word."""
    return np.fromiter(map(_word_hash, tokens), dtype=np.uint64, count=len(tokens))


def ngram_hashes(tokens: Hashes, n: int) -> Hashes:
    """Return a 64-bit hash of each n-gram, in order; empty for fewer than n words."""
    count = max(0, len(tokens) - n + 1)
    hashed = np.zeros(count, dtype=np.uint64)
    for offset in range(n if count else 0):
        hashed = hashed * _MULTIPLIER + tokens[offset : offset + count]
    return hashed


class ExcludedTexts:
    """The n-grams of evaluation sets, for detecting texts that share one of them.

    Needs 8 bytes of memory per distinct n-gram.

    Args:
        n: Number of consecutive words that count as an overlap.

    >>> excluded = ExcludedTexts(n=6)
    >>> excluded.add("science", ["Zinc shortens the common cold by about a day.", "Does vitamin C prevent colds?"])
    2
    >>> excluded.find("They say zinc shortens the common cold by far.")
    'science'
    >>> excluded.find("I ask: does vitamin C prevent colds?"), excluded.find("Prevent colds: vitamin C does?")
    ('science', 'science')
    >>> excluded.find("Vitamin C is found in fruit.") is None
    True
    """

    def __init__(self, n: int = 13) -> None:
        if n < 2:
            raise UserError(f"the n-grams that texts are compared by need at least 2 words, not {n}")
        self.n = n
        # name of the set -> number of words -> sorted hashes; 0: hashes of the word sets of short texts
        self._sets: dict[str, dict[int, Hashes]] = {}

    def add(self, name: str, texts: Iterable[str]) -> int:
        """Add texts, which are read once and not stored, to the set with the name that `find` returns; return their number."""
        found: dict[int, list[Hashes]] = defaultdict(list)
        for length, hashes in self._sets.get(name, {}).items():
            found[length].append(hashes)
        count = 0
        for count, text in enumerate(texts, start=1):  # noqa: B007 (it is returned)
            tokens = words(text)
            hashed = hash_words(tokens)
            if len(tokens) >= self.n:
                found[self.n].append(ngram_hashes(hashed, self.n))
                continue
            if len(tokens) >= MIN_CONTAINED_WORDS:
                found[len(tokens)].append(ngram_hashes(hashed, len(tokens)))
            if tokens:
                found[0].append(_set_hash(hashed))
        self._sets[name] = {length: np.unique(np.concatenate(parts)) for length, parts in found.items()}
        return count

    def find(self, text: str) -> str | None:
        """Return the name of the first set that overlaps with `text`, or None."""
        hashed = hash_words(words(text))
        grams = {0: _set_hash(hashed)}
        for name, lengths in self._sets.items():
            for length, excluded in lengths.items():
                if length not in grams:
                    grams[length] = ngram_hashes(hashed, length)
                if _any_in(grams[length], excluded):
                    return name
        return None


def _set_hash(tokens: Hashes) -> Hashes:
    distinct = np.unique(tokens)
    return ngram_hashes(distinct, len(distinct))


def _any_in(values: Hashes, ordered: Hashes) -> bool:
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return bool((ordered[places] == values).any())


def evaluation_files(source: Source) -> list[Source]:
    """Return the queries and the corpus of a BEIR folder; another source as it is."""
    if not is_beir(source.path):
        return [source]
    return [replace(source, path=str(find_file(source.path, name))) for name in ("queries.jsonl", "corpus.jsonl")]


def read_excluded(sources: Sequence[SourceLike], n: int = 13) -> tuple[ExcludedTexts, str]:
    """Read evaluation sets: BEIR folders (queries and corpus), or any source of documents; return them, and a line with their numbers."""
    excluded, counts = ExcludedTexts(n), []
    parsed = parse_sources(sources)
    names = Counter(local_path(source.path).resolve().name for source in parsed)
    for source in parsed:
        name = local_path(source.path).resolve().name
        name = name if names[name] == 1 else source.path  # a/queries.jsonl and b/queries.jsonl
        number = excluded.add(name, (document.text for document in read_documents(evaluation_files(source))))
        counts.append(f"{counted(number, 'text')} of {name}")
    return excluded, f"excluded: {', '.join(counts)}"


def _word_bigrams(tokens: Sequence[str]) -> set[str]:
    """Return the bigrams of words: in scripts without spaces, as many characters as two words have."""
    sizes = [round(2 * characters_per_word(token[0])) for token in tokens]
    bigrams = {" ".join(tokens[i : i + n]) for i, n in enumerate(sizes) if i + n <= len(tokens)}
    return bigrams or {" ".join(tokens)}


class NearDuplicates:
    """Detects texts that are nearly equal to earlier ones, by datasketch's MinHash estimate of their similarity.

    The similarity is the Jaccard index of word bigrams (of words, for a text of one word). It is estimated from 128 minima
    (standard error 0.035 at 0.8) for texts that agree in one band of minima; the bands are chosen so that at least 98% of the
    texts at the threshold do.

    >>> seen = NearDuplicates(0.7)
    >>> seen.add("Rivers carry sediment from the mountains down to the sea, where it settles.")
    >>> "rivers carry sediment from the mountains down to the sea where it settles slowly" in seen
    True
    >>> "Rivers freeze in the mountains." in seen
    False
    """

    def __init__(self, threshold: float = 0.8) -> None:
        from datasketch import MinHash, MinHashLSH  # imports scipy, which takes a second

        self.threshold = threshold
        sizes = [rows for rows in range(1, 33) if 1 - (1 - threshold**rows) ** (_PERMUTATIONS // rows) >= 0.98]
        rows = max(sizes, default=1)
        self._index = MinHashLSH(num_perm=_PERMUTATIONS, params=(_PERMUTATIONS // rows, rows))
        self._empty = MinHash(_PERMUTATIONS)
        self._minima: list[LeanMinHash] = []

    def add(self, text: str) -> None:
        """Add a text."""
        self._minima.append(self._minhash(text))
        self._index.insert(len(self._minima) - 1, self._minima[-1], check_duplication=False)

    def __contains__(self, text: str) -> bool:
        minima = self._minhash(text)
        return any(self._minima[key].jaccard(minima) >= self.threshold for key in self._index.query(minima))

    def _minhash(self, text: str) -> "LeanMinHash":
        from datasketch import LeanMinHash

        tokens = words(text) or [text]
        minhash = self._empty.copy()
        minhash.update_batch([pair.encode(errors="replace") for pair in _word_bigrams(tokens)])
        return LeanMinHash(minhash)
