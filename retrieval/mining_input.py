"""The input of mining: pairs of an anchor and a positive, and the corpus, numbered and without duplicate texts.

Letters in names: A anchors, P pairs, N texts of the corpus.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from revela_hub.data.sources.beir import find_file, is_beir, titled
from revela_hub.data.sources.rows import read_rows
from revela_hub.data.sources.source import SourceLike, parse_source
from revela_hub.data.sources.unicode import without_surrogates
from revela_hub.data.text.same_text import text_hash
from revela_hub.errors import UserError
from revela_hub.retrieval.texts import TextFile, write_texts


class NumberedPairs(NamedTuple):
    """Pairs of distinct anchors in memory and of texts of the corpus on disk, sorted by their anchors' numbers.

    The corpus holds all candidates for negatives, including the positives. `same_A` and `same_N` are hashes of the `text_key` of the
    anchors, and of the texts without their titles.
    """

    anchors: list[str]
    corpus: TextFile
    anchors_P: NDArray[np.int64]
    positives_P: NDArray[np.int64]
    same_A: NDArray[np.int64]
    same_N: NDArray[np.int64]

    def block(self, start: int, stop: int) -> "NumberedPairs":
        """Return the pairs of some of the anchors."""
        first, last = np.searchsorted(self.anchors_P, [start, stop])
        return self._replace(
            anchors=self.anchors[start:stop],
            anchors_P=self.anchors_P[first:last] - start,
            positives_P=self.positives_P[first:last],
            same_A=self.same_A[start:stop],
        )


class TitledText(str):
    """A title and a text, joined as in BEIR; a pair with the text alone has the same passage."""

    untitled: str

    def __new__(cls, title: object, text: str) -> "TitledText":
        """Join title and text."""
        joined = super().__new__(cls, titled(title, text))
        joined.untitled = text
        return joined


def number_pairs(
    pairs: Iterable[tuple[str, str]], corpus: Iterable[str] | None, folder: Path, skipped: Counter[str]
) -> NumberedPairs:
    """Write the corpus to a folder, and number its texts; counts what is skipped.

    Of anchors and of passages that are the same text (`text_key`), the first one stands for all.
    """
    anchors: dict[int, str] = {}  # by the hash of their `text_key`
    positives: dict[int, str] = {}
    distinct: dict[tuple[int, int], None] = {}
    for anchor, positive in pairs:
        if not (anchor and positive and anchor.strip() and positive.strip()):
            skipped["empty pairs"] += 1
            continue
        pair = _hash(anchor), _hash(positive)
        anchors.setdefault(pair[0], anchor)
        positives.setdefault(pair[1], positive)
        skipped["duplicate pairs"] += pair in distinct
        distinct[pair] = None
    if not distinct:
        raise UserError("no pair has text in both its anchor and its positive")
    corpus_writer = _Corpus(positives, skipped)
    written = TextFile(write_texts(corpus_writer.texts(corpus), folder))
    number_of = {key: number for number, key in enumerate(anchors)}
    pairs_P2 = np.array([(number_of[anchor], corpus_writer.rows[positive]) for anchor, positive in distinct])
    pairs_P2 = pairs_P2[np.argsort(pairs_P2[:, 0], kind="stable")]
    same_A, same_N = np.array(list(anchors), dtype=np.int64), np.array(corpus_writer.same)
    return NumberedPairs(list(anchors.values()), written, pairs_P2[:, 0], pairs_P2[:, 1], same_A, same_N)


class _Corpus:
    """The distinct texts to search; remembers their hashes, and the numbers of the positives."""

    def __init__(self, positives: dict[int, str], skipped: Counter[str]) -> None:
        self.rows: dict[int, int] = {}  # of the positives, by their hashes
        self.same = array("q")
        self._positives, self._skipped = positives, skipped

    def texts(self, corpus: Iterable[str] | None) -> Iterator[dict[str, str]]:
        """Yield the corpus, and then the positives that are not in it, because the same ranker must score them."""
        seen: set[int] = set()
        for text in () if corpus is None else corpus:
            if not (text and text.strip()):
                self._skipped["empty documents"] += 1
                continue
            whole, untitled = _hash(text), _hash(getattr(text, "untitled", text))
            positive = whole if whole in self._positives else untitled
            if whole in seen or positive in self.rows:  # a copy, or a positive that was read before with another title
                self._skipped["duplicate documents"] += 1
                continue
            seen.add(whole)
            yield self._numbered(text, untitled, positive)
        if corpus is not None and not self.same:
            raise UserError("the corpus has no document with text")
        for positive, text in self._positives.items():
            if positive not in self.rows:
                yield self._numbered(text, positive, positive)

    def _numbered(self, text: str, same: int, positive: int) -> dict[str, str]:
        if positive in self._positives:
            self.rows[positive] = len(self.same)
        self.same.append(same)
        return {"text": text}


def _hash(text: str) -> int:
    return text_hash(without_surrogates(text))  # as it is written: equal texts of a file have one number


def read_pairs(source: SourceLike, anchor_column: str, positive_column: str) -> Iterator[tuple[str, str]]:
    """Read pairs; a list of positives makes one pair each, and null counts as an empty text."""
    for row in read_rows(parse_source(source)):
        anchor = row.text(anchor_column)
        yield from ((anchor, positive) for positive in row.texts(positive_column))


def read_corpus(source: SourceLike, text_column: str) -> Iterator[str]:
    """Read the texts of a corpus or of the corpus in a BEIR folder; a title is joined to its text as in BEIR.

    Titles are in the source's `title_column`, by default `title`.
    """
    parsed = parse_source(source)
    if not parsed.is_dataset and is_beir(parsed.path):
        parsed = replace(parsed, path=str(find_file(parsed.path, "corpus.jsonl")))
    name = "title" if parsed.title_column is None else parsed.title_column
    for row in read_rows(parsed):
        text = row.text(text_column)
        title = row.value(name) if parsed.title_column else row.columns.get(name)
        yield TitledText(title, text) if title and text_column != name else text
