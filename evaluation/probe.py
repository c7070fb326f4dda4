"""A probe: a retrieval task made from raw text, for evaluation without labels.

    documents --passages_of_each--> passages with candidate queries --> without near-duplicates --> a few hundred queries
              --in_shape, resembling--> shorter queries --> BEIR

The text of a query is removed from its passage and from the training text: `held_out.jsonl` lists documents and texts, and
`Source.held_out` removes them when documents are read. A query whose text also occurs in another document is not used. The
same text, settings and seed give the same probe.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, zip_longest
from pathlib import Path
from random import Random
from typing import Any

from revela_hub.data.sources.beir import RetrievalTask, read_beir, write_beir
from revela_hub.data.sources.documents import HELD_OUT, read_documents
from revela_hub.data.sources.report import ReadReport, counted
from revela_hub.data.sources.source import Document, SourceLike
from revela_hub.data.text.ngram_overlap import NearDuplicates
from revela_hub.data.text.same_text import letters, one_form, text_key
from revela_hub.errors import UserError
from revela_hub.evaluation.probe_queries import Candidate, Passage, ProbeKind, passages_of_each
from revela_hub.evaluation.query_shapes import QueryShape, in_shape, resembling
from revela_hub.files import claim, local_path

KINDS: tuple[ProbeKind, ...] = ("docstring", "title", "sentence")
MIN_QUERIES = 20
MAX_TITLE_PASSAGES = 5
FEWEST_OF_A_DOCUMENT = 5
"""Consecutive passages of a document: those around the answer are the wrong answers that are hardest to tell from it."""
SCANNED_CHARACTERS = 32_000_000
"""Maximum number of characters that are read and held in memory."""


class NoProbe(UserError):
    """The text has too few candidate queries for a probe."""


@dataclass(frozen=True)
class ProbeSettings:
    """The settings of a probe.

    Attributes:
        queries: Maximum number of queries.
        passages: Maximum number of passages in the corpus.
        kinds: Kinds of queries; the queries are divided evenly among the kinds found in the text.
        seed: The random seed.
        shape: Shape of the queries that are sentences (`evaluation.query_shapes`).
    """

    queries: int = 200
    passages: int = 1000
    kinds: tuple[ProbeKind, ...] = KINDS
    seed: int = 0
    shape: QueryShape = "short"


@dataclass(frozen=True)
class Probe:
    """A retrieval task made from text, and the texts that must be removed from the training text.

    Attributes:
        task: The task; the id of a query begins with its kind.
        held_out: Document id to the texts to remove.
        documents: The number of documents read.
        complete: Whether all of the text was read.
        documents_of: Passage id to document id.
    """

    task: RetrievalTask
    held_out: dict[str, list[str]]
    documents: int = 0
    complete: bool = True
    settings: ProbeSettings = field(default_factory=ProbeSettings)
    documents_of: dict[str, str] = field(default_factory=dict)

    @property
    def kinds(self) -> Counter[str]:
        """The number of queries of each kind."""
        return Counter(kind_of(query) for query in self.task.queries)

    @property
    def documents_asked(self) -> int:
        """The number of documents that have the answer to a query."""
        return len({self.documents_of.get(answer, answer) for found in self.task.qrels.values() for answer in found})

    def __str__(self) -> str:
        """A summary in one line."""
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.kinds.items()))
        used, least = len(set(self.documents_of.values())), "" if self.complete else "at least "
        share = f"{used:,} of {least}{counted(self.documents, 'document')}"
        queries, passages = counted(len(self.task.queries), "query"), f"{len(self.task.corpus):,} passages"
        return f"probe: {queries} ({kinds}) from {self.documents_asked:,} documents, for {passages} from {share}"

    def examples(self, number: int = 5) -> list[tuple[str, str]]:
        """Return some queries of every kind, each with its relevant passage in one line."""
        by_kind = ([query for query in self.task.queries if kind_of(query) == kind] for kind in self.kinds)
        chosen = [query for turn in zip_longest(*by_kind) for query in turn if query][:number]
        passages = [self.task.corpus[next(iter(self.task.qrels[query]))] for query in chosen]
        return [(self.task.queries[q], " ".join(text.split())) for q, text in zip(chosen, passages, strict=True)]


def kind_of(query_id: str) -> str:
    """Return the kind in a query's id (`sentence-17` -> `sentence`)."""
    return query_id.rpartition("-")[0]


