"""Overlap of training text with evaluation queries: which queries a model may have seen in training.

Two measures, for words in the normal form of `ngram_overlap`:

    exact    the training text contains all words of the query, in order; a query of fewer than five words must be a whole document
    n-gram   the training text contains n consecutive words of the query, with n = 13 as in GPT-3's analysis (arXiv 2005.14165,
             appendix C); a query of fewer words counts if it is contained exactly

The text is read once, a document at a time.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from revela_hub.data.sources.report import counted
from revela_hub.data.sources.source import Document
from revela_hub.data.text.ngram_overlap import MIN_CONTAINED_WORDS, hash_words, ngram_hashes
from revela_hub.data.text.words import words
from revela_hub.errors import UserError

EXAMPLES = 5


@dataclass(frozen=True)
class Match:
    """A query that training text contains.

    `document` is the first document that contains it, `shared` are the words in common in normal form, and `exact` says whether
    these are all words of the query.
    """

    query: str
    text: str
    document: str
    shared: str
    exact: bool


@dataclass(frozen=True)
class QueryOverlap:
    """Numbers of the queries, the documents and the words of an n-gram; and the queries with an overlap, in their order."""

    queries: int
    documents: int
    n: int
    matches: list[Match] = field(default_factory=list)

    @property
    def exact(self) -> int:
        """The number of queries that the text contains as a whole."""
        return sum(match.exact for match in self.matches)

    def to_dict(self) -> dict[str, object]:
        """Return a plain dictionary, for JSON."""
        return {
            "queries": self.queries,
            "documents": self.documents,
            "n": self.n,
            "exact": self.exact,
            "overlap": len(self.matches),
            "matches": [vars(match) for match in self.matches],
        }

    def __str__(self) -> str:
        """The counts, and some examples."""
        lines = [f"{counted(self.queries, 'query')}, {counted(self.documents, 'document')} of training text"]
        for name, number in (
            ("contained exactly", self.exact),
            (f"exactly, or by {self.n} words in a row", len(self.matches)),
        ):
            lines.append(f"{name:<32} {number:>7,}  {number / self.queries:6.1%}")
        for match in sorted(self.matches, key=lambda match: not match.exact)[:EXAMPLES]:
            text = match.text if len(match.text) <= 90 else f"{match.text[:87]}..."
            lines.append(
                f"  {match.query}: {text!r}\n    {'exactly' if match.exact else repr(match.shared)} in {match.document}"
            )
        if len(self.matches) > EXAMPLES:
            lines.append(f"  and {len(self.matches) - EXAMPLES:,} more; --json lists all")
        return "\n".join(lines)


def query_overlap(queries: Mapping[str, str], documents: Iterable[Document], n: int = 13) -> QueryOverlap:
    """Find the queries that documents contain, exactly or by an n-gram.

    >>> text = [
    ...     Document("d1", "They ask: does vitamin C prevent colds in winter?", None, "text"),
    ...     Document("d2", "zinc", None, "text"),
    ... ]
    >>> found = query_overlap({"q1": "Does vitamin C prevent colds?", "q2": "vitamin C", "q3": "Zinc"}, text)
    >>> [(match.query, match.document, match.exact) for match in found.matches]
    [('q1', 'd1', True), ('q3', 'd2', True)]
    """
    if n < 2:
        raise UserError(f"--ngram {n}: an overlap needs at least 2 words")
    finder = _Finder(queries, n)
    number = 0
    for number, document in enumerate(documents, start=1):  # noqa: B007 (it is used below)
        finder.read(document)
    return QueryOverlap(
        len(queries), number, n, [finder.matches[query] for query in queries if query in finder.matches]
    )


class _Finder:
    """Finds the n-grams of queries in documents, by their hashes."""

    def __init__(self, queries: Mapping[str, str], n: int) -> None:
        self.queries = queries
        self.tokens = {query: words(text) for query, text in queries.items()}
        self.matches: dict[str, Match] = {}
        # words -> queries that must be whole documents; length -> hash -> queries
        self.short: dict[str, list[str]] = defaultdict(list)
        self.of_gram: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for query, found in self.tokens.items():
            if len(found) < MIN_CONTAINED_WORDS:
                self.short[" ".join(found)].append(query)
                continue
            length = min(n, len(found))
            for gram in np.unique(ngram_hashes(hash_words(found), length)).tolist():
                self.of_gram[length][gram].append(query)
        self.hashes = {length: np.array(sorted(grams), np.uint64) for length, grams in self.of_gram.items()}

    def read(self, document: Document) -> None:
        """Add the matches of a document."""
        read = words(document.text)
        if 0 < len(read) < MIN_CONTAINED_WORDS:
            for query in self.short.get(" ".join(read), []):
                self._add(query, document, " ".join(read), exact=True)
        hashed, joined = hash_words(read), ""
        for length, known in self.hashes.items():
            grams = ngram_hashes(hashed, length)
            for place in np.flatnonzero(np.isin(grams, known)):
                joined = joined or f" {' '.join(read)} "
                for query in self.of_gram[length][int(grams[place])]:
                    exact = f" {' '.join(self.tokens[query])} " in joined
                    self._add(query, document, " ".join(read[place : place + length]), exact=exact)

    def _add(self, query: str, document: Document, shared: str, *, exact: bool) -> None:
        if query not in self.matches or (exact and not self.matches[query].exact):
            self.matches[query] = Match(query, self.queries[query], document.id, shared, exact)
