"""BM25 of many texts on disk: the scores of `evaluation.bm25.BM25`, in memory that does not grow with the corpus.

bm25s tokenizes here too, but its index is not used: it wants all texts at once, keeps every word's scores in memory, and
gives no score for a pair of a query and a text, which a margin to the positive needs. Here the counts of the anchors' own
words are kept on disk, block by block (no other word can score), and the weights follow when all texts have been counted:

    score(q, d) = sum over words t of q of  idf(t) * tf / (tf + k1 * (1 - b + b * |d| / avgdl))
    idf(t) = ln(1 + (N - df + 0.5) / (df + 0.5))                    (Lucene's, method "lucene" of bm25s)

Letters in names: A anchors, N texts of a block, P pairs, T words.
"""

import logging
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from tqdm.auto import tqdm

from revela_hub.errors import UserError
from revela_hub.retrieval.bm25 import K1, B
from revela_hub.retrieval.disk import key_of, make_folder, whole_file
from revela_hub.retrieval.scores import SCORE_COLUMNS, split_rows
from revela_hub.retrieval.texts import Texts

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16_384
"""Texts counted at a time, and per file."""


class _Counts(NamedTuple):
    """How often each of the anchors' words is in each text of a block (N, T), and each text's number of words (N,)."""

    counts_NT: Any
    lengths_N: NDArray[np.int64]


