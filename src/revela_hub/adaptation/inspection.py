"""Statistics of a text, which `adapt` prints before it starts."""

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from revela_hub.data.sources.documents import read_documents
from revela_hub.data.sources.report import ReadReport, counted
from revela_hub.data.sources.source import SourceLike
from revela_hub.data.text.ngram_overlap import NearDuplicates
from revela_hub.data.text.words import count_words
from revela_hub.evaluation.probe_queries import passages_of_each

MAX_CHARACTERS = 8_000_000
"""Characters that are inspected."""
SAMPLE = 64
"""Passages on which the retriever's speed is measured."""


@dataclass(frozen=True)
class Inspection:
    """Numbers that describe a text.

    Attributes:
        documents: number of documents inspected.
        words: number of their words.
        code: fraction of the characters in files of code.
        median_words: median length of a document.
        passages: number of passages.
        duplicates: number of passages that are near-duplicates of an earlier one.
        pairs: number of passages by the kind of their natural query; "none" for those without.
        complete: whether all of the text was inspected.
        sample: some passages, evenly spread.
    """

    documents: int
    words: int
    code: float
    median_words: int
    passages: int
    duplicates: int
    pairs: Counter[str]
    complete: bool
    sample: tuple[str, ...] = ()

    @property
    def natural_pairs(self) -> int:
        """The number of passages with a natural query."""
        return self.pairs.total() - self.pairs["none"]

    @property
    def has_code(self) -> bool:
        """Whether a tenth of the text or more is code."""
        return self.code >= 0.1

    def __str__(self) -> str:
        """Three lines."""
        kind = "code" if self.code > 0.9 else "prose" if not self.has_code else f"{self.code:.0%} code, the rest prose"
        sample = "" if self.complete else " (a part of the text)"
        natural = ", ".join(f"{number:,} {kind}" for kind, number in self.pairs.most_common() if kind != "none")
        return (
            f"text: {counted(self.documents, 'document')}, {counted(self.words, 'word')}, {kind};"
            f" median {counted(self.median_words, 'word')}{sample}\n"
            f"passages: {self.passages:,}, {self.duplicates / max(1, self.passages):.1%} of them near-duplicates\n"
            f"natural pairs: {natural or 'none'}"
        )


def inspect(sources: Iterable[SourceLike], report: ReadReport) -> Inspection:
    """Read a text, or its first millions of characters, and count what is in it."""
    lengths: list[int] = []
    characters, code, passages, duplicates = 0, 0, 0, 0
    pairs: Counter[str] = Counter()
    seen = NearDuplicates()
    complete, texts = True, list[str]()
    documents = read_documents(sources, report=report)
    for document, found in passages_of_each(documents, lambda document: Random(document.id)):
        if characters + len(document.text) > MAX_CHARACTERS and lengths:
            complete = False
            break
        characters += len(document.text)
        code += len(document.text) if document.kind == "code" else 0
        lengths.append(count_words(document.text))
        for passage in found:
            passages += 1
            duplicates += passage.text in seen
            seen.add(passage.text)
            texts.append(passage.text)
            pairs[next(iter(passage.candidates), "none")] += 1
    median = int(statistics.median(lengths)) if lengths else 0
    return Inspection(
        len(lengths),
        sum(lengths),
        code / max(1, characters),
        median,
        passages,
        duplicates,
        pairs,
        complete,
        tuple(texts[:: max(1, len(texts) // SAMPLE)][:SAMPLE]),
    )