def build_probe(
    sources: Iterable[SourceLike] | SourceLike,
    settings: ProbeSettings | None = None,
    *,
    examples: Sequence[str] = (),
    report: ReadReport | None = None,
    **defaults: Any,
) -> Probe:
    """Make a probe from the sources' documents.

    Args:
        sources: As for `read_documents`.
        settings: The settings of the probe.
        examples: Real queries without labels; sentences and docstrings get the shapes that resemble them most.
        report: Its counts are updated while reading.
        **defaults: Default values for fields of `Source`.

    Raises:
        NoProbe: The text has fewer than 20 candidate queries.
        UserError: As `read_documents`.
    """
    settings = settings or ProbeSettings()
    random = Random(settings.seed)
    documents, complete = _read(read_documents(sources, report=report, **defaults))
    order = random.sample(range(len(documents)), len(documents))
    passages = _passages([documents[index] for index in order], settings, random)
    asked = _ask(passages, documents, settings, random)
    if len(asked) < MIN_QUERIES:
        raise NoProbe(
            f"the text has {counted(len(asked), 'candidate query')}, but a probe needs at least {MIN_QUERIES}: too few of the"
            f" {counted(len(passages), 'distinct passage')} in {counted(len(documents), 'document')} have a docstring, a comment"
            " above a function, a heading, or three sentences and 20 words, which no other text repeats; add more text, or skip"
            " copies and older versions (exclude)"
        )
    task, held_out = _hold_out(passages, asked)
    # Shorter queries: sentences in one shape, or sentences and docstrings in shapes that resemble the examples.
    kinds = ("sentence", "docstring") if examples else ("sentence",)
    made = {id_: text for id_, text in task.queries.items() if kind_of(id_) in kinds}
    texts = list(task.corpus.values())
    shaped = resembling(made, examples, texts) if examples else in_shape(settings.shape, made, texts)
    task = replace(task, queries=task.queries | shaped)
    documents_of = {f"p{index}": passage.document for index, passage in enumerate(passages)}
    task = replace(task, groups={query: documents_of[next(iter(found))] for query, found in task.qrels.items()})
    return Probe(task, held_out, len(documents), complete, settings, documents_of)


def _read(documents: Iterable[Document]) -> tuple[list[Document], bool]:
    """Return the first documents, up to the maximum number of characters, and whether these are all."""
    read: list[Document] = []
    characters = 0
    for document in documents:
        characters += len(document.text)
        if characters > SCANNED_CHARACTERS and read:
            return read, False
        read.append(document)
    return read, True


