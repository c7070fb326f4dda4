"""The contents of a text, and how much of it `adapt` can encode and train on in the time that it has."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random

from sentence_transformers import SentenceTransformer

from revela_hub.data.sources.documents import read_documents
from revela_hub.data.sources.report import ReadReport, counted
from revela_hub.data.sources.source import SourceLike
from revela_hub.data.text.chunks import chunk_document
from revela_hub.data.text.words import count_words
from revela_hub.evaluation.probe_queries import MAX_WORDS, passages_of_each
from revela_hub.retrieval.encoder import length_limit
from revela_hub.retrieval.encoding import encode_texts
from revela_hub.retrieval.passages import without_notices
from revela_hub.retrieval.rerank import has_tokens

MAX_CHARACTERS = 8_000_000
"""Characters that are inspected."""
SAMPLE = 64
"""Passages on which the retriever's speed is measured."""
MAX_PASSAGES, MIN_PASSAGES = 1000, 200
"""Passages of the probe."""
MEASURING = 0.4
"""Fraction of the budget for measuring: the number of passages is chosen so that it suffices."""
ENCODINGS_PER_CANDIDATE = 2.5
"""Number of times that the passages are encoded: a quarter of them five times in training, all afterwards, and a reserve."""
MIN_STEPS = 20
"""Steps that a training should have: on a slow machine, its texts are cut."""
STEP_COST = 4
"""Time of a step, in units of one encoding of its passages."""
MIN_LENGTH = 64
"""Tokens to which texts are cut at most."""
BATCH_SIZE = 32
"""Pairs per step of a training on pairs."""
TOKENS_IN_MEMORY = 8192
"""Tokens of passages that a training on pairs has in memory at a time."""


@dataclass(frozen=True)
class Inspection:
    """Numbers that describe a text."""

    documents: int
    words: int
    code: float
    """Fraction of the characters in files of code."""
    passages: int
    pairs: Counter[str]
    """Passages by the kind of their natural query; "none" for those without."""
    searched: int
    """Passages that a search of the text encodes."""
    complete: bool
    sample: tuple[str, ...]
    """Some passages, evenly spread."""

    @property
    def has_code(self) -> bool:
        """Whether a tenth of the text or more is code."""
        return self.code >= 0.1

    def __str__(self) -> str:
        """Two lines."""
        kind = "code" if self.code > 0.9 else "prose" if not self.has_code else f"{self.code:.0%} code, the rest prose"
        sample = "" if self.complete else " (a part of the text)"
        natural = ", ".join(f"{number:,} {kind}" for kind, number in self.pairs.most_common() if kind != "none")
        return (
            f"text: {counted(self.documents, 'document')}, {counted(self.searched, 'passage')},"
            f" {counted(self.words, 'word')}, {kind}{sample}\nnatural pairs: {natural or 'none'}"
        )


def inspect(sources: Iterable[SourceLike], report: ReadReport) -> Inspection:
    """Read a text, or its first millions of characters, and count what is in it."""
    documents, words, characters, code = 0, 0, 0, 0
    texts: list[str] = []
    searched: set[str] = set()
    pairs: Counter[str] = Counter()
    complete = True
    for document, passages in passages_of_each(
        read_documents(sources, report=report), lambda document: Random(document.id)
    ):
        if documents and characters + len(document.text) > MAX_CHARACTERS:
            complete = False
            break
        documents += 1
        words += count_words(document.text)
        searched |= {chunk.text for chunk in chunk_document(without_notices(document), MAX_WORDS)}
        characters += len(document.text)
        code += len(document.text) if document.kind == "code" else 0
        texts += [passage.text for passage in passages]
        pairs.update(next(iter(passage.candidates), "none") for passage in passages)
    sample = tuple(texts[:: max(1, len(texts) // SAMPLE)][:SAMPLE])
    part = code / max(1, characters)
    return Inspection(documents, words, part, len(texts), pairs, len(searched), complete, sample)


@dataclass(frozen=True)
class Plan:
    """The sizes that the budget and the retriever's speed on this machine allow; a repeated command keeps it.

    The probe has `passages` passages, and distillation takes as many of the text. Seconds of measuring are more than `MEASURING` of the
    budget if even the fewest passages take longer. `training_length` is the maximum number of tokens in training, less than
    `max_length` on a slow machine; None is no maximum. `encoding` is the time to encode a passage, in seconds.
    """

    passages: int
    measuring: float
    training: dict[str, float]
    max_length: int | None = None
    training_length: int | None = None
    encoding: float = 0.0

    def __str__(self) -> str:
        """One line."""
        parts = ", ".join(f"{name.replace('_', ' ')} {each / 60:.1f}" for name, each in self.training.items())
        length = f"; slow machine: training texts are cut at {self.training_length} tokens"
        cut = length if self.training_length != self.max_length else ""
        return f"plan, in minutes: training with {parts}; measuring {self.measuring / 60:.1f}{cut}"


def make_plan(model: SentenceTransformer, sample: Iterable[str], budget: float, weights: Mapping[str, float]) -> Plan:
    """Measure how fast a retriever encodes passages, and divide the budget between candidates by their weights."""
    texts = list(sample) or [""]  # of an empty text: making the probe raises the error
    encode_texts(model, texts[:8], "document")  # the first call is slower
    began = time.monotonic()
    encode_texts(model, texts, "document")
    seconds = (time.monotonic() - began) / len(texts)
    # The base model and the candidates; late interaction encodes the passages again.
    encodings = 1 + ENCODINGS_PER_CANDIDATE * len(weights) + (1 + len(weights)) * has_tokens(model)
    measuring = max(budget * MEASURING, MIN_PASSAGES * encodings * seconds)
    passages = min(MAX_PASSAGES, max(MIN_PASSAGES, int(measuring / encodings / seconds)))
    whole = budget * (1 - MEASURING) / sum(weights.values() or [1])
    training = {name: whole * weight for name, weight in weights.items()}
    longest = length_limit(model)
    cut = training_length(longest, max(training.values(), default=budget), seconds) if longest else None
    return Plan(passages, measuring, training, longest, cut, seconds)


def training_length(longest: int, budget: float, seconds: float) -> int:
    """Return the number of tokens to which training texts are cut, so that a slow machine takes about `MIN_STEPS` steps.

    `longest` is the retriever's maximum, `budget` the seconds of the training, and `seconds` those to encode a passage.
    """
    steps = budget / (STEP_COST * seconds * BATCH_SIZE)
    return min(longest, max(MIN_LENGTH, int(longest * steps / MIN_STEPS)))


def pairs_in_memory(length: int | None) -> int:
    """Return the number of pairs of `length` tokens that are in memory at a time; the rest of a batch follows (GradCache)."""
    return max(1, min(BATCH_SIZE, TOKENS_IN_MEMORY // (length or 1)))
