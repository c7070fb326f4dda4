"""The input of mining, stored on disk without duplicate texts: pairs of an anchor and a positive, and the corpus.

Of anchors and of positives that are the same text (`text_key`), the first one stands for all; the corpus contains it once.

Letters in names: A anchors, P pairs.
"""

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.sources.beir import titled
from revela_hub.data.text.same_text import text_hash
from revela_hub.errors import UserError
from revela_hub.retrieval.mining.negatives import MiningReport
from revela_hub.retrieval.texts import TextFile, write_texts


class TitledText(str):
    """A title and a text, joined as in BEIR; a pair with the text alone has the same passage."""

    untitled: str

    def __new__(cls, title: object, text: str) -> "TitledText":
        """Join title and text."""
        joined = super().__new__(cls, titled(title, text))
        joined.untitled = text
        return joined


class NumberedPairs(NamedTuple):
    """Pairs and corpus on disk. The pairs are sorted by their anchors' numbers.

    Attributes:
        texts: Anchors and positives.
        corpus: All candidates for negatives, including the positives.
        anchors_A: The distinct anchors, as numbers in `texts`.
        anchors_P: The anchor of each pair, as a position in `anchors_A`.
        positives_P: The positive of each pair, as a number in `corpus`.
        same_A: A hash of each anchor's `text_key`.
        same_N: A hash of the `text_key` of each text of `corpus`, without its title.
    """

    texts: TextFile
    corpus: TextFile
    anchors_A: NDArray[np.int64]
    anchors_P: NDArray[np.int64]
    positives_P: NDArray[np.int64]
    same_A: NDArray[np.int64]
    same_N: NDArray[np.int64]


def number_pairs(
    pairs: Iterable[tuple[str, str]], corpus: Iterable[str] | None, folder: Path, report: MiningReport
) -> NumberedPairs:
    """Write pairs and corpus to a folder and number their texts; updates the counts of the report."""
    if isinstance(corpus, str):
        raise UserError(
            f"the corpus is the text {corpus[:40]!r}: give a list of texts, such as those of read_documents"
        )
    texts, rows_L, same_of_row = _write(chain.from_iterable(_with_text(pairs, report)), folder)
    if not len(texts):
        raise UserError("no pair has text in both its anchor and its positive")
    pairs_P2 = np.unique(rows_L.reshape(-1, 2), axis=0)  # by anchor, then by positive, in the order of the input
    report.pairs = len(pairs_P2)
    report.skipped["duplicate pairs"] += len(rows_L) // 2 - len(pairs_P2)
    anchors_A, anchors_P = np.unique(pairs_P2[:, 0], return_inverse=True)
    report.anchors = len(anchors_A)
    positives, positives_P = np.unique(pairs_P2[:, 1], return_inverse=True)
    keys = same_of_row[positives].tolist()
    line_of = dict.fromkeys(keys, -1)  # of the positives, in the file of the corpus
    seen: set[int] = set()
    read = lines = 0

    def searched() -> Iterator[str]:
        nonlocal read, lines
        for text in () if corpus is None else _documents(corpus, report):
            read += 1
            whole = text_hash(text)
            key = whole if whole in line_of else _hash(text)
            if (
                whole in seen or line_of.get(key, -1) >= 0
            ):  # a copy, or a positive that was read before with another title
                continue
            seen.add(whole)
            if key in line_of:
                line_of[key] = lines
            lines += 1
            yield text
        added = lines
        for key, row in zip(keys, positives.tolist(), strict=True):
            if line_of[key] < 0:  # the same ranker must score them
                line_of[key], added = added, added + 1
                yield from texts.read([row])

    documents, _, same_N = _write(searched(), folder)
    if corpus is not None:
        own = int(documents.rows_L[:lines].max()) + 1
        report.copies, report.added = read - own, len(documents) - own
    report.documents = len(documents)
    row_of_each = documents.rows_L[np.array([line_of[key] for key in keys])]
    return NumberedPairs(
        texts,
        documents,
        anchors_A,
        anchors_P.reshape(-1),
        row_of_each[positives_P.reshape(-1)],
        same_of_row[anchors_A],
        same_N,
    )


def _write(texts: Iterable[str], folder: Path) -> tuple[TextFile, NDArray[np.int64], NDArray[np.int64]]:
    """Write texts; return the file, for each line the number of the first one that is the same text, and the hash of each number."""
    hashes = array("q")

    def hashed() -> Iterator[str]:
        for text in texts:
            hashes.append(_hash(text))
            yield text

    written = write_texts(hashed(), folder)
    same_L = np.frombuffer(hashes, dtype=np.int64)
    _, first, place_L = np.unique(same_L, return_index=True, return_inverse=True)
    same_N = np.zeros(len(written), dtype=np.int64)
    same_N[written.rows_L] = same_L
    return written, written.rows_L[first[place_L.reshape(-1)]], same_N


def _hash(text: str) -> int:
    return text_hash(text.untitled if isinstance(text, TitledText) else text)


def _documents(corpus: Iterable[str], report: MiningReport) -> Iterator[str]:
    empty = True
    for text in corpus:
        if text and text.strip():
            empty = False
            yield text
        else:
            report.skipped["empty documents"] += 1
    if empty:
        raise UserError("the corpus has no document with text")


def _with_text(pairs: Iterable[tuple[str, str]], report: MiningReport) -> Iterator[tuple[str, str]]:
    for anchor, positive in pairs:
        if anchor and positive and anchor.strip() and positive.strip():
            yield anchor, positive
        else:
            report.skipped["empty pairs"] += 1
