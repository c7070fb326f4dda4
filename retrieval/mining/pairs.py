"""The input of mining, stored on disk without duplicate texts: pairs of an anchor and a positive, and the corpus.

Letters in names: A anchors, P pairs.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.mixture.pairs import one_line
from revela_hub.data.sources.beir import titled
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
        in_corpus_A: Each anchor's number in `corpus`, -1 if it is not in there.
    """

    texts: TextFile
    corpus: TextFile
    anchors_A: NDArray[np.int64]
    anchors_P: NDArray[np.int64]
    positives_P: NDArray[np.int64]
    in_corpus_A: NDArray[np.int64]


def number_pairs(
    pairs: Iterable[tuple[str, str]], corpus: Iterable[str] | None, folder: Path, report: MiningReport
) -> NumberedPairs:
    """Write pairs and corpus to a folder and number their texts; updates the counts of the report."""
    if isinstance(corpus, str):
        raise UserError(
            f"the corpus is the text {corpus[:40]!r}: give a list of texts, such as those of read_documents"
        )
    texts = write_texts(chain.from_iterable(_with_text(pairs, report)), folder)
    if not len(texts):
        raise UserError("no pair has text in both its anchor and its positive")
    pairs_P2 = np.unique(texts.rows_L.reshape(-1, 2), axis=0)  # by anchor, then by positive, in the order of the input
    report.pairs = len(pairs_P2)
    report.skipped["duplicate pairs"] += len(texts.rows_L) // 2 - len(pairs_P2)
    anchors_A, anchors_P = np.unique(pairs_P2[:, 0], return_inverse=True)
    report.anchors = len(anchors_A)
    positives, positives_P = np.unique(pairs_P2[:, 1], return_inverse=True)
    keys = [_key(text) for row in positives.tolist() for text in texts.read([row])]
    line_of = dict.fromkeys(keys, -1)  # of the positives, in the file of the corpus
    read = lines = 0

    def searched() -> Iterator[str]:
        nonlocal read, lines
        for text in () if corpus is None else _documents(corpus, report):
            read += 1
            key = _key(text.untitled if isinstance(text, TitledText) else text)
            if line_of.get(key, -1) < 0:  # not a positive that was read before, with this or another title
                if key in line_of:
                    line_of[key] = lines
                lines += 1
                yield text
        for key, row in zip(keys, positives.tolist(), strict=True):
            if line_of[key] < 0:  # the same ranker must score them
                yield from texts.read([row])

    documents = write_texts(searched(), folder)
    if corpus is not None:
        own = int(documents.rows_L[:lines].max()) + 1
        report.copies, report.added = read - own, len(documents) - own
    report.documents = len(documents)
    line_of_each = np.array([line_of[key] for key in keys])
    outside = documents.find(texts.keys_N[positives])
    row_of_each = np.where(line_of_each < 0, outside, documents.rows_L[line_of_each])
    return NumberedPairs(
        texts,
        documents,
        anchors_A,
        anchors_P.reshape(-1),
        row_of_each[positives_P.reshape(-1)],
        documents.find(texts.keys_N[anchors_A]),
    )


def _key(text: str) -> int:
    return hash(one_line(text))


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