class BM25Scores:
    """BM25 of the parts of a corpus for anchors.

    Args:
        folder: Where the counts are kept.
        anchors: The queries.
        parts: The parts of the corpus; document frequencies and the mean length are those of all of them together.
        show_progress_bar: Whether to show a progress bar on standard error.

    Raises:
        UserError: bm25s or PyStemmer is not installed, or the disk is full.
    """

    def __init__(
        self, folder: Path, anchors: Texts, parts: Sequence[Texts], *, show_progress_bar: bool = False
    ) -> None:
        """Counts what is not on disk yet."""
        self.floor = 0.0  # to BM25 a text without a word of the query is no hit
        self._words = _tokenizer()
        self._starts = np.cumsum([0, *map(len, parts)])
        vocabulary, counts_AT = self._count_anchors(anchors)
        self.key = key_of("bm25", K1, B, BLOCK_SIZE, anchors.fingerprint, [part.fingerprint for part in parts])
        self._folders = []
        frequency_T, words = np.zeros(len(vocabulary), dtype=np.int64), 0
        with tqdm(total=len(self), desc="Counting words", unit=" texts", disable=not show_progress_bar) as bar:
            for part in parts:
                name = f"words-{key_of(BLOCK_SIZE, anchors.fingerprint, part.fingerprint)}"
                self._folders.append(make_folder(folder / name))
                for number in range(-(-len(part) // BLOCK_SIZE)):
                    block = self._block(self._folders[-1] / f"{number:06d}.npz", part, number, vocabulary)
                    frequency_T += np.bincount(block.counts_NT.indices, minlength=len(vocabulary))
                    words += int(block.lengths_N.sum())
                    bar.update(len(block.lengths_N))
        self._mean_length = words / max(len(self), 1) or 1.0
        idf_T = np.log1p((len(self) - frequency_T + 0.5) / (frequency_T + 0.5))
        self._anchors_AT = counts_AT.multiply(idf_T).tocsr()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def score_blocks(self, start: int, stop: int) -> "Iterator[tuple[int, Tensor]]":
        """See `revela_hub.retrieval.scores.Scores`."""
        anchors_AT = self._anchors_AT[start:stop]
        for part, first in enumerate(self._starts[:-1].tolist()):
            for number in range(-(-int(self._starts[part + 1] - first) // BLOCK_SIZE)):
                weights_NT = self._weights(part, number)
                for column in range(0, weights_NT.shape[0], SCORE_COLUMNS):
                    scores_AN = (anchors_AT @ weights_NT[column : column + SCORE_COLUMNS].T).toarray()
                    scores_AN = torch.from_numpy(scores_AN.astype(np.float32))
                    # Most scores are zero, and equal scores make the search for the best slow. None of these is a hit.
                    misses_N = -1.0 - torch.arange(scores_AN.shape[1], dtype=torch.float32)
                    yield first + number * BLOCK_SIZE + column, torch.where(scores_AN > 0, scores_AN, misses_N)

    def pair_scores(self, anchors_P: NDArray[np.int64], rows_P: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `revela_hub.retrieval.scores.Scores`."""
        scores_P = np.zeros(len(rows_P), dtype=np.float32)
        for part, chosen, local in split_rows(rows_P, self._starts):
            places = np.flatnonzero(chosen)
            for number in np.unique(local // BLOCK_SIZE).tolist():
                here = local // BLOCK_SIZE == number
                weights_PT = self._weights(part, number)[local[here] - number * BLOCK_SIZE]
                scores_P[places[here]] = self._anchors_AT[anchors_P[places[here]]].multiply(weights_PT).sum(axis=1)
        return scores_P

    def _count_anchors(self, anchors: Texts) -> tuple[dict[str, int], Any]:
        """The anchors' words, and how often each is in each anchor (A, T)."""

        def blocks() -> Iterator[Any]:
            for start in range(0, len(anchors), BLOCK_SIZE):
                yield self._words(anchors.read(range(start, min(start + BLOCK_SIZE, len(anchors)))))

        vocabulary: dict[str, int] = {}
        for tokens in blocks():
            for word in sorted(tokens.vocab):  # bm25s's order is that of a set, another in each process
                vocabulary.setdefault(word, len(vocabulary))
        return vocabulary, sparse.vstack([_count(tokens, vocabulary).counts_NT for tokens in blocks()], format="csr")

    def _block(self, path: Path, part: Texts, number: int, vocabulary: dict[str, int]) -> _Counts:
        """The counts of a block, from disk if they are there and whole."""
        start = number * BLOCK_SIZE
        if path.is_file():
            try:
                return _load(path)
            except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
                logger.warning("%s is damaged (%s): its words are counted again", path, error)
        texts = part.read(range(start, min(start + BLOCK_SIZE, len(part))))
        counts = _count(self._words(texts), vocabulary)
        counts_NT = counts.counts_NT
        with whole_file(path) as stream:
            np.savez(
                stream,
                data=counts_NT.data,
                indices=counts_NT.indices,
                indptr=counts_NT.indptr,
                shape=np.array(counts_NT.shape),
                lengths=counts.lengths_N,
            )
        return counts

    def _weights(self, part: int, number: int) -> Any:
        """The second factor of the equation above for the texts of a block (N, T)."""
        counts_NT, lengths_N = _load(self._folders[part] / f"{number:06d}.npz")
        norms_N = K1 * (1 - B + B * lengths_N / self._mean_length)
        counts = counts_NT.data.astype(np.float64)
        weights = counts / (counts + np.repeat(norms_N, np.diff(counts_NT.indptr)))
        return sparse.csr_array((weights, counts_NT.indices, counts_NT.indptr), shape=counts_NT.shape)


def _load(path: Path) -> _Counts:
    with np.load(path, allow_pickle=False) as arrays:
        csr = (arrays["data"], arrays["indices"], arrays["indptr"])
        return _Counts(sparse.csr_array(csr, shape=tuple(arrays["shape"])), arrays["lengths"])


def _count(tokens: Any, vocabulary: dict[str, int]) -> _Counts:
    """Counts the words of a vocabulary in what bm25s has tokenized."""
    word_of_id = np.full(len(tokens.vocab), -1, dtype=np.int64)
    for word, id_ in tokens.vocab.items():
        word_of_id[id_] = vocabulary.get(word, -1)
    lengths_N = np.fromiter(map(len, tokens.ids), dtype=np.int64, count=len(tokens.ids))
    ids = np.fromiter(chain.from_iterable(tokens.ids), dtype=np.int64, count=int(lengths_N.sum()))
    texts, words = np.repeat(np.arange(len(lengths_N)), lengths_N), word_of_id[ids]
    known = words >= 0
    counts = sparse.coo_array(
        (np.ones(int(known.sum()), dtype=np.int32), (texts[known], words[known])),
        shape=(len(lengths_N), len(vocabulary)),
    )
    return _Counts(counts.tocsr(), lengths_N)  # which adds up what is in one place


def _tokenizer() -> Callable[[list[str]], Any]:
    """As `evaluation.bm25.BM25` tokenizes."""
    try:
        import bm25s
        import Stemmer
    except ImportError as error:
        raise UserError(f"BM25 needs bm25s and PyStemmer ({error}): pip install 'revela-hub[eval]'") from error
    return partial(bm25s.tokenize, stopwords="en", stemmer=Stemmer.Stemmer("porter"), show_progress=False)