def _passages(documents: Sequence[Document], settings: ProbeSettings, random: Random) -> list[Passage]:
    """Return distinct passages, up to the maximum: some consecutive ones of each document, and more if these are too few."""
    passages: list[Passage] = []
    seen = NearDuplicates()
    each = max(FEWEST_OF_A_DOCUMENT, settings.passages // max(1, len(documents)))
    rest: Iterable[list[Passage]] = (
        found[(start := random.randrange(len(found) or 1)) :] + found[:start]
        for _, found in passages_of_each(documents, lambda _: random)
    )
    while rest:
        later = []
        for found in rest:
            for passage in found[:each]:
                if passage.text not in seen:
                    seen.add(passage.text)
                    passages.append(passage)
                if len(passages) == settings.passages:
                    return passages
            later += [found[each:]] if found[each:] else []
        rest = later
    return passages


@dataclass(frozen=True)
class _Asked:
    """A query of the probe, and the positions of its relevant passages."""

    candidate: Candidate
    passages: tuple[int, ...]


def _ask(
    passages: Sequence[Passage], documents: Sequence[Document], settings: ProbeSettings, random: Random
) -> dict[str, _Asked]:
    """Choose the queries, by id: an equal number of each kind, and the rest from kinds that have more."""
    offers = {kind: iter(_offers(passages, kind, random)) for kind in settings.kinds}
    texts: dict[str, list[str]] = defaultdict(list)  # ids of rows need not be unique
    for document in documents:
        texts[document.id].append(document.text)
    # A heading is found by its case and punctuation, which the sentences below it do not repeat; other texts without.
    forms = {kind: one_form if kind == "title" else letters for kind in settings.kinds}
    everything = {form: "\0".join(form(document.text) for document in documents) for form in set(forms.values())}
    seen, taken, asked = NearDuplicates(), set[int](), dict[str, _Asked]()

    def fits(kind: ProbeKind, offer: _Asked) -> bool:
        """Return whether the query is new, and its text (of a title, the whole heading) occurs only where it is removed."""
        query, removed = offer.candidate.text, offer.candidate.removed
        own = {passages[index].document for index in offer.passages}
        if taken.intersection(offer.passages) or query in seen:
            return False
        if any(sum(text.count(removed) for text in texts[document]) != 1 for document in own):
            return False
        form = forms[kind]
        whole, query, removed = everything[form], form(query), form(removed)
        alone = kind == "title" or whole.count(query) == len(own) * removed.count(query)
        return alone and whole.count(removed) == len(own)

    while offers and len(asked) < settings.queries:
        for kind, candidates in list(offers.items()):
            offer = next((each for each in candidates if fits(kind, each)), None)
            if offer is None:
                del offers[kind]
            elif len(asked) < settings.queries:
                seen.add(offer.candidate.text)
                taken.update(offer.passages)
                asked[f"{kind}-{len(asked)}"] = offer
    return asked


def _offers(passages: Sequence[Passage], kind: ProbeKind, random: Random) -> list[_Asked]:
    by_text: dict[str, list[int]] = defaultdict(list)
    for index, passage in enumerate(passages):
        if candidate := passage.candidates.get(kind):
            by_text[text_key(candidate.text)].append(index)
    most = MAX_TITLE_PASSAGES if kind == "title" else 1  # other queries must have a single answer
    few = [found for found in by_text.values() if len(found) <= most]
    offers = random.sample([_Asked(passages[found[-1]].candidates[kind], tuple(found)) for found in few], len(few))
    # One of each document, then a second one: of as many documents as possible.
    turns = defaultdict[str, Iterator[int]](count)
    return sorted(offers, key=lambda offer: next(turns[passages[offer.passages[-1]].document]))


def _hold_out(passages: Sequence[Passage], asked: dict[str, _Asked]) -> tuple[RetrievalTask, dict[str, list[str]]]:
    """Return the task, and the texts of its queries by document, which are removed from the passages."""
    texts = [passage.text for passage in passages]
    held_out: dict[str, list[str]] = defaultdict(list)
    for query in asked.values():
        removed = query.candidate.removed
        for index in query.passages:
            if removed not in held_out[passages[index].document]:
                held_out[passages[index].document].append(removed)
            texts[index] = texts[index].replace(removed, " ")
    task = RetrievalTask(
        corpus={f"p{index}": text.strip() for index, text in enumerate(texts)},
        queries={id_: query.candidate.text for id_, query in asked.items()},
        qrels={id_: {f"p{index}": 1 for index in query.passages} for id_, query in asked.items()},
        name="probe",
    )
    return task, dict(held_out)


def write_probe(probe: Probe, folder: str | Path) -> Path:
    """Write the task as a BEIR folder (split `test`), with `held_out.jsonl` and `probe.json`, in place of an earlier probe.

    Raises:
        UserError: The folder contains files other than those of an earlier probe.
    """
    folder = local_path(folder)
    metadata = asdict(probe.settings) | {
        "made": dict(probe.kinds),
        "documents_asked": probe.documents_asked,
        "documents_used": len(set(probe.documents_of.values())),
        "documents_read": probe.documents,
        "all_of_the_text": probe.complete,
    }
    rows = ({"document": id_, "text": text} for id_, texts in probe.held_out.items() for text in texts)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_beir(probe.task, claim(folder))  # other files in the folder are kept
    (folder / HELD_OUT).write_text(lines, encoding="utf-8", newline="\n")
    (folder / "probe.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return folder


def read_probe_task(folder: str | Path) -> RetrievalTask:
    """Read the task in a folder written by `revela-hub probe` (or any BEIR folder), with the name "probe"."""
    return replace(read_beir(folder), name="probe")
