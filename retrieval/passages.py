"""The passages of an index: chunks of documents, each text once, and what a search returns of them."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from revela_hub.data.text.chunks import Chunk

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Hit:
    """A passage that was found.

    Attributes:
        score: How well it fits the query, higher is better: the vectors' similarity, or BM25's score.
        text: The passage.
        document: The id of its document.
        path: The file it is from, or None where the document is not a file.
        start_line: Its first line in the file, counted from 1.
        end_line: Its last line.
        copies: Where the same text is found again: locations as `location` writes them.
    """

    score: float
    text: str
    document: str
    path: str | None
    start_line: int
    end_line: int
    copies: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        """`path/to/file.py:120-145`."""
        return _location(self)

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary, for JSON."""
        return vars(self) | {"copies": list(self.copies)}


@dataclass
class Passages:
    """Texts to search, each of them once, with the places where it stands.

    Attributes:
        texts: The distinct texts, in the order in which they were first met.
        places: For each text the chunks it is the text of, the first one first.
        digests: For each text its BLAKE2 hash, the key of its vector in the cache.
    """

    texts: list[str] = field(default_factory=list)
    places: list[list[Chunk]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def hit(self, row: int, score: float) -> Hit:
        """The hit that text number `row` is."""
        first, *rest = self.places[row]
        return Hit(
            score=score,
            text=self.texts[row],
            document=first.document,
            path=first.path,
            start_line=first.start_line,
            end_line=first.end_line,
            copies=tuple(_location(chunk) for chunk in rest),
        )


def collect_passages(chunks: Iterable[Chunk]) -> Passages:
    """Gathers chunks; those with the same text become one passage, so that it is encoded, and found, once."""
    passages = Passages()
    rows: dict[bytes, int] = {}
    for chunk in chunks:
        digest = hashlib.blake2b(chunk.text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
        row = rows.setdefault(digest, len(passages.texts))
        if row == len(passages.texts):
            passages.texts.append(chunk.text)
            passages.places.append([chunk])
            passages.digests.append(digest)
        else:
            passages.places[row].append(chunk)
    return passages


def _location(place: Chunk | Hit) -> str:
    return f"{place.document if place.path is None else place.path}:{place.start_line}-{place.end_line}"
