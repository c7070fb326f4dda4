"""The input of mining on disk, each text once: pairs of an anchor and a positive, and the corpus.

Letters in names: P pairs.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from revela_hub.errors import UserError
from revela_hub.retrieval.mining.negatives import MiningReport
from revela_hub.retrieval.scores import Corpus
from revela_hub.retrieval.texts import Texts, write_texts


class NumberedPairs(NamedTuple):
    """Pairs and corpus on disk. The pairs are sorted by their anchors' numbers.

    Attributes:
        anchors: The distinct anchors.
        corpus: All that may become a negative, the positives among them.
        texts: Anchors and positives as they were given.
        anchors_P: The anchor of each pair, a number in `anchors`.
        positives_P: The positive of each pair, a number in `corpus`.
        given_P: The same, a number in `texts`.
        anchors_in_corpus: For each anchor its number in the corpus, -1 for most.
    """

    anchors: Texts
    corpus: Corpus
    texts: Texts
    anchors_P: NDArray[np.int64]
    positives_P: NDArray[np.int64]
    given_P: NDArray[np.int64]
    anchors_in_corpus: NDArray[np.int64]


def number_pairs(
    pairs: Iterable[tuple[str, str]], corpus: Iterable[str] | None, folder: Path, report: MiningReport
) -> NumberedPairs:
    """Writes pairs and corpus to a folder and numbers their texts; what is read is counted in the report.

    Raises:
        UserError: There is no pair or no document with text in it, or the disk is full.
    """
    texts, rows = write_texts(chain.from_iterable(_with_text(pairs, report)), folder)
    if not len(texts):
        raise UserError("there is no pair with text in both its anchor and its positive")
    pairs_P2 = np.unique(rows.reshape(-1, 2), axis=0)  # sorted by anchor, then by positive, in the order of the input
    report.pairs = len(pairs_P2)
    report.skipped["pairs given twice"] += len(rows) // 2 - len(pairs_P2)
    distinct, anchors_P = np.unique(pairs_P2[:, 0], return_inverse=True)
    anchors = texts.subset(distinct)
    report.anchors = len(anchors)
    positives = texts.subset(np.unique(pairs_P2[:, 1]))
    parts = [positives]
    if corpus is not None:
        documents, lines = write_texts(_documents_with_text(corpus, report), folder)
        if not len(documents):
            raise UserError("the corpus has no document with text in it")
        report.copies = len(lines) - len(documents)
        outside = np.flatnonzero(documents.find(positives.keys_N) < 0)
        report.added = len(outside)
        parts = [documents, positives.subset(outside)] if len(outside) else [documents]
    searched = Corpus(parts)
    report.documents = len(searched)
    positives_P = searched.find(texts.keys_N[pairs_P2[:, 1]])
    in_corpus = searched.find(anchors.keys_N)
    return NumberedPairs(anchors, searched, texts, anchors_P.reshape(-1), positives_P, pairs_P2[:, 1], in_corpus)


def _with_text(pairs: Iterable[tuple[str, str]], report: MiningReport) -> Iterator[tuple[str, str]]:
    for anchor, positive in pairs:
        if anchor.strip() and positive.strip():
            yield anchor, positive
        else:
            report.skipped["empty pairs"] += 1


def _documents_with_text(corpus: Iterable[str], report: MiningReport) -> Iterator[str]:
    for text in corpus:
        if text.strip():
            yield text
        else:
            report.skipped["empty documents"] += 1
